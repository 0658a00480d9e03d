"""Verification of chains and trees against the plain algorithm, in bulk, and against exact distributions."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sampling import verification
from kernels.sampling.random import Purpose, Stream, exponential, uniform
from kernels.sampling.sample import sample
from kernels.sampling.verification import VerifyOutput, match_drafts, verify, verify_reference
from tests.kernels.test_sampling import check_frequencies

NODES, VOCABULARY = 5, 11
TREE = [0, 0, 1, 1, 2]
"""Two children of the root, two of the first and one of the second."""


def stream(batch: int, device: torch.device | str = "cpu", *, first_seed: int = 0) -> Stream:
    zeros = torch.zeros(batch, dtype=torch.int32, device=device)
    return Stream(torch.arange(batch, device=device) + first_seed, zeros, zeros)


def random_distributions(generator: torch.Generator, *shape: int) -> Tensor:
    """A third of the tokens impossible, some distributions one-hot."""
    scores = 2 * torch.randn(shape, generator=generator)
    scores[torch.rand(shape, generator=generator) < 0.33] = -torch.inf
    scores[..., 0] = torch.where((scores == -torch.inf).all(-1), 0, scores[..., 0])
    p = torch.softmax(scores, dim=-1)
    sharp = torch.rand(shape[:-1], generator=generator) < 0.1
    p[sharp] = torch.nn.functional.one_hot(p[sharp].argmax(-1), shape[-1]).float()
    return p


class Cases:
    """Random sequences: some drafts agree with the target, some tokens are impossible, counts and trees differ."""

    def __init__(self, batch: int, *, seed: int, has_draft: bool, is_tree: bool, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target_p = random_distributions(generator, batch, NODES + 1, vocabulary)
        draft_p = random_distributions(generator, batch, NODES + 1, vocabulary)
        alike = torch.rand(batch, NODES + 1, generator=generator) < 0.4
        draft_p[alike] = self.target_p[alike]
        self.parents = None
        steps = torch.arange(NODES).expand(batch, -1)
        if is_tree:
            self.parents = (torch.rand(batch, NODES, generator=generator) * (steps + 1)).int()
            self.parents[: batch // 4] = torch.tensor(TREE)
        above = steps if self.parents is None else self.parents.long()
        flat = draft_p[torch.arange(batch)[:, None], above].flatten(0, 1)
        self.tokens = torch.multinomial(flat, 1, generator=generator).view(batch, NODES)
        foreign = torch.rand(batch, NODES, generator=generator) < 0.1
        self.tokens[foreign] = torch.randint(0, vocabulary, (int(foreign.sum()),), generator=generator)
        self.draft_p = draft_p if has_draft else None
        self.counts = torch.randint(0, NODES + 1, (batch,), generator=generator, dtype=torch.int32)
        self.lengths = torch.arange(batch, dtype=torch.int32)

    def check(self, output: VerifyOutput) -> None:
        """Against the reference with what `draw_from` drew, sequence by sequence."""
        for row in range(len(self.tokens)):
            count = int(self.counts[row])
            parents = list(range(count)) if self.parents is None else self.parents[row, :count].tolist()
            path, token = verify_reference(
                self.target_p[row].numpy(),
                None if self.draft_p is None else self.draft_p[row].numpy(),
                self.tokens[row, :count].tolist(),
                parents,
                u=self.u[row].numpy(),
                exponential=self.exponential[row].numpy(),
            )
            committed = [*self.tokens[row, [node - 1 for node in path]].tolist(), token]
            assert output.tokens[row].tolist() == committed + [-1] * (NODES + 1 - len(committed)), row
            assert output.path[row].tolist() == path + [-1] * (NODES + 1 - len(path))
            assert int(output.num_accepted[row]) == len(path)
            assert int(output.next_tokens[row]) == token
            assert int(output.lengths[row]) == row + len(path) + 1

    def draw_from(self, own: Stream) -> None:
        self.u = uniform(own, NODES, Purpose.ACCEPT)
        self.exponential = exponential(own, self.target_p.shape[2], Purpose.RESIDUAL)

    def verify(self, device: torch.device, own: Stream) -> VerifyOutput:
        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        output = verify(
            self.target_p.to(device),
            move(self.draft_p),
            self.tokens.to(device),
            counts=self.counts.to(device),
            lengths=self.lengths.to(device),
            stream=own,
            parents=move(self.parents),
        )
        return VerifyOutput(*(x.cpu() for x in output))


@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("has_draft", [False, True], ids=["certain", "drawn"])
def test_ten_thousand_cases(has_draft: bool, is_tree: bool) -> None:
    """Four times 2,500."""
    cases = Cases(2500, seed=2 * has_draft + is_tree, has_draft=has_draft, is_tree=is_tree)
    cases.draw_from(stream(2500, first_seed=50))
    output = cases.verify(torch.device("cpu"), stream(2500, first_seed=50))
    cases.check(output)
    assert len(set(output.num_accepted.tolist())) >= 4


@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("has_draft", [False, True], ids=["certain", "drawn"])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 5000], ids=["one block", "programs share a row"])
def test_the_kernel(device: torch.device, vocabulary: int, has_draft: bool, is_tree: bool) -> None:
    batch = 16 if vocabulary == VOCABULARY else 5
    cases = Cases(batch, seed=9, has_draft=has_draft, is_tree=is_tree, vocabulary=vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.sampling.random.runs_triton", lambda x: False)
        cases.draw_from(stream(batch))
    cases.check(cases.verify(device, stream(batch, device)))


ZERO_SEED = 36_563_342
"""Its first draw that accepts or rejects is exactly 0."""


@pytest.mark.parametrize("is_certain", [False, True])
def test_an_impossible_token_is_rejected_even_if_u_is_zero(device: torch.device, is_certain: bool) -> None:
    own = stream(1, device, first_seed=ZERO_SEED)
    assert float(uniform(own, 1, Purpose.ACCEPT)) == 0
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]], device=device)
    draft = None if is_certain else torch.tensor([[[1.0, 0.0]]], device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    output = verify(target, draft, token, counts=one, lengths=one, stream=own)
    assert output.tokens.tolist() == [[1, -1]] and output.lengths.tolist() == [2]
    possible = torch.tensor([[[1e-30, 1.0], [0.0, 1.0]]], device=device)
    assert verify(possible, draft, token, counts=one, lengths=one, stream=own).tokens.tolist() == [[0, 1]]


def test_nothing_left_falls_back_to_the_target() -> None:
    """Rounding can reject a token although p ≤ q nowhere leaves anything of p − q."""
    p = torch.tensor([[[0.5, 0.5 - 2**-12], [1.0, 0.0]]]).expand(20_000, -1, -1)
    q, token = torch.full((20_000, 1, 2), 0.5), torch.ones(20_000, 1, dtype=torch.int64)
    one, own = torch.ones(20_000, dtype=torch.int32), stream(20_000)
    output = verify(p, q, token, counts=one, lengths=one, stream=own)
    rejected = uniform(own, 1, Purpose.ACCEPT)[:, 0] >= 1 - 2**-11
    assert torch.equal(output.num_accepted == 0, rejected)
    expected = sample(p[:, 0], exponential(own, 2, Purpose.RESIDUAL))[rejected]
    assert torch.equal(output.next_tokens[rejected], expected) and set(expected.tolist()) == {0, 1}


def test_what_is_beyond_the_counts_does_not_matter(device: torch.device) -> None:
    cases = Cases(4, seed=6, has_draft=True, is_tree=False)
    own = stream(4, device)
    cases.counts = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    expected = cases.verify(device, own)
    assert cases.draft_p is not None
    for row, count in enumerate(cases.counts.tolist()):
        cases.target_p[row, count + 1 :] = torch.nan
        cases.draft_p[row, count:] = torch.nan
        cases.tokens[row, count:] = -7
    for one, other in zip(cases.verify(device, own), expected, strict=True):
        assert torch.equal(one, other)


def test_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    cases, own = Cases(5, seed=7, has_draft=True, is_tree=True), stream(5, device)
    together = cases.verify(device, own)
    order = torch.tensor([3, 0])
    assert cases.draft_p is not None and cases.parents is not None
    for name in ("target_p", "draft_p", "tokens", "parents", "counts", "lengths"):
        setattr(cases, name, getattr(cases, name)[order])
    some = cases.verify(device, Stream(*(x[order.to(device)] for x in own)))
    for one, other in zip(some, together, strict=True):
        assert torch.equal(one, other[order])


def first_tokens(rows: int, siblings: int, *, has_draft: bool) -> tuple[Tensor, Tensor]:
    """The first committed tokens of many rounds with a few siblings under the root, and their exact distribution."""
    generator = torch.Generator().manual_seed(siblings)
    p, q = torch.softmax(1.5 * torch.randn(2, 8, generator=generator), dim=-1)
    target = p.expand(rows, siblings + 1, 8)
    if has_draft:
        tokens = torch.multinomial(q.expand(rows, -1), siblings, replacement=True, generator=generator)
    else:
        tokens = q.topk(siblings).indices.expand(rows, -1)
    counts = torch.full((rows,), siblings)
    output = verify(
        target,
        q.expand(rows, siblings + 1, 8) if has_draft else None,
        tokens,
        counts=counts,
        lengths=counts,
        stream=stream(rows, first_seed=1000),
        parents=torch.zeros_like(tokens),
    )
    return output.tokens[:, 0], p


def one_hot(tokens: Tensor, vocabulary: int) -> Tensor:
    return torch.nn.functional.one_hot(tokens, vocabulary).float()


def chains(draft: str) -> tuple[Tensor, Tensor]:
    """Distributions of target and draft after each of four tokens, [4, 4]: Markov chains."""
    target, drafted = torch.softmax(1.5 * torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3)), dim=-1)
    if draft == "equal":
        drafted = target.clone()
    if draft == "disjoint":
        target[:, :2], drafted[:, 2:] = 0, 0
        target, drafted = (x / x.sum(-1, keepdim=True) for x in (target, drafted))
    if draft in ("one-hot", "certain"):
        drafted = one_hot(drafted.argmax(-1), 4)
    if draft == "greedy target":
        target = one_hot(target.argmax(-1), 4)
    return target, drafted


@pytest.mark.parametrize("draft", ["unlike", "equal", "disjoint", "one-hot", "certain", "greedy target"])
@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_the_joint_distribution_is_the_targets(draft: str, k: int) -> None:
    """Of the first two tokens, whatever the draft proposes.

    A round may give one token; the second then comes from the target, as the next round's would.
    """
    (target, drafted), rounds = chains(draft), 40_000
    draws = torch.empty(k + 1, rounds, 4).exponential_(generator=torch.Generator().manual_seed(k))
    tokens = torch.zeros(rounds, k + 1, dtype=torch.int64)
    for step in range(k):
        tokens[:, step + 1] = sample(drafted[tokens[:, step]], draws[step])
    counts = torch.full((rounds,), k)
    draft_p = None if draft == "certain" else drafted[tokens[:, :k]]
    own = stream(rounds, first_seed=1_000_000)
    found = verify(target[tokens], draft_p, tokens[:, 1:], counts=counts, lengths=counts, stream=own).tokens
    first = found[:, 0]
    second = sample(target[first], draws[k]) if k == 0 else found[:, 1]
    second = torch.where(second < 0, sample(target[first], draws[k]), second)
    check_frequencies((4 * first + second).bincount(minlength=16).float(), (target[0][:, None] * target).flatten())


def test_the_frequency_check_catches_the_classic_mistake() -> None:
    """Drawing from the target itself after a rejection is wrong, and must be seen to be."""
    p, q = chains("unlike")[0][0], chains("unlike")[1][0]
    wrong = torch.minimum(p, q) + (1 - torch.minimum(p, q).sum()) * p
    counts = np.random.default_rng(0).multinomial(4000, wrong.double() / wrong.double().sum())
    with pytest.raises(AssertionError):
        check_frequencies(torch.from_numpy(counts).float(), p)


@pytest.mark.parametrize("siblings", [1, 2, 4])
@pytest.mark.parametrize("has_draft", [False, True], ids=["certain", "drawn"])
def test_the_first_token_follows_the_target(has_draft: bool, siblings: int) -> None:
    tokens, p = first_tokens(40_000, siblings, has_draft=has_draft)
    check_frequencies(tokens.bincount(minlength=8).float(), p)


def test_the_frequencies_notice_siblings_tested_against_the_same_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """To forget the residual between siblings looks right and is wrong."""
    monkeypatch.setattr(verification._Left, "reject", lambda self, tokens, rejected: None)
    tokens, p = first_tokens(40_000, 2, has_draft=True)
    with pytest.raises(AssertionError):
        check_frequencies(tokens.bincount(minlength=8).float(), p)


def test_matching(device: torch.device) -> None:
    own = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, 6]], device=device)
    drafted = torch.tensor([[4, 5], [4, 5], [4, 9], [9, 5]], device=device)
    counts = torch.tensor([2, 1, 2, 2], device=device)
    output = match_drafts(own, drafted, counts=counts, lengths=torch.full_like(counts, 10))
    assert output.num_accepted.tolist() == [2, 1, 1, 0]
    assert output.next_tokens.tolist() == [6, 5, 5, 4]
    assert output.tokens.tolist() == [[4, 5, 6], [4, 5, -1], [4, 5, -1], [4, -1, -1]]
    assert output.path.tolist() == [[1, 2, -1], [1, -1, -1], [1, -1, -1], [-1, -1, -1]]
    assert output.lengths.tolist() == [13, 12, 12, 11]


@pytest.mark.parametrize("batch", [0, 2])
def test_no_drafts_or_no_sequences(device: torch.device, batch: int) -> None:
    target = torch.zeros(batch, 1, 6, device=device)
    target[..., 3] = 1
    counts = torch.zeros(batch, dtype=torch.int32, device=device)
    tokens = torch.zeros(batch, 0, dtype=torch.int64, device=device)
    for draft in (None, target[:, :0]):
        output = verify(target, draft, tokens, counts=counts, lengths=counts, stream=stream(batch, device))
        assert output.tokens.tolist() == [[3]] * batch


def test_a_target_that_is_not_a_number_gives_no_token(device: torch.device) -> None:
    target = torch.full((1, 2, 6), torch.nan, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    output = verify(target, None, one[:, None].long(), counts=one, lengths=one, stream=stream(1, device))
    assert output.next_tokens.tolist() == [-1] and output.num_accepted.tolist() == [0]


def test_bad_input_is_refused() -> None:
    target, tokens, counts = torch.zeros(2, 4, 6), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)
    given = {"counts": counts, "lengths": counts, "stream": stream(2)}
    with pytest.raises(ValueError, match="n \\+ 1"):
        verify(target, None, tokens[:, :2], **given)
    with pytest.raises(ValueError, match="fp32"):
        verify(target.bfloat16(), None, tokens, **given)
    with pytest.raises(ValueError, match="draft_p"):
        verify(target, target[:, :2], tokens, **given)
    with pytest.raises(ValueError, match="parents"):
        verify(target, None, tokens, parents=tokens[:, :1], **given)
