"""Speculative decoding: a draft proposes tokens, the target verifies them in one pass, the output is the target's own.

Two exact rules accept a draft token:

- *Matching.* The target draws its own token at every position; draft tokens are accepted while they equal it, and what
  is emitted is always the target's draw. For greedy requests and for requests with a seed (draft and target share the
  random draws of a position, so they mostly agree, and the output does not depend on speculation at all) and for
  deterministic drafts, where no rule accepts more.
- *Rejection sampling* for the rest: accept x with probability min(1, p(x) / q(x)), else draw from max(p - q, 0).
  It accepts with probability 1 - TV(p, q), the most that any rule can. Source: https://arxiv.org/abs/2211.17192.

p and q are the distributions after penalties, temperature and truncation; q is what the draft's token was drawn from.

Roll-back is by length alone. The target's pass over [last, d_1 .. d_k] fills k + 1 slots; after m acceptances the
first m + 1 of them hold, the rest is overwritten later. The draft has fed [.., last, d_1 .. d_(k-1)]: after full
acceptance it lacks d_k and is fed two tokens next time. That is one case of a general rule: before drafting, the draft
is fed all tokens that it lacks, be it two, a prompt, or what was decoded while drafting did not pay.

k draft tokens, R rows, V vocabulary.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.sampling import verify_draft
from serve.draft_length import PassCosts
from serve.kv_cache import PAGE_SIZE, KVCache
from serve.runner import Piece, Runner
from serve.sampling import Purpose, Row, Sampler
from serve.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for one sequence."""

    tokens: list[int] = field(default_factory=list)
    probabilities: Tensor | None = None
    """`[k, V]` fp32, what each token was drawn from; None: verify by matching."""


NO_PROPOSAL = Proposal()


