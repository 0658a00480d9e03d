"""The table of models that a run ends with, and numbers as people read them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.report.section import Section, Table
from pipeline.results import Estimate, ModelReport, Quality, Result

ABSENT = "–"
FEW_TOKENS = 1_000
"""Of held-out text, on fewer of which figures of quality say little; docs/your-data.md wants 8,000 for narrow ones."""
TOO_FEW = "too few to tell models apart: raise held_out of the data, or give more text"


@dataclass(frozen=True)
class Column:
    """One column: its heading, what it means, and a row's cell."""

    heading: str
    meaning: str
    cell: Callable[[ModelReport], str]


def collect_rows(results: Iterable[Result[Any]]) -> list[ModelReport]:
    """One row for each model that some stage measured; a later stage's numbers replace an earlier one's.

    A model that is kept in two states, before and after training, is timed once, and without a distance before where
    that was to another reference than the one after. One that nothing trained has one state. Who was timed beside
    another model has that one's latest speed times the ratio of both: a machine is not equally fast in all stages.
    """
    results = list(results)
    rows: dict[str, ModelReport] = {}
    references = _references(results)
    timed_beside: dict[str, str] = {}
    for result in results:
        for report in result.models:
            if report.same_shape_as and not result.cost.trained_tokens:
                continue
            if report.speed:
                timed_beside[report.label] = result.models[0].label
            known = rows.get(report.label)
            if known is not None:
                speed = report.speed or known.speed
                report = replace(report, quality=_latest(known.quality, report.quality), speed=speed)
            rows[report.label] = report
    for label, row in rows.items():
        if label in timed_beside:
            rows[label] = row = _beside(row, rows[timed_beside[label]])
        if row.same_shape_as not in rows:
            continue
        quality = row.quality
        if quality and references.get(label) != references.get(row.same_shape_as):
            quality = replace(quality, kl=None, agreement=None, acceptance=None)
        rows[label] = replace(row, quality=quality, speed=row.speed or rows[row.same_shape_as].speed)
    return list(rows.values())


def _beside(row: ModelReport, other: ModelReport) -> ModelReport:
    """The row with its speeds in the measure of the model that it was timed beside."""
    known = {point.batch_size: point.tokens_per_s for point in other.speed}
    speeds = [
        replace(point, tokens_per_s=point.beside * known[point.batch_size])
        if point.beside is not None and point.batch_size in known
        else point
        for point in row.speed
    ]
    return replace(row, speed=tuple(speeds))


def reference_of(result: Result[Any]) -> str:
    """The label of what a stage's models were held against: the first that it measured."""
    return next((row.label for row in result.models if not row.same_shape_as), "the teacher")


def _references(results: Iterable[Result[Any]]) -> dict[str, str]:
    """By a model's label that of what it was held against last."""
    return {
        report.label: reference_of(result)
        for result in results
        for report in result.models
        if report.quality and report.quality.kl and not (report.same_shape_as and not result.cost.trained_tokens)
    }


def _latest(known: Quality | None, found: Quality | None) -> Quality | None:
    """What was found, with the distance to a reference that was known where no reference was asked."""
    if known is None or found is None or found.kl is not None:
        return found or known
    return replace(found, kl=known.kl, agreement=known.agreement, acceptance=known.acceptance)


