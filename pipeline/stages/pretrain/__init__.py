"""A new model, trained on text from fresh weights."""

from pipeline.stages.base import StageKind
from pipeline.stages.pretrain.config import Pretrain, mistakes
from pipeline.stages.pretrain.report import PretrainDetails, sections

KIND = StageKind("pretrain", Pretrain, PretrainDetails, sections, mistakes)
