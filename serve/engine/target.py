"""One pass of the target over everything that a step has scheduled, and what each sequence emits by it.

A pass is *launched*: the device draws, verifies and counts, and leaves what the next step needs at the sequences'
places. What the host needs is on its way to it in a Flight, to be read when it *lands*, at best while the device is
busy with the next step. Nothing here changes a sequence: a pass that cannot be launched can be repeated, and what it
found is committed by the engine.

R rows of logits, V vocabulary.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kernels.sampling.token_logprobs import Logprobs, token_logprobs
from serve.engine.batch_state import feed_reference
from serve.engine.drafts.speculate import NO_PROPOSAL, Proposal, Question, Ruling, judge, select
from serve.engine.runner import Piece, Runner
from serve.engine.sampling import NonFiniteLogitsError, Sampler, logprob_entries
from serve.engine.scheduler import Chunk
from serve.engine.sequence import Sequence
from serve.engine.transfer import Download, PassTimer, upload
from serve.outputs import TokenLogprobs

PROMPT_ROWS_PER_BLOCK = 64
"""Rows of logits at a time when a prompt's log-probabilities are wanted: never the whole prompt times vocabulary."""


@dataclass(frozen=True, slots=True)
class Work:
    """A scheduled chunk and the draft tokens to verify behind it."""

    chunk: Chunk
    sequence: Sequence
    proposal: Proposal = NO_PROPOSAL

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that the next one can be drawn."""
        return self.chunk.start + self.chunk.num_tokens == self.sequence.num_drawn

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted from this chunk."""
        return self.sequence.prompt_logprobs is not None

    def piece(self, feed_width: int) -> Piece:
        sequence, start, num_tokens = self.sequence, self.chunk.start, self.chunk.num_tokens
        tokens = sequence.tokens[start : start + num_tokens]
        # What the host does not know yet, its own last token or draft tokens, is in the feed.
        first = 1 if len(tokens) == num_tokens else 0
        columns = range(first, 1 + self.proposal.num_tokens)
        tokens += [feed_reference(sequence.place, column, feed_width) for column in columns]
        num_rows = len(tokens) if self.scores_prompt else self.samples * (1 + self.proposal.num_tokens)
        return Piece(tokens, start, sequence.table, num_rows, sequence.adapter)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one choice emits."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    """The accepted draft tokens and one of the target's own."""
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, when asked for."""
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the pass found out about one chunk."""

    work: Work
    outcomes: list[Outcome] = field(default_factory=list)
    """None inside a prompt; at its end one for the sequence and one for each sibling that forks from it."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt tokens that come next after those in `Sequence.prompt_logprobs`."""


@dataclass(frozen=True, slots=True)
class _Score:
    """Log-probabilities on their way: of which tokens, and how many of the best are wanted."""

    tokens: list[int]
    num_top: int
    download: Download

    def land(self) -> list[TokenLogprobs]:
        return logprob_entries(self.tokens, Logprobs(*self.download.wait()), self.num_top)


class Flight:
    """A pass that has been launched, and what the host will know of it."""

    def __init__(self, work: list[Work], asked: list[list[int]], questions: list[Question]) -> None:
        """`asked`: the numbers of the questions about each chunk."""
        self.work = work
        self._asked = asked
        self._questions = questions
        self._rulings: list[tuple[Ruling, Download, Download | None]] = []
        self._prompt_scores: list[list[_Score]] = [[] for _ in work]

    def add_prompt_score(self, number: int, score: _Score) -> None:
        self._prompt_scores[number].append(score)

    def add_ruling(self, ruling: Ruling, logprobs: Logprobs | None) -> None:
        """Start bringing home a ruling and, for all its rows, log-probabilities."""
        news = Download([ruling.tokens, ruling.num_accepted, ruling.counts])
        self._rulings.append((ruling, news, None if logprobs is None else Download(list(logprobs))))

    def land(self) -> list[Answer]:
        """Wait for the device, and read what it found. What failed for one sequence alone is in its outcome."""
        outcomes: dict[int, Outcome] = {}
        for ruling, news, logprobs in self._rulings:
            tokens, accepted, counts = (part.tolist() for part in news.wait())
            scores = None if logprobs is None else Logprobs(*logprobs.wait())
            for at, number in enumerate(ruling.questions):
                sequence, emitted = self._questions[number].sequence, tokens[at][: accepted[at] + 1]
                if emitted[-1] < 0:
                    outcomes[number] = Outcome(sequence, error=NonFiniteLogitsError("logits are not finite"))
                    continue
                own = _entries(scores, at * len(tokens[at]), emitted, sequence.params.logprobs)
                outcomes[number] = Outcome(sequence, emitted, counts[at], accepted[at], own)
        return [
            Answer(work, [outcomes[number] for number in asked], [entry for score in scores_ for entry in score.land()])
            for work, asked, scores_ in zip(self.work, self._asked, self._prompt_scores, strict=True)
        ]


