"""What a stage leaves behind in its result.json: one schema for every kind of stage.

Quality is measured on held-out text, memory follows from the configuration, speed comes from the serving engine. A
field that a stage has nothing to say about is null or empty, never missing.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from pipeline.files import write_atomically

FORMAT_VERSION = 1
FILE_NAME = "result.json"


@dataclass(frozen=True)
class Estimate:
    """A mean over held-out text and how far off it may be."""

    value: float
    margin: float | None
    """Half of the 95 % confidence interval, from the spread between batches; None with fewer than two batches."""

    @property
    def low(self) -> float:
        return self.value - (self.margin or 0.0)

    @property
    def high(self) -> float:
        return self.value + (self.margin or 0.0)


@dataclass(frozen=True)
class Quality:
    """Of one model on held-out text. The last three compare it with a reference and are None without one."""

    tokens: int
    """Held-out tokens that were predicted."""
    nll: Estimate
    """Negative log-likelihood, nats a token."""
    perplexity: float
    bits_per_byte: Estimate
    """Loss in bits a UTF-8 byte of text: comparable between tokenizers."""
    kl: Estimate | None = None
    """KL(reference ‖ model), nats a token."""
    agreement: Estimate | None = None
    """Fraction of positions where both put the same token first."""
    acceptance: Estimate | None = None
    """1 − total variation: the chance that the reference accepts a token that this model drafts."""


@dataclass(frozen=True)
class SpeedPoint:
    """Generation at one batch size, prompts included."""

    batch_size: int
    tokens_per_s: float
    """New tokens of all requests together, a second."""
    accepted: float | None = None
    """Fraction of drafted tokens that were accepted; None without a draft."""
    beside: float | None = None
    """Times the speed of the stage's first model, turn by turn: the median; None of that model itself."""


@dataclass(frozen=True)
class ModelReport:
    """One row of the tables: a model, or a pair of them serving together."""

    label: str
    parameters: int
    weight_bytes: int
    """In the dtype in which the weights are stored."""
    kv_bytes_per_token: int
    """Of keys and values in the serving dtype."""
    quality: Quality | None = None
    speed: tuple[SpeedPoint, ...] = ()
    exact: bool = False
    """The distribution is the reference's own, by construction: a verified pair."""
    same_shape_as: str | None = None
    """Label of the model that this one is a state of: other weights in the same layers, hence equally fast."""


@dataclass(frozen=True)
class Check:
    """One bound of a gate."""

    name: str
    value: float
    worst: float
    """The end of the value's confidence interval that is nearer to the bound's wrong side: what is compared."""
    bound: float
    passed: bool


@dataclass(frozen=True)
class Parity:
    """How far the server's log-probabilities are from the trainer's on the same text and weights, in fp32."""

    tokens: int
    max_difference: float
    """Nats, over all positions."""
    tolerance: float
    same_top: float
    """Fraction of positions where both put the same token first."""
    mean_difference: float | None = None
    """Nats. What is held against the tolerance where products round activations; elsewhere None."""

    @property
    def difference(self) -> float:
        """Nats, which may be as many as the tolerance."""
        return self.max_difference if self.mean_difference is None else self.mean_difference

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class Cost:
    """What the stage itself took."""

    seconds: float
    """Wall clock of the attempt that finished."""
    peak_memory_bytes: int
    trained_tokens: int = 0
    training_seconds: float = 0.0
    """Spent in training steps, over all attempts of a stage that was interrupted."""
    trained_tokens_per_s: float = 0.0
    processes: int = 1


@dataclass(frozen=True)
class Piece:
    """A run of an answer's tokens that came from the same hand."""

    text: str
    drafted: bool
    """Proposed by the draft and accepted; else the served model's own."""


@dataclass(frozen=True)
class Answer:
    """One answer over HTTP."""

    prompt: str
    served: str
    """Who answered: "student", or "student verified by teacher"."""
    pieces: tuple[Piece, ...]
    tokens: int
    drafted_tokens: int
    """How many of them were proposed by the draft and accepted."""
    seconds: float

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def pieces_of(tokens: Iterable[tuple[bytes, bool]], text: str) -> tuple[Piece, ...]:
    """Groups (bytes of a token, drafted) into runs of the same hand that spell `text`.

    A character whose bytes lie in tokens of two hands belongs to the one that finishes it. Tokens past the end of
    `text`, such as the end-of-turn token, are left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[Piece] = []
    room = len(text)
    for spelled, drafted in tokens:
        part = decoder.decode(spelled)[:room]
        room -= len(part)
        if part and pieces and pieces[-1].drafted == drafted:
            pieces[-1] = Piece(pieces[-1].text + part, drafted)
        elif part:
            pieces.append(Piece(part, drafted))
    return tuple(pieces)


@dataclass(frozen=True)
class NoDetails:
    """Of a kind of stage that has nothing of its own to say."""


@dataclass(frozen=True, kw_only=True)
class TrainingDetails:
    """What every stage says that trains."""

    steps: int = 0
    skipped_steps: int = 0
    """Steps without an update because the gradient was not finite."""


NO_DETAILS: Any = NoDetails()
D = TypeVar("D")


@dataclass(frozen=True)
class Result(Generic[D]):
    """The whole of a result.json."""

    stage: str
    kind: str
    key: str
    """Digest of everything that decides the result; an equal key means that the stage need not run again."""
    parents: dict[str, str]
    """Name → digest of each model that went in."""
    output: str | None
    """Digest of the published model."""
    models: tuple[ModelReport, ...]
    cost: Cost
    gate: tuple[Check, ...]
    versions: dict[str, str]
    hardware: dict[str, Any]
    finished_at: str
    parity: Parity | None = None
    skipped: tuple[str, ...] = ()
    """What was not measured, and why, a sentence each."""
    answers: tuple[Answer, ...] = ()
    details: D = NO_DETAILS
    """What only this kind of stage has to say, such as the layers that were kept."""
    format: int = FORMAT_VERSION

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.gate) and (self.parity is None or self.parity.passed)


def write_result(folder: Path, result: Result[Any]) -> None:
    """Puts result.json into a stage's folder in one step: a reader finds the old one, the new one, or none."""
    write_atomically(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
