"""Weights in fewer bits, chosen on calibration text and taught by the model that they were made of."""

from pipeline.stages.base import StageKind
from pipeline.stages.quantize.config import Quantize, mistakes
from pipeline.stages.quantize.report import QuantizeDetails, sections

KIND = StageKind("quantize", Quantize, QuantizeDetails, sections, mistakes)
