"""A student that is a part of a model, in layers or in width, trained towards a teacher."""

from pipeline.stages.base import StageKind, Tunable
from pipeline.stages.distill.config import Distill, choices, mistakes
from pipeline.stages.distill.report import DistillDetails, sections

KIND = StageKind(
    "distill",
    Distill,
    DistillDetails,
    sections,
    mistakes,
    teacher=lambda config: config.teacher,
    tunable=Tunable(lambda config: config.student.origin, choices),
    starts_from=lambda config: config.student.origin,
)
