"""Settings of the stage `sft`."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.schema import Recipe
from pipeline.settings import redeclared, setting
from pipeline.stages.shared import config as shared
from pipeline.stages.shared.config import Adapter, Training


@dataclass(frozen=True)
class Sft(Training):
    """Stage: train a finished model on data of one's own, measure it before and after, publish it whole.

    Of data with `chat: true` only the assistant's tokens are learnt, and measured.
    """

    model: str = setting(refers="model")
    out: str = redeclared(Training, "out", "tuned")
    adapter: Adapter | None = None
    """Train this beside the frozen model, and merge it in the end; nothing trains the model itself. An adapter then
    wants about ten times the learning rate."""
    learning_rate: float = redeclared(Training, "learning_rate", 2e-5)

    @property
    def learning_rate_ratio(self) -> float:
        return self.adapter.learning_rate_ratio if self.adapter else 1.0


def mistakes(config: Sft, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Of its batches, its adapter, and bounds of its gate that compare with another model."""
    yield from shared.mistakes(config, recipe)
    missing = dict.fromkeys(shared.REFERENCE_BOUNDS, "it has no teacher")
    yield from shared.nothing_to_bound(config.gate, missing | shared.NO_FALL)
    if config.adapter and config.adapter.init == "loftq":
        yield "adapter.init", "is loftq, which starts from the error of quantization, but nothing is quantized here"
