"""Sampling natively: whole vocabularies, frequencies of a million draws, CUDA graphs, no word to the host."""

import math

import pytest
import torch
from torch import Tensor

from kernels.sampling.logit_adjustments import (
    ALWAYS,
    RequestState,
    adjust_scores,
    adjust_scores_reference,
    count_tokens,
)
from kernels.sampling.random import Purpose, Stream, exponential
from kernels.sampling.sample import Filters, adjusted_probabilities, sample, sample_tokens
from kernels.sampling.token_logprobs import token_logprobs, token_logprobs_reference
from tests.compare import check_close
from tests.kernels.test_sampling import check_frequencies, random_parameters

pytestmark = pytest.mark.gpu


def filters(rows: int, **given: float) -> Filters:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
    return Filters(*(torch.full((rows,), value, device="cuda") for value in values.values()))


def mixed(rows: int) -> Filters:
    return Filters(*(x.cuda() for x in random_parameters(rows).values()))


def stream(rows: int) -> Stream:
    zeros = torch.zeros(rows, dtype=torch.int32, device="cuda")
    return Stream(torch.arange(rows, device="cuda"), zeros, zeros)


def check_row(p: Tensor, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Against a sort in fp64. Where sums of fp32 cannot tell, a token may be kept or not."""
    if temperature == 0:
        assert int(p.argmax()) == int(logits.argmax()) and float(p.max()) == float(p.sum()) == 1
        return
    scores = (logits.double() - logits.max().double()) / temperature
    ordered = scores.sort(descending=True).values
    top_k = min(int(top_k), len(scores))
    weights = torch.where(ordered >= ordered[top_k - 1], ordered.exp(), 0) if top_k else ordered.exp()
    above = (weights.cumsum(0) - weights) / weights.sum()
    above = above[torch.searchsorted(-ordered, -scores)]  # of tied tokens, where the first of them stands
    in_top_k = scores >= ordered[top_k - 1] if top_k else torch.ones_like(scores, dtype=torch.bool)
    margins = torch.minimum(top_p - above if top_p < 1 else torch.ones_like(above), scores - math.log(min_p or 1e-99))
    margins[scores == 0] = 1
    # A GPU takes what is below the least normal number for 0.
    normal = scores.exp() / weights.sum() >= torch.finfo(torch.float32).tiny
    assert bool((p[in_top_k & (margins > 2e-5) & normal] > 0).all()) and not p[~in_top_k | (margins < -2e-5)].any()
    kept = torch.where(p > 0, scores.exp(), 0)
    torch.testing.assert_close(p.double(), kept / kept.sum(), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 128_256), (33, 49_152), (300, 151_937), (5, 7)])
def test_tokens_and_distributions(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits, settings, own = (3 * torch.randn(rows, vocabulary, device="cuda")).to(dtype), mixed(rows), stream(rows)
    p = adjusted_probabilities(logits, **settings._asdict())
    for row, limits in enumerate(zip(*(x[:30].tolist() for x in settings), strict=True)):
        check_row(p[row], logits[row], *limits)
    tokens = sample_tokens(logits, settings, own)
    # Two values of the race may be equal up to rounding: once in many thousands of rows.
    expected = sample(p, exponential(own, vocabulary, Purpose.TARGET))
    assert int((tokens != expected).sum()) <= 1


@pytest.mark.parametrize("given", [{}, {"top_k": 50}, {"top_p": 0.8}, {"min_p": 0.02, "temperature": 1.4}], ids=str)
def test_frequencies_of_a_million_draws(given: dict[str, float]) -> None:
    rows, logits = 1_000_000, 2 * torch.randn(300, device="cuda")
    tokens = sample_tokens(logits.expand(rows, -1), filters(rows, **given), stream(rows))
    expected = adjusted_probabilities(
        logits[None].cpu(), **{k: v[:1].cpu() for k, v in filters(1, **given)._asdict().items()}
    )
    check_frequencies(tokens.bincount(minlength=300).cpu().float(), expected[0])


def test_the_same_tokens_in_any_batch() -> None:
    logits, settings, own = torch.randn(200, 32_000, device="cuda"), mixed(200), stream(200)
    together = sample_tokens(logits, settings, own)
    for row in (0, 57, 199):
        one = slice(row, row + 1)
        alone = sample_tokens(logits[one], Filters(*(x[one] for x in settings)), Stream(*(x[one] for x in own)))
        assert torch.equal(alone, together[one])


def test_draws_are_those_of_the_cpu() -> None:
    own = stream(20)
    there, here = (
        exponential(own, 5000, Purpose.DRAFT),
        exponential(Stream(*(x.cpu() for x in own)), 5000, Purpose.DRAFT),
    )
    torch.testing.assert_close(there.cpu(), here, rtol=2e-6, atol=0)


def test_offsets_beyond_31_bits() -> None:
    vocabulary = 262_144
    rows = 2**31 // vocabulary + 3
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = torch.randn(2, vocabulary, device="cuda")
    settings, own = filters(rows, top_p=0.9), stream(rows)
    last = Filters(*(x[-2:] for x in settings)), Stream(*(x[-2:] for x in own))
    tokens = sample_tokens(logits, settings, own)
    assert torch.equal(tokens[-2:], sample_tokens(logits[-2:].clone(), *last))


def test_in_a_cuda_graph_without_the_host() -> None:
    """A whole step: adjust, draw, count, report; replayed with other scores and other settings."""
    rows, vocabulary = 16, 32_000
    logits, settings, own = torch.randn(rows, vocabulary, device="cuda"), filters(rows), stream(rows)
    state = request_state(rows, vocabulary)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        scores = adjust_scores(logits, state, slots=slots, positions=own.positions)
        tokens = sample_tokens(scores, settings, own)
        count_tokens(state.counts, slots, tokens[:, None])
        return tokens, token_logprobs(logits, tokens, 5).top

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.copy_(2 * torch.randn(rows, vocabulary, device="cuda"))
    settings.top_p.fill_(0.7)
    settings.temperature[:4] = 0
    own.positions.fill_(9)
    state.counts.zero_()
    graph.replay()
    tokens, top = captured[0].clone(), captured[1].clone()
    state.counts.zero_()
    expected_tokens, expected_top = step()
    assert torch.equal(tokens, expected_tokens) and torch.equal(top, expected_top)


def request_state(slots: int, vocabulary: int) -> RequestState:
    penalties = (torch.full((slots,), value, device="cuda") for value in (1.2, 0.3, 0.1))
    tokens = torch.arange(4, dtype=torch.int32, device="cuda").expand(slots, -1).contiguous()
    return RequestState(
        torch.zeros(slots, vocabulary, dtype=torch.int32, device="cuda"), *penalties,
        tokens, torch.full(tokens.shape, 0.5, device="cuda"), torch.full_like(tokens, ALWAYS),
    )  # fmt: skip


def test_adjusted_scores_of_a_whole_vocabulary() -> None:
    state = request_state(3, 5000)
    state.counts.random_(0, 3)
    given = {
        "slots": torch.tensor([2, 0, -1, 1], device="cuda"),
        "positions": torch.zeros(4, dtype=torch.int32, device="cuda"),
        "drafted": torch.tensor([[7, 4999], [1, 1], [2, 3], [-1, -1]], device="cuda"),
    }
    logits = torch.randn(4, 5000, device="cuda").bfloat16()
    expected = adjust_scores_reference(logits, state, **given)
    check_close(adjust_scores(logits, state, **given).cpu(), expected, dtype=torch.float32)


@pytest.mark.parametrize("num_top", [0, 20])
def test_logprobs_of_a_whole_vocabulary(num_top: int) -> None:
    logits, tokens = torch.randn(40, 128_256, device="cuda"), torch.arange(40, device="cuda")
    actual, expected = token_logprobs(logits, tokens, num_top), token_logprobs_reference(logits, tokens, num_top)
    assert torch.equal(actual.ranks, expected.ranks) and torch.equal(actual.top_tokens, expected.top_tokens)
    check_close(actual.chosen, expected.chosen)
    check_close(actual.top, expected.top)
