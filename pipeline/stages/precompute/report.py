"""What stored distributions take."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.section import Curves, Section, Table
from pipeline.report.table import count, duration, size, speed
from pipeline.results import Result


@dataclass(frozen=True, kw_only=True)
class PrecomputeDetails:
    """What was stored."""

    positions: int
    """Labels of the data set."""
    stored_tokens: int
    """At all of them together."""
    stored_bytes: int
    draws: int
    """0 where a server has listed the tokens."""
    rest: float = 0.0
    """The part of the probability that is not in the stored tokens, on average."""
    computed_tokens: int
    """In the attempt that finished."""
    seconds: float

    @property
    def bytes_per_position(self) -> float:
        return self.stored_bytes / self.positions


def sections(results: Sequence[Result[PrecomputeDetails]], curves: Curves) -> list[Section]:
    """One table for all stages."""
    text = "A teacher has run once over this text; what it says there takes, and students learn from it without it:"
    head = ("stage", "labels", "draws", "different tokens", "left out", "bytes a label", "in all", "tokens/s", "time")
    return [Section("Stored distributions", text, tables=[Table([_row(result) for result in results], head)])]


def _row(result: Result[PrecomputeDetails]) -> list[str]:
    details = result.details
    rate = speed(details.computed_tokens / details.seconds) if details.computed_tokens else "–"
    return [
        result.stage,
        count(details.positions),
        str(details.draws or "listed"),
        f"{details.stored_tokens / details.positions:.1f}",
        f"{details.rest:.1%}",
        f"{details.bytes_per_position:.1f}",
        size(details.stored_bytes),
        rate,
        duration(details.seconds),
    ]
