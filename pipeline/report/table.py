"""The table that a run ends with: one row a model, the same columns in the terminal and in the report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from pipeline.results import Estimate, ModelReport, Result

if TYPE_CHECKING:
    from rich.table import Table

ABSENT = "–"


@dataclass(frozen=True)
class Column:
    """One column: its heading, what it means, and a row's cell."""

    heading: str
    meaning: str
    cell: Callable[[ModelReport], str]


def collect_rows(results: Iterable[Result]) -> list[ModelReport]:
    """One row for each model that some stage measured; a later stage's numbers replace an earlier one's.

    A model that is kept in two states, before and after training, is timed once.
    """
    rows: dict[str, ModelReport] = {}
    for result in results:
        for report in result.models:
            known = rows.get(report.label)
            if known is not None:
                report = replace(report, quality=report.quality or known.quality, speed=report.speed or known.speed)
            rows[report.label] = report
    for label, row in rows.items():
        if not row.speed and row.same_shape_as in rows:
            rows[label] = replace(row, speed=rows[row.same_shape_as].speed)
    return list(rows.values())


def columns(rows: list[ModelReport]) -> list[Column]:
    """The columns for these rows: the fixed ones, and one for each batch size at which speed was measured."""
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
    return fixed + [_speed_column(batch_size) for batch_size in sizes] + [accepted] * any(row.exact for row in rows)


def rich_table(rows: list[ModelReport], *, width: int) -> "Table":
    """The table for a terminal of `width` characters: a row a model, or on a narrow one a column a model."""
    shown = columns(rows)
    lines = [["model", *(column.heading for column in shown)]]
    lines += [[row.label, *(column.cell(row) for column in shown)] for row in rows]
    widest = sum(max(map(len, cells)) + 3 for cells in zip(*lines, strict=True))
    if widest > width:
        lines = [list(cells) for cells in zip(*lines, strict=True)]
    return plain_table(lines)


def plain_table(lines: list[list[str]]) -> "Table":
    """Cells as a table for the terminal; the first line is its head."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(lines[0]):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def html_table(lines: Sequence[Sequence[str]]) -> str:
    """The same for the report; the first cell of each line names it."""
    head, *rows = lines
    headings = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    return f'<div class="card scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


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
        f"New tokens a second with {batch_size} requests at once, by the serving engine; before training as after.",
        cell,
    )
