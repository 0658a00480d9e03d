"""Settings of the stage `distill`."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.results import TrainingDetails
from pipeline.schema import Recipe
from pipeline.settings import COUNTS, setting
from pipeline.stages.shared import config as shared
from pipeline.stages.shared.config import Recovery
from train.config import OnPolicy


@dataclass(frozen=True)
class Student:
    """What the student starts from."""

    origin: str = setting(key="from", refers="model")
    """Name of the model whose weights the student starts with."""
    layers: int | None = setting(None, range=(1, 10_000))
    """Keep this many of its layers, the most important ones; nothing keeps them all."""
    importance: str = setting("block_influence", choices=("block_influence", "perplexity"))
    """How a layer's importance is measured: by how much it turns its input (one pass over the text), or by how much
    the loss rises without it (one pass a layer)."""
    importance_tokens: int = setting(8_192, count=True, range=COUNTS)
    """Training tokens to measure the importance on."""


@dataclass(frozen=True)
class Distill(Recovery):
    """Stage: train a student towards a teacher's distribution, measure both, publish the student."""

    teacher: str = setting(refers="model")
    student: Student = setting()
    on_policy: OnPolicy = setting(OnPolicy(), later=True)
    """Let the student write part of its text itself; its engine holds a second copy of it."""


@dataclass(frozen=True, kw_only=True)
class DistillDetails(TrainingDetails):
    """Which layers of its origin the student has."""

    kept_layers: tuple[int, ...]
    importance: tuple[float, ...]
    """Of each layer of the origin; empty where all were kept."""


def mistakes(config: Distill, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Of its batches, and of text that the student writes for nobody to grade."""
    yield from shared.mistakes(config, recipe)
    if config.on_policy.share and config.loss.kind == "cross_entropy":
        yield "on_policy.share", f"is {config.on_policy.share:g}, but with the loss cross_entropy no teacher grades it"
