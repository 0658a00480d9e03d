"""A student from some of a model's layers, trained towards a teacher: all its figures are those of every stage."""

from pipeline.stages.base import StageKind
from pipeline.stages.distill.config import Distill, DistillDetails, mistakes

KIND = StageKind("distill", Distill, DistillDetails, mistakes=mistakes)
