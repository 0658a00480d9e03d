"""Conversations that a model wrote: how many were kept, why others were dropped, a few to read."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.section import Cell, Curves, Section, Table
from pipeline.report.table import duration, speed
from pipeline.results import Result

SHOWN_LETTERS = 600


@dataclass(frozen=True)
class Drop:
    """What was dropped for one reason."""

    what: str
    """prompt or answer"""
    reason: str
    count: int
    example: str
    """The first of them."""


@dataclass(frozen=True)
class Sample:
    """The last question and the answer of a conversation."""

    prompt: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class SynthesizeDetails:
    """What came of the prompts."""

    prompts: int
    answered: int
    """Prompts that were worth an answer."""
    kept: int
    """Answers that were worth training on."""
    answer_tokens: int
    """Of those that were kept."""
    drops: list[Drop]
    samples: list[Sample]
    written_tokens: int
    """In the attempt that finished, of prompts and answers, dropped ones included."""
    seconds: float
    """That writing them took."""


def sections(results: Sequence[Result[SynthesizeDetails]], curves: Curves) -> list[Section]:
    """One for each stage."""
    return [_section(result) for result in results]


def _section(result: Result[SynthesizeDetails]) -> Section:
    details = result.details
    text = (
        f"{details.answered:,} of {details.prompts:,} prompts were worth an answer and {details.kept:,} answers worth "
        f"training on; those have {details.answer_tokens:,} tokens."
    )
    if details.written_tokens:
        rate = speed(details.written_tokens / details.seconds)
        text += f" {details.written_tokens:,} tokens were written in {duration(details.seconds)}, {rate} a second."
    drops = sorted(details.drops, key=lambda drop: (drop.what != "prompt", -drop.count))
    dropped = [(f"{drop.what}: {drop.reason}", str(drop.count), _text(drop.example)) for drop in drops]
    samples = [(_text(sample.prompt), _text(sample.answer)) for sample in details.samples]
    tables = [
        Table(dropped, ("dropped", "how many", Cell("the first of them", "text"))),
        Table(samples, ("asked", Cell("answered", "text"))),
    ]
    return Section(f"Conversations written by the engine: {result.stage}", text, tables=[t for t in tables if t.rows])


def _text(text: str) -> Cell:
    return Cell(text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…", "text")
