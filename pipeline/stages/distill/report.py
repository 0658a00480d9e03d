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

    def parts(self) -> dict[str, KeptParts]:
        """By what they are called in a sentence."""
        return {"heads": self.heads, "MLP neurons": self.mlp, "channels": self.hidden}


@dataclass(frozen=True)
class Candidate:
    """A shape that was tried."""

    shape: str
    parameters: int
    before: Quality
    after: Quality
    """After `candidate_tokens` of training."""
    chosen: bool


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that the student says where it drafts."""

    tokens: int
    of: int
    coverage: float
    """The part of the held-out labels that are among them."""


@dataclass(frozen=True, kw_only=True)
class DistillDetails(TrainingDetails):
    """What the student has of its origin."""

    kept_layers: tuple[int, ...]
    importance: tuple[float, ...]
    """Of each layer of the origin; empty where all were kept."""
    width: Narrowed | UnsetType = UNSET
    candidates: tuple[Candidate, ...] | UnsetType = UNSET
    draft_vocabulary: DraftVocabulary | UnsetType = UNSET


DistillResult = Result[DistillDetails]


def sections(results: Sequence[DistillResult], curves: Curves) -> list[Section]:
    """One for each student that is narrower than its origin, was chosen, or drafts with fewer tokens."""
    return [_section(result.stage, result.details) for result in results if _has_section(result.details)]


def _has_section(details: DistillDetails) -> bool:
    return bool(details.width or details.candidates or details.draft_vocabulary)


def _section(stage: str, details: DistillDetails) -> Section:
    layers = f"{', '.join(_ranges(details.kept_layers))} of {len(details.importance) or len(details.kept_layers)}"
    return Section(
        f"What the student keeps: {stage}",
        f"It has the layers {layers}.",
        tables=[
            *([_candidates(details.candidates)] if details.candidates else []),
            *([_parts(details.width)] if details.width else []),
            *([_said(details.draft_vocabulary)] if details.draft_vocabulary else []),
        ],
        charts=[_shares(details.kept_layers, details.width)] if details.width else [],
    )


def _said(vocabulary: DraftVocabulary) -> Table:
    """One line, of tokens."""
    row = ["tokens", f"{vocabulary.tokens:,}", f"{vocabulary.of:,}", f"{vocabulary.coverage:.1%}"]
    return Table([row], ("what it drafts with", "kept", "of", "of the held-out text"), note="Alone it says all tokens.")


def _parts(width: Narrowed) -> Table:
    """One line for each kind of parts."""
    rows = [
        [
            name,
            f"{part.kept:,}",
            f"{part.of:,}",
            f"{sum(part.importance) / len(part.importance):.1%}",
            f"{min(part.importance):.1%}",
        ]
        for name, part in width.parts().items()
    ]
    note = "Importance is how large activations are in a pass over text; of heads and neurons in each layer by itself."
    return Table(rows, ("parts", "kept", "of", "importance kept", "least in a layer"), note=note)


def _ranges(numbers: Sequence[int]) -> list[str]:
    """`0–3`, `5`: ascending numbers without those in between."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]


def _shares(layers: Sequence[int], width: Narrowed) -> Lines:
    """What stays of the heads and neurons in each layer, by their importance."""
    series = [
        Series(name, [(float(layer), share) for layer, share in zip(layers, part.importance, strict=True)])
        for name, part in width.parts().items()
        if part is not width.hidden and part.kept < part.of
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
