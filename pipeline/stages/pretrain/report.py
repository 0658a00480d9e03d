"""Models made from nothing: held-out loss against training, in operations and in time."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from pipeline.report.charts import Lines, Series
from pipeline.report.section import Curves, Section, Table
from pipeline.report.table import count, duration
from pipeline.results import Result, TrainingDetails

_COLUMNS = ("model", "parameters", "tokens", "operations", "training time", "held-out loss", "tokens selected")


@dataclass(frozen=True)
class TrainingFlops:
    """Operations of training, forward and backward."""

    per_token: float
    total: float


@dataclass(frozen=True, kw_only=True)
class PretrainDetails(TrainingDetails):
    """What is said of a model made from nothing."""

    training_flops: TrainingFlops
    realised: list[float] | UnsetType = UNSET
    """The part of the held-out tokens that each routed layer selects; unset without routers."""


PretrainResult = Result[PretrainDetails]


def sections(results: Sequence[PretrainResult], curves: Curves) -> list[Section]:
    """All of them side by side."""
    return [
        Section(
            "From nothing, by training compute",
            "Operations count forward and backward passes with the output head; of routed layers only what their "
            "capacity lets through. Losses are those of the served rule.",
            tables=[Table([_row(result) for result in results], _COLUMNS)],
            charts=[compute_chart(results, curves)],
        )
    ]


def _row(result: PretrainResult) -> list[str]:
    (model,), cost, realised = result.models, result.cost, result.details.realised
    loss = model.quality.nll if model.quality else None
    margin = f" ± {loss.margin:.3f}" if loss and loss.margin is not None else ""
    return [
        model.label,
        count(model.parameters),
        count(cost.trained_tokens),
        f"{result.details.training_flops.total:.3g}",
        duration(cost.training_seconds),
        f"{loss.value:.3f}{margin}" if loss else "",
        f"{sum(realised) / len(realised):.3f} in {len(realised)} layers" if realised else "all",
    ]


def compute_chart(results: Sequence[PretrainResult], curves: Curves) -> Lines:
    """The held-out loss of each model on its way."""
    series = []
    for result in results:
        per_token = result.details.training_flops.per_token
        logged = [row for row in curves.get(result.stage, ()) if "held_out_cross_entropy" in row]
        points = [(per_token * row["tokens"], row["held_out_cross_entropy"]) for row in logged]
        series.append(Series(result.models[0].label, points, marked=True))
    return Lines("Held-out loss by training compute", series, "operations", "nats a token")
