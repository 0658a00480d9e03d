"""One pass of the target over everything that a step has scheduled, and what each sequence emits by it.

Changes no sequence: a pass that fails can be repeated, and what it found is committed by the engine.

R rows of logits, V vocabulary.
"""

import time
from dataclasses import dataclass, field

from torch import Tensor

from serve.draft_length import PassCosts
from serve.outputs import TokenLogprobs
from serve.runner import Piece, Runner
from serve.sampling import Sampler, token_logprobs
from serve.scheduler import Chunk
from serve.sequence import Sequence
from serve.speculate import NO_PROPOSAL, Proposal, Question, Verdict, verify, verify_apart

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
        """Whether the chunk reaches the last known token, so that the next one can be drawn."""
        return self.chunk.start + self.chunk.num_tokens == self.sequence.num_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted from this chunk."""
        return self.sequence.prompt_logprobs is not None

    def piece(self) -> Piece:
        start, num_tokens = self.chunk.start, self.chunk.num_tokens
        tokens = self.sequence.tokens[start : start + num_tokens] + self.proposal.tokens
        num_rows = len(tokens) if self.scores_prompt else self.samples * (1 + len(self.proposal.tokens))
        return Piece(tokens, start, self.sequence.table, num_rows)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one choice emits."""

    question: Question
    verdict: Verdict
    logprobs: list[TokenLogprobs] | None = None
    """One for each token of the verdict, when asked for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the pass found out about one chunk."""

    work: Work
    outcomes: list[Outcome] = field(default_factory=list)
    """None inside a prompt; at its end one for the sequence and one for each sibling that forks from it."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt tokens that come next after those in `Sequence.prompt_logprobs`."""


class Target:
    """The model whose distribution is served."""

    def __init__(self, runner: Runner, sampler: Sampler, costs: PassCosts) -> None:
        self.runner = runner
        self.sampler = sampler
        self.costs = costs

    def compute(self, work: list[Work]) -> list[Answer]:
        """One forward pass. Raises what the model raises; what fails for one sequence alone is in its verdict."""
        started = time.perf_counter()
        pieces = [item.piece() for item in work]
        hidden = self.runner.hidden(pieces)
        questions, rows = _ask(work, pieces)
        outcomes = self._outcomes(hidden, rows, [question for asked in questions for question in asked])
        answers = []
        first = 0
        for item, piece, asked in zip(work, pieces, questions, strict=True):
            scores = self._score_prompt(item, hidden[first : first + piece.num_rows]) if item.scores_prompt else []
            answers.append(Answer(item, [outcomes.pop(0) for _ in asked], scores))
            first += piece.num_rows
        if all(item.chunk.num_tokens == 1 for item in work):  # prompts would blur what decoding costs
            self.costs.record(sum(len(piece.tokens) for piece in pieces), time.perf_counter() - started)
        return answers

    def _outcomes(self, hidden: Tensor, rows: list[int], questions: list[Question]) -> list[Outcome]:
        if not questions:
            return []
        logits = self.runner.logits(hidden if len(rows) == len(hidden) else hidden[rows])
        try:
            verdicts = verify(self.sampler, logits, questions)
        except Exception:
            verdicts = verify_apart(self.sampler, logits, questions)
        return [
            Outcome(question, verdict, _logprobs(logits, question, verdict))
            for question, verdict in zip(questions, verdicts, strict=True)
        ]

    def _score_prompt(self, work: Work, hidden: Tensor) -> list[TokenLogprobs]:
        """`hidden [num_tokens, D]` of the chunk; each row scores the token after it."""
        sequence, start = work.sequence, work.chunk.start
        known = len(sequence.prompt_logprobs or ())
        first = max(known, start + 1)  # a chunk that is computed again after preemption has been scored
        stop = min(start + work.chunk.num_tokens + 1, sequence.num_prompt_tokens)
        scores: list[TokenLogprobs] = []
        for at in range(first, stop, PROMPT_ROWS_PER_BLOCK):
            tokens = sequence.tokens[at : min(at + PROMPT_ROWS_PER_BLOCK, stop)]
            logits = self.runner.logits(hidden[at - 1 - start : at - 1 - start + len(tokens)])
            scores += token_logprobs(logits, tokens, sequence.params.prompt_logprobs or 0)
        return scores


def _ask(work: list[Work], pieces: list[Piece]) -> tuple[list[list[Question]], list[int]]:
    """For each chunk the questions about it, and which rows of the hidden states become rows of logits."""
    questions: list[list[Question]] = []
    rows: list[int] = []
    first = 0
    for item, piece in zip(work, pieces, strict=True):
        asked = []
        if item.samples:
            asked.append(Question(item.sequence, len(rows), item.proposal))
            asked += [Question(sibling, len(rows)) for sibling in item.sequence.siblings]
            stop = first + piece.num_rows
            rows += range(stop - 1 - len(item.proposal.tokens), stop)
        questions.append(asked)
        first += piece.num_rows
    return questions, rows


def _logprobs(logits: Tensor, question: Question, verdict: Verdict) -> list[TokenLogprobs] | None:
    wanted = question.sequence.params.logprobs
    if wanted is None:
        return None
    rows = logits[question.first_row : question.first_row + len(verdict.tokens)]
    return token_logprobs(rows, verdict.tokens, wanted)