class Draft(Protocol):
    """A source of guesses."""

    costs: PassCosts

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, Proposal]:
        """Guess up to k tokens for each (sequence, k), k > 0. Keys are sequence ids; a sequence may be left out."""

    def settle(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Hear what became of a proposal, before the accepted tokens join the sequence."""


class NgramDraft:
    """Proposes what followed the latest earlier occurrence of the last few tokens: free, and good at quoting."""

    MAX_NGRAM = 3
    SEARCHED_TOKENS = 8192
    """How far back it looks, so that a step's cost does not grow with the context."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs = costs

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, Proposal]:
        found = {sequence.id: self._lookup(sequence.tokens[-self.SEARCHED_TOKENS :], k) for sequence, k in wanted}
        return {id: Proposal(tokens) for id, tokens in found.items() if tokens}

    def settle(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        pass

    def _lookup(self, tokens: list[int], k: int) -> list[int]:
        history = torch.tensor(tokens)
        for size in range(min(self.MAX_NGRAM, len(tokens) - 1), 0, -1):
            windows = history.unfold(0, size, 1)[:-1]
            matches = (windows == history[-size:]).all(dim=1).nonzero()
            if len(matches):
                after = int(matches[-1]) + size
                return tokens[after : after + k]
        return []


@dataclass(slots=True)
class _Guess:
    """A draft in the making."""

    sequence: Sequence
    length: int
    """Tokens wanted."""
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    """`[V]` each, what the tokens were drawn from, under rejection sampling."""

    def next_piece(self) -> Piece:
        """The latest draft token, to be fed for the one after it."""
        start = self.sequence.num_tokens + len(self.tokens) - 1
        return Piece(self.tokens[-1:], start, self.sequence.table, num_rows=1)

    def proposal(self) -> Proposal:
        return Proposal(self.tokens, torch.stack(self.distributions) if self.distributions else None)


class ModelDraft:
    """A smaller model of the same vocabulary, with pages of its own under the target's page ids."""

    def __init__(self, runner: Runner, sampler: Sampler, cache: KVCache, *, max_tokens: int, costs: PassCosts) -> None:
        """`sampler` is the target's; `max_tokens`: most rows of one pass."""
        self.runner = runner
        self.sampler = sampler
        self.cache = cache
        self.max_tokens = max_tokens
        self.costs = costs

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, Proposal]:
        pieces, guesses = self._catch_up(wanted)
        proposed = list(guesses)
        while pieces:
            started = time.perf_counter()
            hidden = self.runner.hidden(pieces)
            if guesses:
                self._extend(guesses, self._logits(hidden))
            self.costs.record(sum(len(piece.tokens) for piece in pieces), time.perf_counter() - started)
            guesses = [guess for guess in guesses if len(guess.tokens) < guess.length]
            pieces = [guess.next_piece() for guess in guesses]
        return {guess.sequence.id: guess.proposal() for guess in proposed}

    def settle(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        sequence.num_draft_computed = sequence.num_tokens + min(num_accepted, num_drafted - 1)
        self.cache.mark_drafted(sequence.table, sequence.num_draft_computed)

    def _catch_up(self, wanted: list[tuple[Sequence, int]]) -> tuple[list[Piece], list[_Guess]]:
        """Pieces that bring the draft up to each sequence's last token, as far as one pass goes, and whose turn it is.

        A sequence that needs more is brought nearer and guesses in a later step. Pages that another sequence fills, or
        has filled, are skipped: a pass writes all keys and values of a layer before it reads any. Where two fill the
        same page, they write the same; what the draft's cache holds decides how often it is right, never what is
        emitted.
        """
        pieces: list[Piece] = []
        guesses = []
        filled: set[int] = set()
        room = self.max_tokens
        for sequence, length in wanted:
            start = self.cache.skip_drafted(
                sequence.table, sequence.num_draft_computed, sequence.num_tokens - 1, filled
            )
            tokens = sequence.tokens[start : start + room]
            stop = start + len(tokens)
            if not tokens:
                continue
            room -= len(tokens)
            filled.update(sequence.table.ids[start // PAGE_SIZE : stop // PAGE_SIZE].tolist())
            is_complete = stop == sequence.num_tokens
            pieces.append(Piece(tokens, start, sequence.table, num_rows=int(is_complete)))
            if is_complete:
                guesses.append(_Guess(sequence, length))
            else:
                sequence.num_draft_computed = stop
        return pieces, guesses

    def _logits(self, hidden: Tensor) -> Tensor:
        """The draft's logits on the target's vocabulary `[R, V]`; either may be padded at its end."""
        logits = self.runner.logits(hidden)
        missing = self.sampler.noise.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : logits.shape[1] + missing]

    def _extend(self, guesses: list[_Guess], logits: Tensor) -> None:
        """Draw one token for each guess."""
        matched = [n for n, guess in enumerate(guesses) if not guess.sequence.verifies_by_rejection]
        rows = [Row(guess.sequence, tuple(guess.tokens)) for guess in guesses]
        if matched:
            some = logits if len(matched) == len(rows) else logits[matched]
            for n, token in zip(matched, self.sampler.draw(some, [rows[n] for n in matched]), strict=True):
                guesses[n].tokens.append(token)
        for n, guess in enumerate(guesses):
            if guess.sequence.verifies_by_rejection:
                drawn, distributions = self.sampler.draw_with_probabilities(logits[[n]], [rows[n]], Purpose.DRAFT)
                guess.tokens += drawn
                guess.distributions.append(distributions[0])


@dataclass(frozen=True, slots=True)
class Question:
    """What the target is asked about one sequence: rows [first_row, first_row + k + 1) of the step's logits."""

    sequence: Sequence
    first_row: int
    proposal: Proposal = NO_PROPOSAL

    @property
    def by_rejection(self) -> bool:
        return self.proposal.probabilities is not None

    @property
    def rows(self) -> list[Row]:
        tokens = self.proposal.tokens
        return [Row(self.sequence, tuple(tokens[:n])) for n in range(len(tokens) + 1)]

    @property
    def row_numbers(self) -> range:
        return range(self.first_row, self.first_row + len(self.proposal.tokens) + 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a step emits for one sequence: the accepted draft tokens and one of the target's own."""

    tokens: list[int] = field(default_factory=list)
    num_accepted: int = 0
    error: Exception | None = None


def verify(sampler: Sampler, logits: Tensor, questions: list[Question]) -> list[Verdict]:
    """One verdict for each question, from the target's `logits [R, V]`; exact for every sampling setting."""
    matched = [question for question in questions if not question.by_rejection]
    numbers = [number for question in matched for number in question.row_numbers]
    some = logits if numbers == list(range(len(logits))) else logits[numbers]
    drawn = iter(sampler.draw(some, [row for question in matched for row in question.rows]) if matched else ())
    return [
        _verify_by_rejection(sampler, logits, question)
        if question.by_rejection
        else _match(question.proposal.tokens, [next(drawn) for _ in question.row_numbers])
        for question in questions
    ]


def verify_apart(sampler: Sampler, logits: Tensor, questions: list[Question]) -> list[Verdict]:
    """`verify`, one question at a time: those that raise get a verdict with the error."""
    verdicts = []
    for question in questions:
        try:
            verdicts += verify(sampler, logits, [question])
        except Exception as error:  # whatever it is, it is this sequence's
            verdicts.append(Verdict(error=error))
    return verdicts


def _match(drafted: list[int], own: list[int]) -> Verdict:
    """Accept while the draft's tokens are the target's own draws; `own` has one more."""
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == own[accepted]:
        accepted += 1
    return Verdict(own[: accepted + 1], accepted)


def _verify_by_rejection(sampler: Sampler, logits: Tensor, question: Question) -> Verdict:
    sequence, drafted = question.sequence, question.proposal.tokens
    rows = question.rows
    target_p = sampler.probabilities(logits[question.first_row : question.first_row + len(rows)], rows)
    accepted, token = verify_draft(
        target_p,
        question.proposal.probabilities,
        torch.tensor(drafted, device=logits.device),
        sampler.noise.uniform(sequence, rows[0].position, len(drafted)),
        sampler.noise.exponential(sequence, rows[0].position, Purpose.RESIDUAL),
    )
    return Verdict([*drafted[:accepted], token], accepted)
