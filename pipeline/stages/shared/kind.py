"""What all kinds of stages share that train a model."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from pipeline.results import TrainingDetails
from pipeline.schema import Recipe
from pipeline.stages.base import StageKind
from pipeline.stages.shared.config import Gate, Training

if TYPE_CHECKING:
    from model.config import ModelConfig
    from train.memory import Setup

T = TypeVar("T", bound=Training)
D = TypeVar("D", bound=TrainingDetails)

REFERENCE_BOUNDS = ("max_kl", "min_acceptance", "min_agreement")
"""Bounds of a gate that need a model to compare with."""


class TrainingKind(StageKind[T, D]):
    """A kind that trains a model and publishes it."""

    def mistakes(self, config: T, recipe: Recipe) -> Iterator[tuple[str, str]]:
        length, micro_batch = recipe.data[config.data].sequence_length, config.micro_batch_tokens
        if micro_batch < length:
            yield (
                "micro_batch_tokens",
                f"is {micro_batch:,}; it must be at least the sequence_length of its data, which is {length:,}",
            )

    def setup(self, config: T, shapes: "Mapping[str, ModelConfig]") -> "Setup":
        raise NotImplementedError


def nothing_to_bound(gate: Gate, missing: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Mistakes of a gate that sets one of the `missing` bounds, each of which is mapped to why."""
    for name, reason in missing.items():
        if getattr(gate, name) is not None:
            yield f"gate.{name}", f"has nothing to bound: {reason}"
