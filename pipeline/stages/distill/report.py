"""What a distillation says beyond its figures."""

from dataclasses import dataclass

from pipeline.results import TrainingDetails


@dataclass(frozen=True, kw_only=True)
class DistillDetails(TrainingDetails):
    """Which layers of its origin the student has."""

    kept_layers: tuple[int, ...]
    importance: tuple[float, ...]
    """Of each layer of the origin; empty where all were kept."""
