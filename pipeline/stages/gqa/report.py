"""Grouped KV heads: conversions side by side, what the cache holds, decoding, the groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from pipeline.report.charts import Chart, Grid
from pipeline.report.section import Curves, Section, Table
from pipeline.report.speeds import Decoded, decoding_charts
from pipeline.results import Quality, Result, TrainingDetails


@dataclass(frozen=True)
class Compared:
    """One method of grouping."""

    method: str
    converted: Quality
    uptrained: Quality
    """After the small budget of training."""


@dataclass(frozen=True)
class Capacity:
    """What a cache of that size holds."""

    cache_gib: float
    tokens: int
    """Of each sequence."""
    sequences: tuple[int, int]
    """Of the parent, and of the result."""


@dataclass(frozen=True, kw_only=True)
class GqaDetails(TrainingDetails):
    """What is said of a conversion."""

    method: str
    groups: list[tuple[tuple[int, ...], ...]]
    """For each layer, the heads of each group."""
    compared: list[Compared]
    capacity: Capacity
    decoding: Decoded | UnsetType = UNSET
    """Unset where nothing was published."""


GqaResult = Result[GqaDetails]


def sections(results: Sequence[GqaResult], curves: Curves) -> list[Section]:
    """One for each stage."""
    return [_section(result) for result in results]


def _section(result: GqaResult) -> Section:
    details = result.details
    parent, *_, last = result.models
    parent_loss = parent.quality.nll.value if parent.quality else 0.0
    groups = Grid("Which heads share keys and values", _group_numbers(details.groups), "layer", "head")
    charts: list[Chart] = [groups]
    if details.decoding:
        charts += decoding_charts(details.decoding)
    return Section(
        f"Grouped KV heads: {result.stage}",
        _recovery(result) if parent.quality and last.quality else "",
        tables=[_compared(details.compared, parent_loss)] if details.compared else [],
        charts=charts,
    )


def _recovery(result: GqaResult) -> str:
    """One sentence on the loss and one on memory."""
    details = result.details
    parent, before, after = (row.quality.nll.value for row in result.models if row.quality)
    mean = next((row.converted.nll.value for row in details.compared if row.method == "mean"), before)
    regained = f": {(before - after) / (before - parent):.0%} of what was lost is back" if before > parent else ""
    if mean > max(before, parent):
        regained += f", and {(mean - after) / (mean - parent):.0%} of what the plain mean loses is spared"
    fewer, more = details.capacity.sequences
    return (
        f"Converted by {details.method}: the held-out loss went from {parent:.3f} to {before:.3f}, and by training "
        f"to {after:.3f}{regained}. {details.capacity.cache_gib:g} GiB of cache hold {more:,} sequences of "
        f"{details.capacity.tokens:,} tokens instead of {fewer:,}."
    )


def _compared(compared: Sequence[Compared], parent_loss: float) -> Table:
    """One line for each method."""
    converted = [(row.method, row.converted) for row in compared]
    uptrained = [(row.method, row.uptrained) for row in compared]
    note = f"Held-out text, and the same small budget of training for each; the parent's loss is {parent_loss:.3f}. "
    note += f"{_ranking('Right after conversion', converted)} {_ranking('After that training', uptrained)}"
    rows = [[row.method, *_numbers(row.converted), *_numbers(row.uptrained)] for row in compared]
    return Table(rows, ("method", "loss, converted", "KL, converted", "loss, uptrained", "KL, uptrained"), note=note)


def _numbers(quality: Quality) -> list[str]:
    return [f"{quality.nll.value:.3f}", f"{quality.kl.value:.3f}" if quality.kl else ""]


def _ranking(when: str, found: Sequence[tuple[str, Quality]]) -> str:
    """Which method is best and by how much, in a sentence; nothing where there is no other."""
    losses = sorted((quality.nll.value, method) for method, quality in found)
    if len(losses) < 2:
        return ""
    (best, name), (second, other) = losses[:2]
    return f"{when} {name} is best, {second - best:.3f} below {other}."


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
