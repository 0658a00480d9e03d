"""The passes close in on the threshold of a sort, whatever the scores: ties, infinities, any spread of bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sampling import _race, _thresholds

VOCABULARY, BLOCK = 40, 16
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
scores = st.one_of(st.integers(-3, 3).map(float), st.just(-math.inf), finite, st.floats(-8, 8, width=32))
limits = st.tuples(
    st.one_of(st.just(0.0), st.floats(0.125, 8, width=32)),
    st.integers(0, VOCABULARY + 2),
    st.one_of(st.just(1.0), st.floats(0, 1, width=32)),
)


def kept(row: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """What a sort keeps for certain, and what it may keep where sums of fp32 cannot tell."""
    x = row.double()
    if temperature == 0:
        return x == x.max(), x == x.max()
    ordered = x.sort(descending=True).values
    in_top_k = x > -math.inf
    if 0 < top_k < VOCABULARY:
        in_top_k &= x >= ordered[top_k - 1]
    mass = torch.where(in_top_k, ((x - x.max()) / temperature.double()).exp(), 0)
    above = (mass * (x[None, :] > x[:, None])).sum(dim=1) / mass.sum()
    margin = torch.where(x == x.max(), 1, top_p.double() - above) if top_p < 1 else torch.ones_like(x)
    return in_top_k & (margin > 1e-5), in_top_k & (margin > -1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.lists(scores, min_size=VOCABULARY, max_size=VOCABULARY), limits), min_size=1, max_size=3)
)
def test_thresholds_are_those_of_a_sort(
    device: torch.device, dtype: torch.dtype, rows: list[tuple[list[float], tuple[float, int, float]]]
) -> None:
    """In rows of three blocks."""
    logits = torch.from_numpy(np.array([row for row, _ in rows], dtype=np.float32)).to(dtype)
    logits = logits.nan_to_num(neginf=-math.inf)  # finite numbers that bf16 rounds to infinity
    if dtype == torch.bfloat16:  # Triton's interpreter makes other numbers of those that are subnormal
        logits = torch.where(logits.abs() < torch.finfo(dtype).tiny, 0.0, logits)
    asked = [torch.tensor(x) for x in zip(*(limit for _, limit in rows), strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_race, "BLOCK", BLOCK)
        found = _thresholds.find_thresholds(logits.to(device), *(x.to(device) for x in asked))
    lows, best_scores = found.lows.cpu(), found.best.cpu()
    assert not found.arrived.any()
    for row, low, best, *limit in zip(logits.float(), lows, best_scores, *asked, strict=True):
        if row.max() == -math.inf:
            assert best.isnan()
            continue
        assert best == row.max()
        keys = torch.where(row == 0, 0.0, row).view(torch.int32)
        keys = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
        actual = keys > low if limit[0] > 0 else row == best
        certain, possible = kept(row, *limit)
        assert bool((actual & (row > -math.inf) | ~certain).all()), "a token is missing"
        assert not (actual & (row > -math.inf) & ~possible).any(), "a token is too many"


def test_neighbours_between_the_ends_of_all_numbers(device: torch.device) -> None:
    """As many passes as any two keys need: with one less they are not told apart."""
    steps = torch.arange(30, dtype=torch.int32, device=device)
    row = (torch.tensor(1.0, device=device).view(torch.int32) + steps).view(torch.float32)
    ends = torch.tensor([3e38, -3e38], device=device)
    logits, top_k = torch.cat((row, ends)).expand(30, -1), steps + 1
    ones = torch.ones(30, device=device)
    found = _thresholds.find_thresholds(logits, ones, top_k, ones)
    keys = torch.cat((row, ends[:1])).view(torch.int32)
    assert (keys[None, :] > found.lows[:, None]).sum(dim=1).tolist() == top_k.tolist()


def test_neighbours_between_the_ends_of_all_numbers_in_bf16(device: torch.device) -> None:
    steps = torch.arange(30, dtype=torch.int16, device=device)
    row = (torch.tensor(1.0, dtype=torch.bfloat16, device=device).view(torch.int16) + steps).view(torch.bfloat16)
    ends = torch.tensor([3e38, -3e38], dtype=torch.bfloat16, device=device)
    for sign in (1, -1):
        logits, top_k = sign * torch.cat((row, ends)).expand(30, -1), (steps + 1).int()
        ones = torch.ones(30, device=device)
        found = _thresholds.find_thresholds(logits, ones, top_k, ones)
        keys = logits[0].float().view(torch.int32)
        keys = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
        assert (keys[None, :] > found.lows[:, None]).sum(dim=1).tolist() == top_k.tolist()
