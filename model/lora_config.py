"""The settings of low-rank adapters, known without torch: recipes and files name them before a model is there."""

import math
from dataclasses import dataclass
from typing import Literal

from model.settings import POSITIVE, check, setting


class LoraError(ValueError):
    """An adapter that cannot be made or attached as asked; the sentence says why."""


@dataclass(frozen=True)
class LoraConfig:
    """How a model is adapted. Raises LoraError for what makes no adapter."""

    rank: int = setting(64, range=(1, 65_536))
    alpha: float = setting(16.0, range=POSITIVE)
    """The update is scaled by alpha / rank."""
    dropout: float = setting(0.0, range=(0.0, 0.99))
    """Chance that an input of the low-rank part is dropped in training."""
    rslora: bool = False
    """Scale by alpha / √rank instead, so that the update does not shrink with the rank."""
    dora: bool = False
    """Train the length of each row of the weight apart from its direction."""
    init: Literal["default", "loftq"] = "default"
    """"default": the adapter begins as nothing; "loftq": as the best low-rank part of the quantization error."""
    targets: tuple[str, ...] = setting(("*_proj",), required=True)
    """Shell patterns of layers, by full name or its end: "q_proj", "model.layers.1?.*", "lm_head", "embed_tokens"."""

    def __post_init__(self) -> None:
        check(self, LoraError)

    @property
    def scale(self) -> float:
        """s above."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
