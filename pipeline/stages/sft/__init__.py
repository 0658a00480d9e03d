"""A finished model, trained further on text or conversations, without a teacher."""

from pipeline.results import TrainingDetails
from pipeline.stages.base import StageKind
from pipeline.stages.sft.config import Sft, mistakes

KIND = StageKind("sft", Sft, TrainingDetails, mistakes=mistakes, starts_from=lambda config: config.model)
