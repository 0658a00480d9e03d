"""Quantized weights: methods side by side, where rounding costs most, and what recovery brought back."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.report.charts import Chart, Lines, Series
from pipeline.report.section import Curves, Section, Table
from pipeline.report.table import size
from pipeline.results import Quality, Result, TrainingDetails


@dataclass(frozen=True)
class Rounded:
    """One method, before any recovery."""

    method: str
    quality: Quality
    seconds: float
    """Of calibration and rounding, all layers."""


@dataclass(frozen=True)
class ProjectionError:
    """One quantized linear layer."""

    name: str
    format: str
    error: float
    """Squared error of its outputs on calibration text, over their square."""


@dataclass(frozen=True, kw_only=True)
class QuantizeDetails(TrainingDetails):
    """What is said of quantized weights."""

    method: str
    format: str
    """As people read it."""
    bits_per_weight: float
    """Of the quantized weights, scales included."""
    compared: list[Rounded]
    errors: list[ProjectionError]
    train: str
    kv_cache: str = "auto"


QuantizeResult = Result[QuantizeDetails]

_TRAINED = {"scales": "scales and norms", "low_rank": "a low-rank update, scales and norms", "all": "every weight"}
_LINES = {
    "query, key, value": ("q_proj", "k_proj", "v_proj"),
    "attention's output": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The projections that read one input, by the name of their line."""


def sections(results: Sequence[QuantizeResult], curves: Curves) -> list[Section]:
    """One for each stage."""
    return [_section(result) for result in results]


def _section(result: QuantizeResult) -> Section:
    details = result.details
    charts: list[Chart] = [_errors(details.errors)]
    return Section(
        f"Quantized weights: {result.stage}", _summary(result), tables=_compared(details.compared), charts=charts
    )


def _summary(result: QuantizeResult) -> str:
    """One sentence on bytes, one on quality."""
    details = result.details
    parent, before, after = result.models
    text = (
        f"{details.format} by {details.method}: {details.bits_per_weight:.2f} bits a quantized weight, "
        f"{size(after.weight_bytes)} in all instead of {size(parent.weight_bytes)}. "
    )
    if not (parent.quality and before.quality and after.quality):
        return text
    text += f"Perplexity {parent.quality.perplexity:.2f} became {before.quality.perplexity:.2f}"
    if details.steps:
        trained = _TRAINED[details.train]
        text += f", and {after.quality.perplexity:.2f} by training {trained} in {details.steps} steps"
    return f"{text}." if details.kv_cache == "auto" else f"{text}; with keys and values cached in {details.kv_cache}."


def _compared(compared: Sequence[Rounded]) -> list[Table]:
    """One line for each method, if there are several."""
    if len(compared) < 2:
        return []
    note = "Held-out text, right after rounding; the seconds are those of calibration and rounding."
    rows = [[row.method, *_numbers(row.quality), f"{row.seconds:.0f}"] for row in compared]
    return [Table(rows, ("method", "perplexity", "KL", "same first token", "seconds"), note=note)]


def _numbers(quality: Quality) -> list[str]:
    kl, agreement = quality.kl, quality.agreement
    return [
        f"{quality.perplexity:.3f}",
        f"{kl.value:.4f}" if kl else "",
        f"{agreement.value:.1%}" if agreement else "",
    ]


def _errors(errors: Sequence[ProjectionError]) -> Lines:
    """A line for each input of a layer, the mean of what reads it."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in _LINES}
    for one in errors:
        _, _, number, *_, projection = one.name.split(".")
        line = next(name for name, projections in _LINES.items() if projection in projections)
        found[line].setdefault(int(number), []).append(one.error)
    series = [Series(name, [(x, fmean(ys)) for x, ys in line.items()], marked=True) for name, line in found.items()]
    return Lines(
        "What rounding does to each layer's outputs", series, "layer", "squared error, relative", from_zero=True
    )
