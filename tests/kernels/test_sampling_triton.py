"""Sampling without a sort: the thresholds are those of a sort, the draws those of the CPU, the frequencies right."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sampling import _thresholds
from kernels.sampling.random import Purpose, Stream
from kernels.sampling.sample import (
    Filters,
    adjusted_probabilities,
    adjusted_probabilities_reference,
    race,
    sample_tokens,
)
from tests.kernels.test_sampling import check_frequencies, random_parameters

WIDE = 4200
"""A vocabulary of several blocks, whose rows several programs share."""


def filters(rows: int, device: torch.device | str = "cpu", **given: float) -> Filters:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **given}
    return Filters(*(torch.tensor(value, device=device).expand(rows) for value in values.values()))


def stream(rows: int, device: torch.device | str = "cpu", *, first_seed: int = 0) -> Stream:
    numbers = torch.arange(rows, device=device)
    return Stream(numbers + first_seed, (numbers % 3).int(), (numbers % 5).int())


def on(device: torch.device, parts: tuple[Tensor, ...]) -> list[Tensor]:
    return [part.to(device) for part in parts]


@pytest.mark.covering
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocabulary", [1, 5, 100, WIDE])
def test_distributions_are_those_of_a_sort(device: torch.device, vocabulary: int, spread: float) -> None:
    logits, settings = spread * torch.randn(8, vocabulary), random_parameters(8)
    expected = adjusted_probabilities_reference(logits, **settings)
    moved = {name: value.to(device) for name, value in settings.items()}
    actual = adjusted_probabilities(logits.to(device), **moved).cpu()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(actual > 0, expected > 0)


def spread_out(rows: Tensor) -> Tensor:
    """The columns in order, with forbidden tokens between them: [..., 240] to [..., WIDE]."""
    wide = rows.new_full((*rows.shape[:-1], WIDE), -math.inf)
    wide[..., 100 + 17 * torch.arange(240)] = rows
    return wide


def adversarial_rows() -> dict[str, Tensor]:
    powers = torch.tensor([sign * 2.0**e for e in range(-60, 60) for sign in (1, -1)])
    row = torch.randn(240)
    return {
        "all equal": torch.full((240,), -3.0),
        "ties": (2 * row).round(),
        "zeros of both signs": torch.where(row > 0, 0.0, -0.0),
        "mostly forbidden": torch.where(torch.arange(240) % 50 == 7, row, -math.inf),
        "one allowed": torch.where(torch.arange(240) == 200, row, -math.inf),
        "powers of two": powers,
        "huge": 1e38 * row.clamp(-3, 3),
        "tiny": 1e-38 * row,
        "neighbours": torch.from_numpy(np.nextafter(np.float32(1), np.float32(2)) * np.ones(240, np.float32)).where(
            row > 0.5, torch.ones(())
        ),
        "one far above": torch.where(torch.arange(240) == 3, 1e30, row),
    }


def sorted_distribution(row: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """By sorting in fp64. Ties are equal scores: probabilities can be equal by rounding."""
    if temperature == 0:
        return torch.zeros_like(row).scatter_(0, row.argmax(keepdim=True), 1)
    scores = (row.double() - row.max()) / temperature.double()
    ordered, least = scores.sort(descending=True).values, scores.min()
    if top_k > 0:
        least = ordered[top_k - 1]
    if top_p < 1:
        p = (ordered.exp() * (ordered >= least)).double()
        above = torch.stack([(p * (ordered > score)).sum() for score in ordered]) / p.sum()
        least = ordered[(above < top_p.double()) & (ordered >= least)].min()
    p = torch.where((scores >= least) & (scores >= min_p.double().log()), scores.exp(), 0)
    return (p / p.sum()).float()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", adversarial_rows())
def test_adversarial_rows(device: torch.device, name: str) -> None:
    row = adversarial_rows()[name]
    settings = [{"top_k": 1}, {"top_k": 7}, {"top_k": 239}, {"top_p": 1e-6}, {"top_p": 0.73}, {"min_p": 0.37}]
    settings += [{"top_k": 60, "top_p": 0.5, "min_p": 0.01, "temperature": 0.7}, {"temperature": 0.0}]
    parts = [torch.stack(x) for x in zip(*(filters(1, **given) for given in settings), strict=True)]
    limits = Filters(*(part[:, 0] for part in parts))
    expected = torch.stack([sorted_distribution(row, *limit) for limit in zip(*limits, strict=True)])
    moved = Filters(*on(device, limits))
    logits, expected = spread_out(row).expand(len(settings), -1), spread_out(expected).clamp_min(0)
    actual = adjusted_probabilities(logits.to(device), **moved._asdict()).cpu()
    assert torch.equal(actual > 0, expected > 0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_those_of_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(9, WIDE)).to(dtype)
    settings = Filters(**random_parameters(9))
    expected = sample_tokens_on_cpu(logits, settings, stream(9))
    actual = sample_tokens(logits.to(device), Filters(*on(device, settings)), stream(9, device))
    assert actual.dtype == torch.int64
    assert actual.tolist() == expected.tolist()


def sample_tokens_on_cpu(logits: Tensor, settings: Filters, own: Stream, purpose: int = Purpose.TARGET) -> Tensor:
    """The CPU form, within a test that interprets Triton's kernels too."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("kernels.sampling.sample", "kernels.sampling.random"):
            patch.setattr(f"{module}.runs_triton", lambda x: False)
        return sample_tokens(logits, settings, own, purpose=purpose)


