"""Quality, memory and speed of a model, beside a reference."""

from pipeline.stages.base import StageKind
from pipeline.stages.evaluate.config import Evaluate, mistakes, task_files
from pipeline.stages.evaluate.report import EvaluateDetails, sections

KIND = StageKind("evaluate", Evaluate, EvaluateDetails, sections, mistakes, stamp=task_files)
