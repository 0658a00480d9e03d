"""Verification, n-gram drafts and routing natively: real sizes, CUDA graphs, no word to the host."""

from collections.abc import Callable

import pytest
import torch

from kernels.sampling.ngram import find_ngrams
from kernels.sampling.random import Stream
from kernels.sampling.verification import verify
from kernels.token_routing import gather_rows, scatter_add_rows, select_tokens
from tests.kernels.test_sampling import check_frequencies
from tests.kernels.test_verification import Cases, stream

pytestmark = pytest.mark.gpu


def check_that_nothing_waits(step: Callable[[], object]) -> None:
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("has_draft", [False, True], ids=["certain", "drawn"])
def test_many_cases(has_draft: bool, is_tree: bool) -> None:
    cases = Cases(2500, seed=1, has_draft=has_draft, is_tree=is_tree)
    cases.draw_from(stream(2500))
    cases.check(cases.verify(torch.device("cuda"), stream(2500, "cuda")))


@pytest.mark.parametrize("batch", [1, 40])
def test_whole_vocabularies(batch: int) -> None:
    """Against the CPU form."""
    vocabulary, n = 128_256, 4
    p = torch.softmax(3 * torch.randn(batch, n + 1, vocabulary), -1)
    q = torch.softmax((p + 1e-9).log() + 0.5 * torch.randn(batch, n + 1, vocabulary), -1)
    parents = torch.tensor([0, 0, 1, 1]).expand(batch, -1)
    tokens = torch.multinomial(q[torch.arange(batch)[:, None], parents].flatten(0, 1), 1).view(batch, n)
    counts = torch.arange(batch) % (n + 1)
    for is_tree in (False, True):
        given = {"counts": counts, "lengths": counts, "parents": parents if is_tree else None}
        there = {name: None if x is None else x.cuda() for name, x in given.items()}
        expected = verify(p, q, tokens, stream=stream(batch), **given)
        actual = verify(p.cuda(), q.cuda(), tokens.cuda(), stream=stream(batch, "cuda"), **there)
        assert int((actual.tokens.cpu() != expected.tokens).any(dim=1).sum()) <= batch // 40


@pytest.mark.parametrize("siblings", [1, 3])
def test_frequencies_of_a_million_rounds(siblings: int) -> None:
    rows = 1_000_000
    p, q = torch.softmax(1.5 * torch.randn(2, 20, device="cuda"), -1)
    tokens = torch.multinomial(q, rows * siblings, replacement=True).view(rows, siblings)
    counts = torch.full((rows,), siblings, device="cuda")
    target, draft = (x.expand(rows, siblings + 1, -1) for x in (p, q))
    own = stream(rows, "cuda")
    output = verify(target, draft, tokens, counts=counts, lengths=counts, stream=own, parents=torch.zeros_like(tokens))
    check_frequencies(output.tokens[:, 0].bincount(minlength=20).cpu().float(), p.cpu())


def test_a_round_in_a_cuda_graph_without_the_host() -> None:
    batch, n, vocabulary = 8, 4, 32_000
    p = torch.softmax(torch.randn(batch, n + 1, vocabulary, device="cuda"), -1)
    text = torch.randint(0, 5, (batch, 3000), device="cuda")
    lengths = torch.arange(100, 100 + batch, dtype=torch.int32, device="cuda")
    seeds, zeros = torch.arange(batch, device="cuda"), torch.zeros(batch, dtype=torch.int32, device="cuda")

    def round_of_drafts() -> torch.Tensor:
        drafts, counts = find_ngrams(text, lengths, n)
        return verify(p, None, drafts, counts=counts, lengths=lengths, stream=Stream(seeds, zeros, lengths)).tokens

    check_that_nothing_waits(round_of_drafts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = round_of_drafts()
    p.copy_(torch.softmax(3 * torch.randn(batch, n + 1, vocabulary, device="cuda"), -1))
    lengths.add_(1000)
    graph.replay()
    assert torch.equal(captured.clone(), round_of_drafts())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing_in_a_cuda_graph_without_the_host(dtype: torch.dtype) -> None:
    tokens, size, capacity = 5000, 4096, 700
    x = torch.randn(tokens, size, device="cuda").to(dtype)
    mask = torch.zeros(tokens, dtype=torch.bool, device="cuda")
    gate = torch.rand(capacity, device="cuda")

    def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        index, count = select_tokens(mask, capacity)
        rows = gather_rows(x, index)
        return scatter_add_rows(x, index, 2 * rows, gate), index, count

    check_that_nothing_waits(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, index, count = layer()
    mask.copy_(torch.rand(tokens, device="cuda") < 0.1)
    graph.replay()
    selected = mask.nonzero()[:, 0]
    assert int(count) == len(selected) < capacity
    assert torch.equal(index[: len(selected)], selected) and bool((index[len(selected) :] == tokens).all())
    assert torch.equal(y[~mask], x[~mask])
    expected = x[selected].float() * (1 + 2 * gate[: len(selected), None])
    torch.testing.assert_close(y[selected].float(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
