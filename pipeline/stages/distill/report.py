"""Students: what they keep of their origin, and the candidates that they were chosen from."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from pipeline.report.charts import Lines, Series
from pipeline.report.section import Curves, Section, Table
from pipeline.report.table import count
from pipeline.results import Quality, Result, TrainingDetails


@dataclass(frozen=True)
class KeptParts:
    """Of one kind of a model's parts."""

    kept: int
    of: int
    """In each layer; of channels, in the model."""
    importance: tuple[float, ...]
    """The part of the importance that those carry, for each layer; of channels, one number for the model."""


@dataclass(frozen=True)
class Narrowed:
    """Of a student that is narrower than its origin."""

    heads: KeptParts
    mlp: KeptParts
    hidden: KeptParts


@dataclass(frozen=True)
class Candidate:
    """A shape that was tried."""

    shape: str
    parameters: int
    before: Quality
    after: Quality
    """After `candidate_tokens` of training."""
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class DistillDetails(TrainingDetails):
    """What the student has of its origin."""

    kept_layers: tuple[int, ...]
    importance: tuple[float, ...]
    """Of each layer of the origin; empty where all were kept."""
    width: Narrowed | UnsetType = UNSET
    candidates: tuple[Candidate, ...] | UnsetType = UNSET


DistillResult = Result[DistillDetails]


def sections(results: Sequence[DistillResult], curves: Curves) -> list[Section]:
    """One for each student that is narrower than its origin, or was chosen."""
    return [
        Section(
            f"What the student keeps: {result.stage}",
            _summary(result.details),
            tables=[_candidates(result.details.candidates)] if result.details.candidates else [],
            charts=[_shares(result.details)] if result.details.width else [],
        )
        for result in results
        if result.details.width or result.details.candidates
    ]


def _summary(details: DistillDetails) -> str:
    """Which layers, then what of each of them."""
    layers = ", ".join(_ranges(details.kept_layers))
    text = f"Layers {layers} of {len(details.importance) or len(details.kept_layers)}"
    if not details.width:
        return f"{text}, whole."
    width = details.width
    parts = [
        f"{part.kept:,} of {part.of:,} {name}, which carry {sum(part.importance) / len(part.importance):.0%}"
        for name, part in (("heads", width.heads), ("MLP neurons", width.mlp), ("channels", width.hidden))
        if part.kept < part.of
    ]
    return f"{text}; {'; '.join(parts)} of what all of them weigh in a pass over text."


def _ranges(numbers: Sequence[int]) -> list[str]:
    """`0–3`, `5`: ascending numbers without those in between."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]


def _shares(details: DistillDetails) -> Lines:
    """What stays of the heads and neurons in each layer, by their importance."""
    width = details.width or None
    named = [("heads", width.heads), ("MLP neurons", width.mlp)] if width else []
    series = [
        Series(name, [(float(layer), share) for layer, share in zip(details.kept_layers, part.importance, strict=True)])
        for name, part in named
        if part.kept < part.of
    ]
    return Lines("Importance that is kept in each layer", series, "layer of the origin", "part of all")


def _candidates(candidates: Sequence[Candidate]) -> Table:
    """One line for each, the best first."""

    def kl(quality: Quality) -> float:
        return quality.kl.value if quality.kl else 0.0

    ranked = sorted(candidates, key=lambda candidate: kl(candidate.after))
    rows = [
        [
            candidate.shape,
            count(candidate.parameters),
            f"{kl(candidate.before):.3f}",
            f"{kl(candidate.after):.3f}",
            "chosen" if candidate.chosen else "",
        ]
        for candidate in ranked
    ]
    first = min(candidates, key=lambda candidate: kl(candidate.before))
    note = "Held-out text, and the same small budget of training for each; the best then was trained from its start."
    if not first.chosen:
        note += f" Before training, {first.shape} was nearer to the teacher."
    return Table(rows, ("candidate", "parameters", "KL, pruned", "KL, trained briefly", ""), note=note)
