"""The Pareto front: which models give most for what they take, and the page on which runs stand side by side.

Quality is perplexity, and comparable on the same held-out text alone: models stand together that were measured on one
data set. A model is on the front where no other is at least as good in both quality and what it takes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.report.charts import Point, Points
from pipeline.report.section import Section, Table
from pipeline.report.table import ABSENT, collect_rows, size
from pipeline.results import ModelReport, Result
from pipeline.schema import DataSource, Recipe
from pipeline.stages.base import kind_of

TITLE = "What each model gives for what it takes"
MOST_LOST = 1.05
"""A model is as good as the first one for the sentence on top if its perplexity is at most so many times as high."""
_NOTE = (
    "★ marks a model that no other beats both in perplexity and in weights, speed or cost; lines join them. Perplexity "
    "on the same held-out text; speed of one request."
)


@dataclass(frozen=True)
class Candidate:
    """One model, or a verified pair."""

    name: str
    weight_bytes: int
    perplexity: float
    seconds_per_token: float | None
    """Of one request."""
    cost: float | None
    """Of a million tokens with the most requests at once that were measured, by the recipe's price."""


def candidates_of(recipe: Recipe, results: Sequence[Result[Any]]) -> dict[DataSource, list[Candidate]]:
    """Every model of a run in its final state, by the text that it was measured on; the first one comes first."""
    data_of = {stage.name: kind_of(stage.kind).data(stage.config) for stage in recipe.plan()}
    by_text: dict[DataSource, list[Result[Any]]] = {}
    for result in results:
        if (data := data_of.get(result.stage)) is not None:
            text = replace(recipe.data_set(data), distributions=None)  # which change nothing of what is held out
            by_text.setdefault(text, []).append(result)
    speeds = {row.label: row.speed for row in collect_rows(results)}
    price = recipe.serve.price_per_hour if recipe.serve else None
    found = {}
    for text, measured in by_text.items():
        rows = [replace(row, speed=speeds[row.label]) for row in collect_rows(measured)]
        found[text] = list(_candidates(rows, price))
    return found


def _candidates(rows: Sequence[ModelReport], price: float | None) -> Iterable[Candidate]:
    for row in rows:
        if row.quality is None or row.label.endswith(", before"):
            continue
        speeds = {point.batch_size: point.tokens_per_s for point in row.speed}
        cost = price / 3600 / speeds[max(speeds)] * 1e6 if price and speeds else None
        seconds = 1 / speeds[1] if 1 in speeds else None
        yield Candidate(row.label, row.weight_bytes, row.quality.perplexity, seconds, cost)


@dataclass(frozen=True)
class _Axis:
    title: str
    label: str
    of: Callable[[Candidate], float | None]


_LATENCY = _Axis(
    "Quality against latency",
    "ms a token",
    lambda one: None if one.seconds_per_token is None else 1e3 * one.seconds_per_token,
)
_AXES = (
    _Axis("Quality against memory", "MB of weights", lambda one: one.weight_bytes / 1e6),
    _LATENCY,
    _Axis("Quality against cost", "price of a million tokens", lambda one: one.cost),
)


def front_of(points: Iterable[Point]) -> list[Point]:
    """Those that no other is at least as good as in both, from left to right; of equal ones the first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def latency_chart(rows: Sequence[ModelReport]) -> Points:
    """The models of one run, all measured on one text: perplexity by the time that a token of one request takes."""
    return _chart(_LATENCY, list(_candidates(rows, price=None)))


def _chart(axis: _Axis, candidates: Sequence[Candidate]) -> Points:
    points = [Point(one.name, x, one.perplexity) for one in candidates if (x := axis.of(one)) is not None]
    return Points(axis.title, points, axis.label, "perplexity", front_of(points))


def front_section(candidates: Sequence[Candidate], title: str = TITLE) -> Section:
    """Plots, a table, and what to say of the best ones; empty for fewer than two models."""
    if len(candidates) < 2:
        return Section(title)
    first, charts, best = candidates[0], [], set()
    for chart in (_chart(axis, candidates) for axis in _AXES):
        if len(chart.points) > 1:
            best |= {point.name for point in chart.front}
            charts.append(chart)
    rows = [[f"{one.name} ★" if one.name in best else one.name, *_cells(one, first)] for one in candidates]
    head = ["model", "weights", f"beside {first.name}", "speed beside it", "perplexity", "beside it"]
    return Section(title, _best_sentence(candidates), tables=[Table(rows, head, note=_NOTE)], charts=charts)


def _best_sentence(candidates: Sequence[Candidate]) -> str:
    """What a user would repeat: of the models nearly as good as the first one, which gives most."""
    first, *others = candidates
    good = [one for one in others if one.perplexity <= MOST_LOST * first.perplexity and _gain(one, first) > 1]
    if not good:
        return f"No model is within {MOST_LOST - 1:.0%} of {first.name}'s perplexity and smaller or faster."
    best = max(good, key=lambda one: _gain(one, first))
    text = f"{best.name} takes {best.weight_bytes / first.weight_bytes:.2f}× the memory of {first.name}"
    if (faster := _speed_beside(best, first)) is not None:
        text += f" and has {faster:.2f}× its speed"
    return f"{text}, at {best.perplexity / first.perplexity:.3f}× its perplexity."


def _gain(one: Candidate, first: Candidate) -> float:
    """Memory and speed together; a speed that nobody measured counts as the same."""
    return first.weight_bytes / one.weight_bytes * (_speed_beside(one, first) or 1.0)


def _speed_beside(one: Candidate, first: Candidate) -> float | None:
    if one.seconds_per_token is None or first.seconds_per_token is None:
        return None
    return first.seconds_per_token / one.seconds_per_token


def _cells(one: Candidate, first: Candidate) -> list[str]:
    faster = _speed_beside(one, first)
    return [
        size(one.weight_bytes),
        f"{one.weight_bytes / first.weight_bytes:.2f}×",
        ABSENT if faster is None else f"{faster:.2f}×",
        f"{one.perplexity:,.2f}",
        f"{one.perplexity / first.perplexity:.3f}×",
    ]


def run_sections(recipe: Recipe, results: Sequence[Result[Any]]) -> list[Section]:
    """One for each data set that models were measured on."""
    found = {data: candidates for data, candidates in candidates_of(recipe, results).items() if len(candidates) > 1}
    titles = [TITLE if len(found) == 1 else f"{TITLE}: {data.name}" for data in found]
    return [front_section(candidates, title) for title, candidates in zip(titles, found.values(), strict=True)]


def compare_sections(runs: Mapping[str, tuple[Recipe, Sequence[Result[Any]]]]) -> list[Section]:
    """Runs by name, side by side: one section for each data set that they share or have alone.

    Models that several runs import are one model where they measured alike.
    """
    together: dict[DataSource, dict[tuple[Any, ...], Candidate]] = {}
    for name, (recipe, results) in runs.items():
        for data, candidates in candidates_of(recipe, results).items():
            for one in candidates:
                identity = (one.weight_bytes, one.perplexity, one.name)
                together.setdefault(data, {}).setdefault(identity, replace(one, name=f"{name}: {one.name}"))
    return [front_section(list(found.values()), f"{TITLE}: {data.name}") for data, found in together.items()]
