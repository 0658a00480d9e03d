"""An adapter that learns from pairs of a chosen and a rejected answer, with the model below it as its reference."""

from pipeline.stages.base import StageKind
from pipeline.stages.dpo.config import Dpo, mistakes
from pipeline.stages.dpo.report import DpoDetails, sections

KIND = StageKind("dpo", Dpo, DpoDetails, sections, mistakes, reads_pairs=True, starts_from=lambda config: config.model)
