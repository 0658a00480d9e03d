import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kernels.sampling.random import Stream
from kernels.sampling.sample import (
    Filters,
    adjusted_probabilities,
    adjusted_probabilities_reference,
    best_tokens,
    sample,
    sample_tokens,
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


@pytest.mark.usefixtures("sampling_form")
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])  # nearly uniform to nearly one-hot
@pytest.mark.parametrize("vocabulary", [1, 5, 3000])
def test_equals_the_reference(spread: float, vocabulary: int) -> None:
    logits, settings = spread * torch.randn(60, vocabulary), random_parameters(60)
    actual = adjusted_probabilities(logits, **settings)
    expected = adjusted_probabilities_reference(logits, **settings)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(actual > 0, expected > 0)


@pytest.mark.usefixtures("sampling_form")
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


@pytest.mark.usefixtures("sampling_form")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 128, 300, 49_157])
def test_the_best_is_the_first_maximum(dtype: torch.dtype, vocabulary: int) -> None:
    """As torch finds it, with ties, in strided rows; −1 where it is not finite or a score is no number."""
    wide = torch.randint(-50, 50, (12, vocabulary + 3)).to(dtype)
    scores = wide[:, :vocabulary]
    assert torch.equal(best_tokens(scores), scores.float().argmax(-1))
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, torch.nan)):
        scores[row, :: 1 if value < 0 else vocabulary] = value
    scores[3, 0], scores[3, -1] = 0, torch.nan
    assert best_tokens(scores).tolist() == [-1] * 4 + scores[4:].float().argmax(-1).tolist()


@pytest.mark.usefixtures("sampling_form")
def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    for settings in ({"top_k": 2}, {"top_p": 0.6}):
        assert (adjusted_probabilities(logits, **parameters(1, **settings)) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.usefixtures("sampling_form")
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


def test_tokens_are_drawn_as_alone() -> None:
    """Greedy and sampled rows, more than one block of them; a row without numbers gets no token."""
    logits = 2 * torch.randn(11, 50)
    logits[3, 7], logits[8] = torch.nan, -torch.inf
    settings = Filters(**random_parameters(11))
    settings.temperature[::3] = 0
    stream = Stream(torch.arange(11) + 5, torch.zeros(11, dtype=torch.int64), torch.arange(11))
    together = sample_tokens(logits, settings, stream)
    rows = [slice(row, row + 1) for row in range(11)]
    alone = [
        sample_tokens(logits[r], Filters(*(x[r] for x in settings)), Stream(*(x[r] for x in stream))) for r in rows
    ]
    assert together.tolist() == [int(token) for token in alone]
    assert together[[3, 8]].tolist() == [-1, -1] and (together[[0, 6, 9]] == logits[[0, 6, 9]].argmax(-1)).all()


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
