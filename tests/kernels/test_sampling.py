import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import kernels.sampling
from kernels.sampling import (
    adjusted_probabilities,
    adjusted_probabilities_reference,
    sample,
    verify_draft,
)


def parameters(rows: int, **given: float | list[float]) -> dict[str, Tensor]:
    """One value, or one for each row; filters are off by default."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
    return {name: torch.tensor(value).expand(rows) for name, value in values.items()}


def random_parameters(rows: int) -> dict[str, Tensor]:
    generator = np.random.default_rng(1)
    off = generator.random((3, rows)) < 0.4
    return {
        "temperature": torch.tensor(np.where(generator.random(rows) < 0.1, 0, generator.uniform(0.2, 2, rows))).float(),
        "top_k": torch.tensor(np.where(off[0], 0, generator.integers(1, 60, rows))),
        "top_p": torch.tensor(np.where(off[1], 1, generator.uniform(0.05, 0.99, rows))).float(),
        "min_p": torch.tensor(np.where(off[2], 0, generator.uniform(0.001, 0.4, rows))).float(),
    }


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])  # nearly uniform to nearly one-hot
@pytest.mark.parametrize("vocabulary", [1, 5, 3000])
def test_equals_the_reference(spread: float, vocabulary: int) -> None:
    logits, settings = spread * torch.randn(60, vocabulary), random_parameters(60)
    actual = adjusted_probabilities(logits, **settings)
    expected = adjusted_probabilities_reference(logits, **settings)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(actual > 0, expected > 0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.3}, {"top_k": 7}, {"top_p": 0.6}, {"top_p": 0.001}, {"min_p": 0.2},
     {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)  # fmt: skip
def test_equals_transformers(settings: dict[str, float]) -> None:
    logits = 2 * torch.randn(20, 500)
    expected = logits
    makers = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    for name, maker in makers.items():
        if name in settings:
            expected = maker(settings[name])(None, expected)
    actual = adjusted_probabilities(logits, **parameters(20, **settings))
    torch.testing.assert_close(actual, expected.softmax(-1), rtol=1e-5, atol=1e-7)


def test_greedy_is_one_hot_at_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [-math.inf, -5.0, -math.inf]])
    actual = adjusted_probabilities(logits, **parameters(2, temperature=0.0, top_k=2, top_p=0.5, min_p=0.1))
    assert torch.equal(actual, torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]))


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    for settings in ({"top_k": 2}, {"top_p": 0.6}):
        assert (adjusted_probabilities(logits, **parameters(1, **settings)) > 0).tolist() == [[True, True, True, False]]


def test_forbidden_tokens_stay_impossible() -> None:
    logits = torch.randn(4, 10)
    logits[:, 3:] = -math.inf
    for settings in ({}, {"top_k": 8}, {"top_p": 0.999}, {"min_p": 0.001}):
        assert (adjusted_probabilities(logits, **parameters(4, **settings))[:, 3:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    logits, settings = (3 * torch.randn(40, 1000)).to(dtype), random_parameters(40)
    together = adjusted_probabilities(logits, **settings)
    for row in range(40):
        one = slice(row, row + 1)
        alone = adjusted_probabilities(logits[one], **{name: values[one] for name, values in settings.items()})
        assert torch.equal(together[one], alone)


def test_inputs_stay() -> None:
    logits, settings = torch.randn(30, 50), random_parameters(30)
    kept = logits.clone()
    adjusted_probabilities(logits, **settings)
    assert torch.equal(logits, kept)


def test_sample_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025, 0.0])
    exponential = torch.empty(50_000, 6).exponential_(generator=torch.Generator().manual_seed(0))
    counts = sample(probabilities.expand(50_000, 6), exponential).bincount(minlength=6)
    assert counts[5] == 0
    assert chisquare(counts[:5].numpy(), 50_000 * probabilities[:5].double().numpy()).pvalue > 1e-4


def test_a_draw_of_zero_cannot_choose_an_impossible_token() -> None:
    assert sample(torch.tensor([[0.0, 0.4, 0.6]]), torch.tensor([[0.0, 1.0, 1.0]])).tolist() == [2]


# --- speculative decoding ---


def random_distribution(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.softmax(1.5 * torch.randn(shape, generator=generator), dim=-1)


def one_hot(tokens: Tensor, vocabulary: int) -> Tensor:
    return torch.nn.functional.one_hot(tokens, vocabulary).float()


def test_acceptance_and_residual_add_up_to_the_target() -> None:
    p, q = torch.softmax(1.5 * torch.randn(2, 12, dtype=torch.float64), dim=-1)
    residual = kernels.sampling._residual(p, q, 0)
    acceptance = torch.minimum(p, q)
    total = acceptance + (1 - acceptance.sum()) * residual / residual.sum()
    torch.testing.assert_close(total, p, rtol=0, atol=1e-15)


VOCABULARY = 4
DRAFTS = ("unlike", "equal", "disjoint", "one-hot", "deterministic", "greedy target")


def models(draft: str) -> tuple[Tensor, Tensor]:
    """Distributions of target and draft after each token, [VOCABULARY, VOCABULARY]: Markov chains."""
    generator = torch.Generator().manual_seed(3)
    target, drafted = (random_distribution(generator, (VOCABULARY, VOCABULARY)) for _ in range(2))
    if draft == "equal":
        drafted = target.clone()
    if draft == "disjoint":
        target[:, :2], drafted[:, 2:] = 0, 0
        target, drafted = (x / x.sum(-1, keepdim=True) for x in (target, drafted))
    if draft in ("one-hot", "deterministic"):
        drafted = one_hot(drafted.argmax(-1), VOCABULARY)
    if draft == "greedy target":
        target = one_hot(target.argmax(-1), VOCABULARY)
    return target, drafted


def speculate(target: Tensor, drafted: Tensor, k: int, deterministic: bool, draws: Tensor) -> list[int]:
    """The tokens of one round after token 0; `draws` [2 k + 1, VOCABULARY] unit exponential."""
    tokens = [0]
    for step in range(k):
        tokens.append(int(sample(drafted[tokens[-1]][None], draws[step][None])))
    rows = torch.tensor(tokens)
    u = 1 - torch.exp(-draws[k : 2 * k, 0])
    draft_p = None if deterministic else drafted[rows[:-1]]
    accepted, token = verify_draft(target[rows], draft_p, rows[1:], u, draws[2 * k])
    return [*tokens[1 : accepted + 1], token]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_speculation_follows_the_target_exactly(draft: str, k: int) -> None:
    """The joint distribution of the first two tokens is the target's, whatever the draft proposes.

    A round may give one token; the second then comes from the target, as the next round's would.
    """
    target, drafted = models(draft)
    rounds = 4000
    generator = torch.Generator().manual_seed(17 * k + DRAFTS.index(draft))
    draws = torch.empty(rounds, 2 * k + 2, VOCABULARY).exponential_(generator=generator)
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    for draw in draws:
        first, *rest = speculate(target, drafted, k, draft == "deterministic", draw)
        second = rest[0] if rest else int(sample(target[first][None], draw[-1][None]))
        counts[first, second] += 1
    check_frequencies(counts.flatten(), (target[0][:, None] * target).flatten())


def check_frequencies(counts: Tensor, expected: Tensor) -> None:
    """Total variation within its bound for n draws at 1e-6, chi-square at 1e-4, impossible cells empty."""
    n = float(counts.sum())
    total_variation = 0.5 * (counts / n - expected).abs().sum()
    cells = int((expected > 0).sum())
    assert total_variation <= 0.5 * math.sqrt(cells / n) + math.sqrt(math.log(1e6) / (2 * n))
    assert (counts[expected == 0] == 0).all()
    common = expected * n >= 5
    if int(common.sum()) > 1:
        observed = torch.cat((counts[common], counts[~common].sum()[None])).double().numpy()
        probabilities = torch.cat((expected[common], expected[~common].sum()[None])).double().numpy()
        kept = probabilities * n >= 5
        observed, probabilities = observed[kept], probabilities[kept]
        scaled = probabilities / probabilities.sum() * observed.sum()
        assert chisquare(observed, scaled).pvalue > 1e-4


def test_the_frequency_check_catches_the_classic_mistake() -> None:
    """Drawing from the target itself after a rejection is wrong, and must be seen to be."""
    p, q = models("unlike")[0][0], models("unlike")[1][0]
    wrong = torch.minimum(p, q) + (1 - torch.minimum(p, q).sum()) * p
    counts = torch.from_numpy(np.random.default_rng(0).multinomial(4000, wrong.double() / wrong.double().sum())).float()
    with pytest.raises(AssertionError):
        check_frequencies(counts, p)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_impossible_token_is_rejected_even_if_u_is_zero(deterministic: bool) -> None:
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    draft = None if deterministic else torch.tensor([[1.0, 0.0]])
    assert verify_draft(target, draft, torch.tensor([0]), torch.zeros(1), torch.ones(2)) == (0, 1)


def test_greedy_accepts_the_common_prefix() -> None:
    target = one_hot(torch.tensor([3, 1, 2, 0]), 4)
    for drafted, expected in (([3, 1, 2], (3, 0)), ([3, 1, 0], (2, 2)), ([0, 1, 2], (0, 3))):
        tokens = torch.tensor(drafted)
        u, exponential = torch.full((3,), 0.999), torch.rand(4) + 0.1
        for draft in (None, one_hot(tokens, 4), torch.full((3, 4), 0.25)):
            assert verify_draft(target, draft, tokens, u, exponential) == expected


def test_an_equal_draft_is_always_accepted() -> None:
    p = random_distribution(torch.Generator().manual_seed(0), (4, 50))
    tokens = p[:3].argmax(-1)
    u = torch.full((3,), 1 - 2**-24)
    accepted, _ = verify_draft(p, p[:3].clone(), tokens, u, torch.ones(50))
    assert accepted == 3


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """Rounding can reject a token although p ≤ q nowhere leaves anything of p − q."""
    p = torch.tensor([[0.5, 0.5 - 2**-12], [1.0, 0.0]])
    q = torch.tensor([[0.5, 0.5]])
    accepted, token = verify_draft(p, q, torch.tensor([1]), torch.tensor([1 - 2**-20]), torch.tensor([3.0, 1.0]))
    assert (accepted, token) == (0, 1)
