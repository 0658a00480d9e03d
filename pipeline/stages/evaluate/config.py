"""Settings of the stage `evaluate`."""

from dataclasses import dataclass, field

from pipeline.settings import setting
from pipeline.stages.shared.config import Gate, Speed


@dataclass(frozen=True)
class Evaluate:
    """Stage: quality, memory and speed of a model, of the model it is compared with, and of the verified pair."""

    model: str = setting(refers="model")
    against: str | None = setting(None, refers="model")
    """The reference: quality is measured relative to it, and it verifies the pair."""
    data: str = setting(refers="data")
    held_out_tokens: int = setting(16_384, count=True, range=(16, 1e12))
    speed: Speed = field(default_factory=Speed)
    gate: Gate = field(default_factory=Gate)
