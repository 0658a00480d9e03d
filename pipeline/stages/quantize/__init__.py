"""Weights in fewer bits, chosen on calibration text and taught by the model that they were made of."""

from pipeline.stages.base import StageKind, Tunable
from pipeline.stages.quantize.config import Quantize, choices, mistakes
from pipeline.stages.quantize.report import QuantizeDetails, sections

KIND = StageKind(
    "quantize",
    Quantize,
    QuantizeDetails,
    sections,
    mistakes,
    tunable=Tunable(lambda config: config.model, choices),
    starts_from=lambda config: config.model,
)
