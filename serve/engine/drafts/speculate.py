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

All of it happens on the device: draft tokens lie in the feed (batch_state.py), from where the next pass takes them, and
the host reads nothing of a step before its tokens.

k draft tokens, g sequences of a ruling, R rows, V vocabulary.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.sampling.ngram import find_ngrams
from kernels.sampling.random import Stream
from kernels.sampling.verification import match_drafts, verify
from serve.engine.batch_state import feed_reference
from serve.engine.kv_cache import PAGE_SIZE, KVCache
from serve.engine.runner import Piece, Runner
from serve.engine.sampling import Rows, Sampler
from serve.engine.sequence import Sequence
from serve.engine.transfer import PassTimer, upload


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for one sequence; they are in the feed."""

    num_tokens: int = 0
    """As many as the target looks at."""
    count: Tensor | None = None
    """Int32 without dimensions: how many of them are meant, where the host does not know; None: all."""
    distributions: list[Tensor] = field(default_factory=list)
    """`[V]` fp32 each, what each token was drawn from; empty: verify by matching."""


NO_PROPOSAL = Proposal()


class Draft(Protocol):
    """A source of guesses."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, Proposal]:
        """Guess up to k tokens for each (sequence, k), k > 0. Keys are sequence ids; a sequence may be left out."""

    def settle(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Hear what became of a proposal, before the accepted tokens join the sequence."""


class NgramDraft:
    """Proposes what followed the latest earlier occurrence of the last few tokens: free, and good at quoting."""

    def __init__(self, sampler: Sampler) -> None:
        """`sampler` is the target's; its places keep the text."""
        self.sampler = sampler
        self.reads_counts = sampler.places.device.type == "cpu"
        """In the memory of the host a count is there to be read, and saves the rows of tokens that were not found."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, Proposal]:
        places, text = self.sampler.places, self.sampler.places.text
        if text is None:
            raise ValueError("n-grams are looked up in the text of the places, and these keep none")
        found = upload(np.array([(s.place, s.num_tokens) for s, _ in wanted], dtype=np.int64).T.copy(), places.device)
        drafts, counts = find_ngrams(text[found[0]], found[1], max(k for _, k in wanted))
        places.write_drafts(found[0], drafts)
        if self.reads_counts:
            pairs = zip(wanted, counts.tolist(), strict=True)
            return {sequence.id: Proposal(min(k, count)) for (sequence, k), count in pairs if count > 0}
        return {sequence.id: Proposal(k, count) for (sequence, k), count in zip(wanted, counts.unbind(), strict=True)}

    def settle(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        pass


@dataclass(slots=True)
class _Guess:
    """A draft in the making."""

    sequence: Sequence
    length: int
    """Tokens wanted."""
    distributions: list[Tensor] = field(default_factory=list)


class ModelDraft:
    """A smaller model of the same vocabulary, with pages of its own under the target's page ids."""

    def __init__(
        self, runner: Runner, sampler: Sampler, cache: KVCache, *, vocab_size: int, max_tokens: int, timer: PassTimer
    ) -> None:
        """`sampler` and `vocab_size` are the target's; `max_tokens`: most rows of one pass."""
        self.runner = runner
        self.sampler = sampler
        self.cache = cache
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.last_token = runner.model.config.vocab_size - 1
        self.timer = timer

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, Proposal]:
        pieces, guesses = self._catch_up(wanted)
        proposed, num_drawn = list(guesses), 0
        while pieces:
            with self.timer.measure(sum(len(piece.tokens) for piece in pieces)):
                hidden = self.runner.hidden(pieces)
                if guesses:
                    self._extend(guesses, self._logits(hidden), num_drawn)
            num_drawn += 1
            guesses = [guess for guess in guesses if num_drawn < guess.length]
            pieces = [self._next_piece(guess.sequence, num_drawn) for guess in guesses]
        return {guess.sequence.id: Proposal(guess.length, None, guess.distributions) for guess in proposed}

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
            # What the target says of its embedding's padding is no token of the draft: any other serves as well.
            tokens = [min(token, self.last_token) for token in sequence.tokens[start : start + room]]
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

    def _next_piece(self, sequence: Sequence, num_drawn: int) -> Piece:
        """The latest draft token, to be fed for the one after it."""
        token = feed_reference(sequence.place, num_drawn, self.runner.feed.shape[1])
        return Piece([token], sequence.num_tokens + num_drawn - 1, sequence.table, num_rows=1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The draft's logits on the target's vocabulary `[R, V]`; either may be padded at its end."""
        logits = self.runner.logits(hidden)
        missing = self.vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self.vocab_size]

    def _extend(self, guesses: list[_Guess], logits: Tensor, num_drawn: int) -> None:
        """Draw one token for each guess."""
        matched = [n for n, guess in enumerate(guesses) if not guess.sequence.verifies_by_rejection]
        tested = [n for n, guess in enumerate(guesses) if guess.sequence.verifies_by_rejection]
        places = self.sampler.places
        if matched:
            rows = self.sampler.rows([guesses[n].sequence for n in matched], [num_drawn] * len(matched))
            tokens = self.sampler.draw(select(logits, matched), rows)
            places.write_drafts(rows.places, tokens[:, None], first=num_drawn)
        for some in self.sampler.blocks(tested):
            rows = self.sampler.rows([guesses[n].sequence for n in some], [num_drawn] * len(some))
            tokens, distributions = self.sampler.draw_with_probabilities(select(logits, some), rows)
            places.write_drafts(rows.places, tokens[:, None], first=num_drawn)
            for n, distribution in zip(some, distributions, strict=True):
                guesses[n].distributions.append(distribution)


@dataclass(frozen=True, slots=True)
class Question:
    """What the target is asked about one sequence: rows [first_row, first_row + k + 1) of the step's logits."""

    sequence: Sequence
    first_row: int
    proposal: Proposal = NO_PROPOSAL


@dataclass(frozen=True, slots=True)
class Ruling:
    """What came of questions with equally many draft tokens, on the device."""

    questions: list[int]
    """Their numbers."""
    rows: list[int]
    """The rows of logits that they are about, k + 1 each."""
    tokens: Tensor
    """`[g, k + 1]` int64: the tokens to emit, then -1; -1 in their place where the scores are not numbers."""
    num_accepted: Tensor
    """`[g]` int32: those of them that were drafted."""
    counts: Tensor
    """`[g]` int32: draft tokens that were meant."""


def judge(sampler: Sampler, logits: Tensor, questions: list[Question]) -> list[Ruling]:
    """What each sequence emits, from the target's `logits [R, V]`; exact for every sampling setting."""
    groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for number, question in enumerate(questions):
        groups[question.proposal.num_tokens, bool(question.proposal.distributions)].append(number)
    rulings = []
    for (k, by_rejection), numbers in groups.items():
        if not by_rejection:
            rulings.append(_rule_by_matching(sampler, logits, questions, numbers, k))
            continue
        for some in sampler.blocks(numbers, num_rows=k + 1):
            rulings.append(_rule_by_rejection(sampler, logits, questions, some, k))
    return rulings


def select(x: Tensor, rows: list[int]) -> Tensor:
    """`x[rows]`, without a copy where they lie side by side."""
    if rows[-1] - rows[0] == len(rows) - 1 and rows == list(range(rows[0], rows[-1] + 1)):
        return x[rows[0] : rows[-1] + 1]
    return x[upload(np.array(rows, dtype=np.int64), x.device)]


def _rule_by_matching(
    sampler: Sampler, logits: Tensor, questions: list[Question], numbers: list[int], k: int
) -> Ruling:
    asked = [questions[number] for number in numbers]
    row_numbers, rows = _rows(sampler, asked, k)
    own = sampler.draw(select(logits, row_numbers), rows).view(len(asked), k + 1)
    counts = _counts(sampler, asked, k)
    if k == 0:
        return Ruling(numbers, row_numbers, own, counts, counts)
    drafted = sampler.places.drafts(rows.places[:: k + 1], k)
    output = match_drafts(own, drafted, counts=counts, lengths=counts)
    return Ruling(numbers, row_numbers, output.tokens, output.num_accepted, counts)


def _rule_by_rejection(
    sampler: Sampler, logits: Tensor, questions: list[Question], numbers: list[int], k: int
) -> Ruling:
    asked = [questions[number] for number in numbers]
    row_numbers, rows = _rows(sampler, asked, k)
    target_p = sampler.probabilities(select(logits, row_numbers), rows).view(len(asked), k + 1, -1)
    draft_p = torch.stack([q for question in asked for q in question.proposal.distributions]).view(len(asked), k, -1)
    counts, places = _counts(sampler, asked, k), rows.places[:: k + 1]
    stream: Stream = sampler.places.stream(places, rows.positions[:: k + 1])
    drafted = sampler.places.drafts(places, k)
    output = verify(target_p, draft_p, drafted, counts=counts, lengths=counts, stream=stream)
    return Ruling(numbers, row_numbers, output.tokens, output.num_accepted, counts)


def _rows(sampler: Sampler, asked: list[Question], k: int) -> tuple[list[int], Rows]:
    """The rows of logits that the questions, k draft tokens each, are about, and what they decide."""
    numbers = [question.first_row + before for question in asked for before in range(k + 1)]
    sequences = [question.sequence for question in asked for _ in range(k + 1)]
    return numbers, sampler.rows(sequences, list(range(k + 1)) * len(asked))


def _counts(sampler: Sampler, asked: list[Question], k: int) -> Tensor:
    if asked[0].proposal.count is None:
        return torch.full((len(asked),), k, dtype=torch.int32, device=sampler.places.device)
    return torch.stack([question.proposal.count for question in asked if question.proposal.count is not None]).clamp_(
        max=k
    )
