"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no schedule state.

Every schedule warms up linearly, then multiplies the peak learning rate by a factor between the floor and 1:

    constant    1 until the end
    cosine      half a cosine from 1 to the floor
    wsd         warm-up, stable, decay: 1, then 1 - (1 - floor) √progress over the last `decay_fraction` of the steps
                (the decay shape of arXiv 2405.18392)
"""

import math
from typing import Literal

ScheduleName = Literal["cosine", "wsd", "constant"]
SCHEDULES: tuple[ScheduleName, ...] = ("cosine", "wsd", "constant")


def learning_rate_factor(
    step: int,
    total_steps: int,
    *,
    schedule: ScheduleName,
    warmup_fraction: float,
    decay_fraction: float,
    floor: float,
) -> float:
    """Returns what to multiply the peak learning rate by at `step` (0 is the first) of `total_steps`, in (0, 1]."""
    warmup_steps = round(total_steps * warmup_fraction)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    decay_steps = total_steps - warmup_steps if schedule == "cosine" else round(total_steps * decay_fraction)
    # The step after the last one would stand exactly on the floor.
    progress = (step - (total_steps - decay_steps)) / max(decay_steps, 1)
    if progress <= 0:
        return 1.0
    if schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    if schedule == "wsd":
        return 1 - (1 - floor) * math.sqrt(min(progress, 1.0))
    raise ValueError(f"schedule is {schedule!r}; known schedules are {', '.join(SCHEDULES)}")
