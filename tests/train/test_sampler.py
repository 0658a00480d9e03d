"""The order of the data: a function of the seed, resumable anywhere, each piece once an epoch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.toy import documents
from tests.trials import trials
from train.sampler import Sampler, shuffled

LENGTHS = [5, 40, 17, 70, 2, 33, 1, 90, 26, 11]


def make(seed: int = 0, **changes: int) -> Sampler:
    sizes = {"sequence_length": 16, "micro_batch_tokens": 48} | changes
    return Sampler(documents(LENGTHS), seed=seed, **sizes)


def as_lists(micro_batches: list[np.ndarray]) -> list[list[int]]:
    return [numbers.tolist() for numbers in micro_batches]


def split_mix_order(count: int, start: int) -> list[int]:
    """SplitMix64 as its authors wrote it, with Python's integers."""
    mask, state, keys = (1 << 64) - 1, start, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        keys.append(z ^ (z >> 31))
    return sorted(range(count), key=keys.__getitem__)


def test_the_shuffle_is_the_same_everywhere() -> None:
    # The first 8 bytes of SHA-256("7:2"), little-endian.
    assert shuffled(100, seed=7, epoch=2).tolist() == split_mix_order(100, 0x0CB9748175A38E8D)


@settings(max_examples=trials(60, 300), deadline=None)
@given(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=12), st.integers(0, 40))
def test_any_split_and_any_resume_give_the_same_order(seed: int, takes: list[int], stop: int) -> None:
    straight = as_lists(make(seed).take(sum(takes) + stop))
    in_parts = make(seed)
    found = [batch for count in takes for batch in as_lists(in_parts.take(count))]
    resumed = make(seed)
    resumed.load_state_dict(in_parts.state_dict())
    assert found + as_lists(resumed.take(stop)) == straight


@settings(max_examples=trials(30, 300), deadline=None)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 6))
def test_processes_share_the_order_of_one(seed: int, world: int, steps: int) -> None:
    alone = as_lists(make(seed).take(steps * world))
    ranks = [make(seed) for _ in range(world)]
    shared = [as_lists(sampler.take(world))[rank] for _ in range(steps) for rank, sampler in enumerate(ranks)]
    assert shared == alone


def test_an_epoch_has_every_piece_once_and_the_next_another_order() -> None:
    sampler = make()
    epochs: list[list[int]] = [[], [], []]
    while sampler.epoch < 3:
        numbers = sampler.take(1)[0].tolist()
        if sampler.epoch < 3:
            epochs[sampler.epoch] += numbers
    everything = Counter(range(len(sampler.pieces)))
    assert [Counter(epoch) for epoch in epochs] == [everything] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seeds_give_different_orders() -> None:
    assert len({str(as_lists(make(seed).take(6))) for seed in range(8)}) == 8


@pytest.mark.parametrize("other", [{"seed": 1}, {"sequence_length": 15}, {"micro_batch_tokens": 49}])
def test_a_position_of_other_settings_is_refused(other: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="belongs to other data or settings"):
        make(**other).load_state_dict(make().state_dict())


def test_a_sequence_must_fit_a_micro_batch() -> None:
    with pytest.raises(ValueError, match=r"micro_batch_tokens \(15\) must be at least sequence_length \(16\)"):
        make(micro_batch_tokens=15)


def test_data_without_a_token_to_predict_is_refused() -> None:
    with pytest.raises(ValueError, match="toy has no token to predict"):
        Sampler(documents([1, 1, 0]), sequence_length=8, micro_batch_tokens=8, seed=0)
