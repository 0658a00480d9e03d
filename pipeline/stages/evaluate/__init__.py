"""Quality, memory and speed of a model, beside a reference."""

from pipeline.results import NoDetails
from pipeline.stages.base import StageKind
from pipeline.stages.evaluate.config import Evaluate, mistakes

KIND = StageKind("evaluate", Evaluate, NoDetails, mistakes=mistakes)
