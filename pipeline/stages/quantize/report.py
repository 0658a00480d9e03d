"""Quantized weights: methods side by side, where rounding costs most, and what recovery brought back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.report.charts import Chart, Lines, Point, Points, Series
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


@dataclass(frozen=True)
class LayerCost:
    """What rounding one linear layer alone costs the model."""

    name: str
    nats: float
    """A token, in the smaller format."""
    enlarged: bool
    """Whether it gets the larger one."""


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
    costs: list[LayerCost]
    """Where a budget of bits was spent by them."""
    train: str
    kv_cache: str = "auto"


QuantizeResult = Result[QuantizeDetails]

_PLOT_TEXT = "Held-out text; further down is nearer to the unquantized model. Methods of one stage have a colour."
_TRAINED = {"scales": "scales and norms", "low_rank": "a low-rank update, scales and norms", "all": "every weight"}
_LINES = {
    "query, key, value": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "attention's output": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}
"""The projections that read one input, by the name of their line."""


def sections(results: Sequence[QuantizeResult], curves: Curves) -> list[Section]:
    """One for each stage, behind what shows them all."""
    plot = Section("Quantized weights: quality against bytes", _PLOT_TEXT, charts=[_against_bytes(results)])
    return [plot, *(_section(result) for result in results)]


def _against_bytes(results: Sequence[QuantizeResult]) -> Points:
    """Each method that was compared, and what recovery made of one."""
    points = []
    for color, result in enumerate(results, start=1):
        _, _, after = result.models
        megabytes, found = after.weight_bytes / 1e6, [(row.method, row.quality) for row in result.details.compared]
        if result.details.steps and after.quality:
            found.append((f"{result.details.method}, recovered", after.quality))
        points += [Point(name, megabytes, q.kl.value, (color - 1) % 4 + 1) for name, q in found if q.kl]
    return Points("Distance to the unquantized model", points, "MB of weights", "KL, nats a token")


def _section(result: QuantizeResult) -> Section:
    details = result.details
    errors, costs = {e.name: e.error for e in details.errors}, {cost.name: cost.nats for cost in details.costs}
    charts: list[Chart] = [
        _by_layer(errors, "What rounding does to each layer's outputs", "squared error, relative"),
        _by_layer(costs, "What rounding each layer alone would cost", "KL, nats a token"),
    ]
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


def _by_layer(figures: Mapping[str, float], title: str, unit: str) -> Lines:
    """A line for each input of a layer, the mean of what reads it; empty without figures."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in _LINES}
    for name, figure in figures.items():
        _, _, number, *_, projection = name.split(".")
        line = next(line for line, projections in _LINES.items() if projection in projections)
        found[line].setdefault(int(number), []).append(figure)
    series = [Series(name, [(x, fmean(ys)) for x, ys in line.items()], marked=True) for name, line in found.items()]
    return Lines(title, series, "layer", unit, from_zero=True)