def _entries(
    logprobs: Logprobs | None, first: int, tokens: list[int], num_top: int | None
) -> list[TokenLogprobs] | None:
    if logprobs is None or num_top is None:
        return None
    return logprob_entries(tokens, Logprobs(*(part[first : first + len(tokens)] for part in logprobs)), num_top)


class Target:
    """The model whose distribution is served."""

    def __init__(self, runner: Runner, sampler: Sampler, timer: PassTimer) -> None:
        self.runner = runner
        self.sampler = sampler
        self.timer = timer

    def launch(self, work: list[Work]) -> Flight:
        """One forward pass. Raises what the model raises; the sequences' places are written and up to date after."""
        self.sampler.places.seat(s for item in work if item.samples for s in (item.sequence, *item.sequence.siblings))
        pieces = [item.piece(self.runner.feed.shape[1]) for item in work]
        # Prompts would blur what decoding costs.
        is_decode = all(item.chunk.num_tokens == 1 for item in work)
        with self.timer.measure(sum(len(piece.tokens) for piece in pieces)) if is_decode else nullcontext():
            hidden = self.runner.hidden(pieces)
            asked, questions, rows = _ask(work, pieces)
            flight = Flight(work, asked, questions)
            if questions:
                self._rule(flight, hidden if len(rows) == len(hidden) else select(hidden, rows), questions)
            first = 0
            for number, (item, piece) in enumerate(zip(work, pieces, strict=True)):
                if item.scores_prompt:
                    self._score_prompt(flight, number, hidden[first : first + piece.num_rows])
                first += piece.num_rows
        return flight

    def _rule(self, flight: Flight, hidden: Tensor, questions: list[Question]) -> None:
        logits = self.runner.logits(hidden)
        rulings = judge(self.sampler, logits, questions)
        for ruling in rulings:
            sequences = [questions[number].sequence for number in ruling.questions]
            self._advance(sequences, ruling.tokens)
            wanted = [s.params.logprobs for s in sequences if s.params.logprobs is not None]
            logprobs = None
            if wanted:
                logprobs = token_logprobs(select(logits, ruling.rows), ruling.tokens.flatten(), max(wanted))
            flight.add_ruling(ruling, logprobs)

    def _advance(self, sequences: list[Sequence], tokens: Tensor) -> None:
        """Leave at the sequences' places what the next step starts from."""
        table = np.array([(s.place, s.num_drawn, s.place if s.params.has_penalties else -1) for s in sequences])
        places, lengths, counted = upload(table.T.copy(), tokens.device)
        is_counted = bool((table[:, 2] >= 0).any())
        self.sampler.places.advance(places, tokens, lengths=lengths, counted=counted if is_counted else None)

    def _score_prompt(self, flight: Flight, number: int, hidden: Tensor) -> None:
        """`hidden [num_tokens, D]` of the chunk; each row scores the token after it."""
        work = flight.work[number]
        sequence, start = work.sequence, work.chunk.start
        known = len(sequence.prompt_logprobs or ())
        first = max(known, start + 1)  # a chunk that is computed again after preemption has been scored
        stop = min(start + work.chunk.num_tokens + 1, sequence.num_prompt_tokens)
        num_top = sequence.params.prompt_logprobs or 0
        for at in range(first, stop, PROMPT_ROWS_PER_BLOCK):
            tokens = sequence.tokens[at : min(at + PROMPT_ROWS_PER_BLOCK, stop)]
            logits = self.runner.logits(hidden[at - 1 - start : at - 1 - start + len(tokens)])
            logprobs = token_logprobs(logits, upload(np.array(tokens), logits.device), num_top)
            flight.add_prompt_score(number, _Score(tokens, num_top, Download(list(logprobs))))


def _ask(work: list[Work], pieces: list[Piece]) -> tuple[list[list[int]], list[Question], list[int]]:
    """For each chunk the numbers of the questions about it; the questions; which hidden states become logits."""
    asked: list[list[int]] = []
    questions: list[Question] = []
    rows: list[int] = []
    first = 0
    for item, piece in zip(work, pieces, strict=True):
        num_before = len(questions)
        if item.samples:
            questions.append(Question(item.sequence, len(rows), item.proposal))
            questions += [Question(sibling, len(rows)) for sibling in item.sequence.siblings]
            stop = first + piece.num_rows
            rows += range(stop - 1 - item.proposal.num_tokens, stop)
        asked.append(list(range(num_before, len(questions))))
        first += piece.num_rows
    return asked, questions, rows
