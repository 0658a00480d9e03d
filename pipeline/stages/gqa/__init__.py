"""Fewer KV heads, converted on calibration text and recovered by training."""

from pipeline.stages.base import StageKind, Tunable
from pipeline.stages.gqa.config import Gqa, choices
from pipeline.stages.gqa.report import GqaDetails, sections
from pipeline.stages.shared.config import mistakes

KIND = StageKind(
    "gqa",
    Gqa,
    GqaDetails,
    sections,
    mistakes,
    kept_figures=("start.json", "compared"),
    tunable=Tunable(lambda config: config.model, choices),
    starts_from=lambda config: config.model,
)