def test_draft_tokens_are_those_of_the_cpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """From distributions, and without random numbers in memory."""
    probabilities, own = torch.softmax(3 * torch.randn(9, WIDE), dim=1), stream(9)
    probabilities[1, 5:] = 0
    probabilities[2] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        for module in ("kernels.sampling.sample", "kernels.sampling.random"):
            patch.setattr(f"{module}.runs_triton", lambda x: False)
        expected = race(probabilities, own, Purpose.DRAFT)
    monkeypatch.setattr("kernels.sampling.sample.exponential", None)
    moved = Stream(*on(device, own))
    actual = race(probabilities.to(device), moved, Purpose.DRAFT)
    assert actual[2] == -1
    keep = torch.arange(9) != 2
    assert actual.cpu()[keep].tolist() == expected[keep].tolist()
    wide = torch.cat((probabilities, probabilities), dim=1).to(device)
    assert torch.equal(race(wide[:, :WIDE], moved, Purpose.DRAFT), actual)
    assert race(wide[:0], stream(0, device), Purpose.DRAFT).shape == (0,)


def test_thresholds_have_the_same_bits_in_any_company(device: torch.device) -> None:
    logits, settings = 2 * torch.randn(7, WIDE), random_parameters(7)
    some = [Filters(**settings), Filters(*(x[4:5] for x in settings.values()))]
    together, alone = (
        adjusted_probabilities(x.to(device), **Filters(*on(device, given))._asdict())
        for x, given in zip((logits, logits[4:5]), some, strict=True)
    )
    assert torch.equal(together[4:5], alone)


class Launches:
    """Notes what a kernel is launched with, and launches it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.arguments.append(arguments)
            self.kernel[grid](*arguments, **options)

        return launch


def test_rows_leave_passes_that_they_do_not_need(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is summed for them; how much is launched does not depend on them."""
    logits = torch.randn(4, WIDE, device=device)
    limits = {"temperature": [1.0, 0, 1, 0], "top_k": [0, 3, WIDE, 0], "top_p": [1.0, 0.5, 1, 1]}
    settings = {name: torch.tensor(values, device=device) for name, values in limits.items()}
    launches = Launches(_thresholds._narrow_kernel)
    monkeypatch.setattr(_thresholds, "_narrow_kernel", launches)
    _thresholds.find_thresholds(logits, **settings)
    assert launches.arguments[-1][8].shape == (4, 3, 16)
    assert launches.arguments[-1][8].isnan().all()  # as memory is that nobody wrote
    settings["top_p"][2] = 0.9
    _thresholds.find_thresholds(logits, **settings)
    assert len(launches.arguments) == 2 * 16
    assert launches.arguments[-1][8].isnan().flatten(1).all(dim=1).tolist() == [True, True, False, True]
    _thresholds.find_thresholds(logits.bfloat16(), **settings)
    assert len(launches.arguments) == 2 * 16 + 8
    lows, *_ = _thresholds.find_thresholds(logits, **settings, cuts=False)
    smallest = logits.amin(dim=1).view(torch.int32) ^ 0x7FFFFFFF  # the key of a negative score
    assert len(launches.arguments) == 2 * 16 + 8 and torch.equal(lows, smallest - 1)


