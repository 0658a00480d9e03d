"""The report's section on grouped KV heads: conversions side by side, what the cache holds, decoding, the groups."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report.charts import Bar, bar_chart, grid_chart
from pipeline.report.table import html_table, speed
from pipeline.results import Result


def grouped_heads(results: Sequence[Result]) -> str:
    """HTML of every stage `gqa` that finished; empty without one."""
    return "".join(_stage(result) for result in results if result.kind == "gqa")


def _stage(result: Result) -> str:
    details = result.details
    parent, *_, last = result.models
    intro = f"<h2>Grouped KV heads: {escape(result.stage)}</h2>"
    if parent.quality and last.quality:
        intro += f"<p>{escape(_recovery(details, result))}</p>"
    charts = [
        grid_chart(
            "Which heads share keys and values", _group_numbers(details["groups"]), row_name="layer", column_name="head"
        ),
        *_decoding(details.get("decoding")),
    ]
    return (
        intro
        + _compared(result, parent.quality.nll.value if parent.quality else 0.0)
        + (f'<div class="charts bars">{"".join(charts)}</div>')
    )


def _recovery(details: Mapping[str, Any], result: Result) -> str:
    """One sentence on the loss and one on memory."""
    parent, before, after = (row.quality.nll.value for row in result.models if row.quality)
    mean = next((row["converted"]["nll"]["value"] for row in details["compared"] if row["method"] == "mean"), before)
    regained = f": {(before - after) / (before - parent):.0%} of what was lost is back" if before > parent else ""
    if mean > max(before, parent):
        regained += f", and {(mean - after) / (mean - parent):.0%} of what the plain mean loses is spared"
    capacity = details["capacity"]
    fewer, more = capacity["sequences"]
    return (
        f"Converted by {details['method']}: the held-out loss went from {parent:.3f} to {before:.3f}, and by training "
        f"to {after:.3f}{regained}. {capacity['cache_gib']:g} GiB of cache hold {more:,} sequences of "
        f"{capacity['tokens']:,} tokens instead of {fewer:,}."
    )


_COMPARED_COLUMNS = ("method", "loss, converted", "KL, converted", "loss, uptrained", "KL, uptrained")


def comparison_lines(result: Result) -> list[list[str]]:
    """One line for each method that was compared, in the order of the columns' headings, which come first."""
    lines = [list(_COMPARED_COLUMNS)] if result.details.get("compared") else []
    for row in result.details.get("compared", ()):
        found = [row[when][name]["value"] for when in ("converted", "uptrained") for name in ("nll", "kl")]
        lines.append([row["method"], *(f"{value:.3f}" for value in found)])
    return lines


def _compared(result: Result, parent_loss: float) -> str:
    if not (lines := comparison_lines(result)):
        return ""
    note = f"Held-out text, and the same small budget of training for each; the parent's loss is {parent_loss:.3f}. "
    note += " ".join(_ranking(when, result.details["compared"]) for when in ("converted", "uptrained"))
    return f'{html_table(lines)}<p class="note">{escape(note)}</p>'


def _ranking(when: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Which method is best and by how much, in a sentence; nothing where there is no other."""
    losses = sorted((row[when]["nll"]["value"], row["method"]) for row in rows)
    if len(losses) < 2:
        return ""
    (best, name), (second, other) = losses[:2]
    point = "Right after conversion" if when == "converted" else "After that training"
    return f"{point} {name} is best, {second - best:.3f} below {other}."


def _group_numbers(groups: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """For each layer the group of each head."""
    layers = []
    for layer in groups:
        numbers = [0] * sum(len(group) for group in layer)
        for number, group in enumerate(layer):
            for head in group:
                numbers[head] = number
        layers.append(numbers)
    return layers


def _decoding(decoding: Mapping[str, Any] | None) -> list[str]:
    if decoding is None:
        return []
    by_model: Mapping[str, Mapping[str, float]] = decoding["tokens_per_s"]
    sizes = list(dict.fromkeys(size for points in by_model.values() for size in points))
    return [
        bar_chart(
            f"Decoding, {size} at once, {decoding['context_tokens']:,} tokens in the cache each",
            [Bar(name, points[size], f"{speed(points[size])} tokens/s") for name, points in by_model.items()],
        )
        for size in sizes
    ]
