"""Settings of the stage `evaluate`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.measure.suite.tasks import TASKS
from pipeline.schema import Recipe
from pipeline.settings import setting
from pipeline.stages.shared.config import NO_FALL, REFERENCE_BOUNDS, Gate, Speed, nothing_to_bound


@dataclass(frozen=True)
class Evaluate:
    """Stage: quality, memory and speed of a model, of the model it is compared with, and of the verified pair."""

    model: str = setting(refers="model")
    against: str | None = setting(None, refers="model")
    """The reference: quality is measured relative to it, and it verifies the pair."""
    data: str = setting(refers="data")
    held_out_tokens: int = setting(16_384, count=True, range=(16, 1e12))
    speed: Speed = field(default_factory=Speed)
    suite: tuple[str, ...] = setting((), choices=tuple(TASKS), later=True)
    """Small tasks to put to each model. `code` runs what it writes, as pipeline/measure/suite/sandbox.py says."""
    gate: Gate = field(default_factory=Gate)


def mistakes(config: Evaluate, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Bounds of its gate that compare with what it does not have."""
    missing = {} if config.against else dict.fromkeys(REFERENCE_BOUNDS, "`against` is not set")
    yield from nothing_to_bound(config.gate, missing | NO_FALL)
