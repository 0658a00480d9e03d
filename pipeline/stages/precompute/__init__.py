"""What a teacher says at each position of a data set, stored with it, so that students learn without running it."""

from pipeline.stages.base import StageKind
from pipeline.stages.precompute.config import Precompute
from pipeline.stages.precompute.report import PrecomputeDetails, sections

KIND = StageKind("precompute", Precompute, PrecomputeDetails, sections)
