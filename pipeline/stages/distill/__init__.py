"""A student from some of a model's layers, trained towards a teacher."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.errors import UserError
from pipeline.stages.distill.config import Distill
from pipeline.stages.distill.report import DistillDetails
from pipeline.stages.shared.kind import TrainingKind

if TYPE_CHECKING:
    from model.config import ModelConfig
    from train.memory import Setup


class DistillKind(TrainingKind[Distill, DistillDetails]):
    """Its figures are in the tables and curves of every stage, so it has no section of its own."""

    name, config, details = "distill", Distill, DistillDetails

    def setup(self, config: Distill, shapes: "Mapping[str, ModelConfig]") -> "Setup":
        """Which layers are kept is not known yet, and all are of one size."""
        from train.memory import Setup

        origin = shapes[config.student.origin]
        count = config.student.layers or origin.num_layers
        if count > origin.num_layers:
            raise UserError(f"{config.student.origin} has {origin.num_layers} layers, so {count} cannot be kept.")
        return Setup(origin.keep_layers(tuple(range(count))), config, teacher=shapes[config.teacher])


KIND = DistillKind()