def columns(rows: Sequence[ModelReport]) -> list[Column]:
    """The fixed ones, and one for each batch size at which speed was measured; without those that no row fills."""
    fixed = [
        Column("parameters", "Trained numbers; tied embeddings count once.", lambda row: count(row.parameters)),
        Column("weights", "Bytes of the weights as stored.", lambda row: size(row.weight_bytes)),
        Column(
            "KV / token", "Bytes of keys and values a token while serving.", lambda row: size(row.kv_bytes_per_token)
        ),
        Column(
            "perplexity", "On held-out text.", lambda row: f"{row.quality.perplexity:,.2f}" if row.quality else ABSENT
        ),
        Column("bits/byte", "Loss on held-out text in bits a UTF-8 byte.", _bits_per_byte),
        Column("KL", "KL(reference ‖ model) on held-out text, nats a token.", lambda row: _quality(row, "kl")),
        Column("agreement", "Positions where both put the same token first.", lambda row: _quality(row, "agreement")),
        Column("1 − TV", "Chance that the reference accepts a drafted token.", lambda row: _quality(row, "acceptance")),
    ]
    sizes = sorted({point.batch_size for row in rows for point in row.speed})
    accepted = Column("accepted", "Drafted tokens that the verifier accepted while serving.", _accepted)
    known = [*fixed, *map(_speed_column, sizes), accepted]
    return [column for column in known if any(column.cell(row) != ABSENT for row in rows)]


def models_section(results: Sequence[Result[Any]]) -> Section:
    """The table that a run ends with: one row a model."""
    rows, references = collect_rows(results), _references(results)
    shown = columns(rows)
    measured = sorted({row.quality.tokens for row in rows if row.quality})
    few = f", {TOO_FEW}" if measured and measured[0] < FEW_TOKENS else ""
    figures = " and ".join(f"{tokens:,}" for tokens in measured)
    notes = [f"Quality on {figures} held-out tokens{few}."] if measured else []
    first, *others = dict.fromkeys(references.values()) or [""]
    if others:
        labels = {one: " and ".join(label for label, other in references.items() if other == one) for one in others}
        exceptions = "".join(f", those of {labels[one]} to {one}" for one in others)
        notes.append(f"KL, agreement and 1 − TV are to {first}{exceptions}.")
    if any(row.exact for row in rows):
        notes.append(
            "A verified pair has its verifier's own distribution by construction; it costs both models' memory."
        )
    table = Table(
        rows=[[row.label, *(column.cell(row) for column in shown)] for row in rows],
        head=["model", *(column.heading for column in shown)],
        meanings=[column.meaning for column in shown],
        note=" ".join(notes),
    )
    return Section("Models", tables=[table] if rows else [])


def count(number: int) -> str:
    """134.5 M"""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.4g} {unit}"
    return str(number)


def size(number_of_bytes: float) -> str:
    """269 MB, in powers of a thousand."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number_of_bytes >= factor:
            return f"{number_of_bytes / factor:.3g} {unit}"
    return f"{number_of_bytes:.0f} B"


def speed(tokens_per_s: float) -> str:
    """7.4 or 1,250"""
    return f"{tokens_per_s:.1f}" if tokens_per_s < 100 else f"{tokens_per_s:,.0f}"


def duration(seconds: float) -> str:
    """3 min 05 s"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _bits_per_byte(row: ModelReport) -> str:
    return f"{row.quality.bits_per_byte.value:.3f}" if row.quality else ABSENT


def _quality(row: ModelReport, name: str) -> str:
    estimate: Estimate | None = getattr(row.quality, name) if row.quality else None
    if row.exact:
        return {"kl": "0", "agreement": "100 %", "acceptance": "1"}[name]
    if estimate is None:
        return ABSENT
    return f"{estimate.value * 100:.1f} %" if name == "agreement" else f"{estimate.value:.3f}"


def _accepted(row: ModelReport) -> str:
    fractions = [point.accepted for point in row.speed if point.accepted is not None]
    return f"{fractions[0] * 100:.0f} %" if fractions else ABSENT


def _speed_column(batch_size: int) -> Column:
    def cell(row: ModelReport) -> str:
        points = [point for point in row.speed if point.batch_size == batch_size]
        return speed(points[0].tokens_per_s) if points else ABSENT

    heading = f"tokens/s ×{batch_size}"
    return Column(
        heading,
        f"New tokens a second with {batch_size} requests at once, by the serving engine; before training as after. Who "
        "was timed beside another model: that one's speed times the ratio of both, turn by turn.",
        cell,
    )