def test_a_token_does_not_depend_on_the_batch(device: torch.device) -> None:
    logits = 2 * torch.randn(6, WIDE, device=device)
    settings, own = Filters(*on(device, tuple(random_parameters(6).values()))), stream(6, device)
    together = sample_tokens(logits, settings, own)
    order = torch.tensor([4, 1, 0], device=device)
    some = sample_tokens(logits[order], Filters(*(x[order] for x in settings)), Stream(*(x[order] for x in own)))
    assert torch.equal(some, together[order])
    one = slice(5, 6)
    alone = sample_tokens(logits[one], Filters(*(x[one] for x in settings)), Stream(*(x[one] for x in own)))
    assert torch.equal(alone, together[one])


def test_the_cpu_form_follows_the_distribution() -> None:
    rows, logits = 15_000, 1.5 * torch.randn(40)
    for given in ({}, {"temperature": 0.6, "top_k": 12}, {"top_p": 0.8, "min_p": 0.02}):
        settings = filters(rows, **given)
        tokens = sample_tokens(logits.expand(rows, -1), settings, stream(rows))
        expected = adjusted_probabilities_reference(logits[None], **filters(1, **given)._asdict())[0]
        check_frequencies(tokens.bincount(minlength=40).float(), expected)


def test_greedy_rows_take_the_first_maximum(device: torch.device) -> None:
    logits = torch.zeros(3, WIDE, device=device)
    logits[0, [4150, 2100, 4199]] = 2.0
    logits[1, 5] = -math.inf
    logits[2] = -math.inf
    logits[2, 4100] = -1e30
    assert sample_tokens(logits, filters(3, device, temperature=0.0), stream(3, device)).tolist() == [2100, 0, 4100]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_numbers_get_no_token(device: torch.device, temperature: float) -> None:
    logits = torch.zeros(5, 20, device=device)
    logits[0, 3], logits[1, 4], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 2] = -math.nan
    settings = filters(5, device, temperature=temperature, top_p=0.5)
    tokens = sample_tokens(logits, settings, stream(5, device))
    assert tokens[:4].tolist() == [-1] * 4 and tokens[4] >= 0
    assert sample_tokens_on_cpu(logits.cpu(), Filters(*on(torch.device("cpu"), settings)), stream(5)).tolist() == (
        tokens.tolist()
    )
    assert adjusted_probabilities(logits, **settings._asdict()).isnan().any(dim=1).tolist() == [True] * 4 + [False]


def test_rows_with_a_gap_between_them(device: torch.device) -> None:
    wide = torch.randn(4, 64, device=device)
    settings, own = filters(4, device, top_k=9), stream(4, device)
    assert torch.equal(
        sample_tokens(wide[:, :50], settings, own), sample_tokens(wide[:, :50].contiguous(), settings, own)
    )


def test_no_rows(device: torch.device) -> None:
    empty = torch.zeros(0, 9, device=device)
    assert sample_tokens(empty, filters(0, device), stream(0, device)).shape == (0,)
    assert adjusted_probabilities(empty, **filters(0, device)._asdict()).shape == (0, 9)


def test_bad_input_is_refused(device: torch.device) -> None:
    logits = torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match="top_p"):
        sample_tokens(logits, filters(3, device)._replace(top_p=torch.ones(2)), stream(3, device))
    with pytest.raises(ValueError, match="vocabulary"):
        sample_tokens(logits[0], filters(4, device), stream(4, device))
    with pytest.raises(ValueError, match="float32"):
        sample_tokens(logits.long(), filters(3, device), stream(3, device))
