"""Learning-rate schedules at their corners and against their formulas."""

import math
from typing import Any, get_args

import pytest

from train.config import ScheduleName, TrainingConfig
from train.optimizer import learning_rate_factor


def factors(schedule: Any, steps: int = 100, **changes: float) -> list[float]:
    settings: dict[str, Any] = {"warmup_fraction": 0.1, "decay_fraction": 0.2, "min_learning_rate_fraction": 0.1}
    config = TrainingConfig(
        tokens=steps, batch_tokens=1, micro_batch_tokens=1, schedule=schedule, **(settings | changes)
    )
    return [learning_rate_factor(step, config.steps, config) for step in range(steps)]


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    assert factors(schedule)[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 1.0])
def test_factors_stay_between_zero_and_one(schedule: str, steps: int, warmup: float) -> None:
    found = factors(schedule, steps, warmup_fraction=warmup)
    assert all(0 < factor <= 1 for factor in found)


def test_cosine_falls_along_half_a_cosine_to_the_floor() -> None:
    found = factors("cosine")
    assert found[10] == 1.0
    assert found[55] == pytest.approx((1 + 0.1) / 2)
    assert found[99] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert sorted(found[10:], reverse=True) == found[10:]


def test_wsd_is_stable_and_then_decays_with_a_square_root() -> None:
    found = factors("wsd")
    assert set(found[10:81]) == {1.0}
    assert found[85] == pytest.approx(1 - 0.9 * math.sqrt(5 / 20))
    assert found[99] == pytest.approx(1 - 0.9 * math.sqrt(19 / 20))


def test_constant_stays() -> None:
    assert set(factors("constant")[10:]) == {1.0}


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ValueError, match=r"schedule is 'linear'; it can be cosine, wsd, constant"):
        factors("linear")
