"""What the next step computes. No phases: every sequence has tokens computed and tokens known.

Each step spends one budget of tokens: first one token for every decoding sequence, with draft tokens behind it where
they fit, then the rest of half-computed prompts, then waiting requests. So decodes never stall behind prompts.

Which waiting sequence is next says serve/engine/fair_shares.py: by priority, then whose API key has had least, then by
arrival. It is admitted when the pages for all its tokens are free, not only those of its first chunk: two
half-computed prompts can never wait for each other's pages. When a decoding sequence finds no free page, the last of
the running ones (lowest priority, latest arrival) is preempted: its pages are freed and it waits again, with its tokens
and its random streams, to be recomputed. The first of the running ones is never preempted, so there is progress.

Of requests that come together with a long common beginning the first computes it, and the others, which wait for that,
find it in the cache; who is behind them may go first.

A step can be planned before the host has read what the one before it draws: a sequence then has a token that is not
known yet (`Sequence.num_unread`), which is planned with like any other. One that must end by its length gets nothing
more; one that ends otherwise is found out a step later, and what was computed for it is thrown away.

Where several steps are under way at once, each in another stage of the model, those that decode are divided among
them: a sequence whose next token one of them will draw has nothing to compute until then, and takes part in no other.
Sources: Sarathi-Serve (https://arxiv.org/abs/2403.02310); vLLM, v1/core/sched/scheduler.py.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from serve.engine.fair_shares import FairShares
from serve.engine.kv_cache import Branch, KVCache
from serve.engine.requests import Sequence

WORTH_DIVIDING = 8
"""A step of fewer tokens than this hardly takes less time: most of it is the reading of weights."""


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + num_tokens) of one sequence, and room for `num_drafts` draft tokens behind them."""

    sequence_id: int
    start: int
    num_tokens: int
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step, as plain data."""

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...]
    """(source, destination) pages to copy before the step."""
    preempted: tuple[int, ...]
    """Ids of sequences that lost their pages."""
    num_admitted: int
    """Waiting sequences that take part from here on."""

    @property
    def num_tokens(self) -> int:
        """Rows of the step if every draft token is proposed; at most the budget."""
        return sum(chunk.num_tokens + chunk.num_drafts for chunk in self.chunks)


class Scheduler:
    """Holds the waiting and the running sequences, both in order of `Sequence.order`."""

    def __init__(
        self,
        cache: KVCache,
        place: Callable[[Sequence, list[Sequence]], bool] = lambda sequence, running: True,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        """`place` has the adapter of a sequence lie ready beside those of the running ones, or returns False."""
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}), "
                "so that every running sequence can decode in every step"
            )
        self.cache = cache
        self._place = place
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.shares = FairShares()
        self._free_batch_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Have a new sequence wait."""
        self._wait(sequence, is_new=True)

    def _wait(self, sequence: Sequence, *, is_new: bool) -> None:
        bisect.insort(self.waiting, sequence, key=_order)
        if sequence.share is not None:
            self.shares.waits(sequence.share, is_new=is_new)

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Start the siblings of a sequence whose prompt is computed: they share its pages and join the running ones."""
        siblings, parent.siblings = parent.siblings, []
        for child in siblings:
            self.cache.fork(parent.table, child.table, parent.num_computed)
            child.num_computed = parent.num_computed
            child.num_cached = parent.num_cached
            child.is_running = True
            bisect.insort(self.running, child, key=_order)
        return siblings

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its pages; one that still waits to be forked is nowhere."""
        if sequence.is_running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self._wait_no_more(sequence)
        sequence.is_running = False
        self._give_back_row(sequence)
        self.cache.free(sequence.table)

    def schedule(self, draft_length: Callable[[Sequence], int] | None = None, *, num_groups: int = 1) -> Schedule:
        """Plan one step and reserve its pages; `draft_length` says how many draft tokens a sequence would like.

        `num_groups`: among how many steps those that decode are divided, as far as that pays.
        """
        step = _Step(self.max_num_batched_tokens)
        self._schedule_running(step, draft_length, num_groups)
        if not step.preempted:
            self._admit_waiting(step)
        self.num_preemptions += len(step.preempted)
        return Schedule(tuple(step.chunks), tuple(step.copies), tuple(step.preempted), step.num_admitted)

    def _schedule_running(self, step: "_Step", draft_length: Callable[[Sequence], int] | None, num_groups: int) -> None:
        decoding, prefilling, num_drawing = self._unfinished()
        if num_groups > 1:
            num_running = len(decoding) + num_drawing
            decoding = decoding[: -(-num_running // max(1, min(num_groups, num_running // WORTH_DIVIDING)))]
        for position, sequence in enumerate(decoding):
            if not sequence.is_running:  # preempted by one before it
                continue
            num_drafts = 0
            if draft_length is not None and (num_drafts := draft_length(sequence)):
                spare = step.budget - (len(decoding) - position)  # one token stays for each decode after this one
                room = self.max_model_len - sequence.num_drawn
                num_drafts = max(0, min(num_drafts, spare, room))
            self._schedule_decode(step, sequence, num_drafts)
        for sequence in prefilling:
            if sequence.is_running and step.budget > 0:
                step.add(sequence, min(sequence.num_pending, step.budget))

    def _unfinished(self) -> tuple[list[Sequence], list[Sequence], int]:
        """Those that decode, those whose prompts are still to be computed, and how many wait for what a step draws."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        num_drawing = 0
        for sequence in self.running:
            num_drawn = sequence.num_drawn
            num_pending = num_drawn - sequence.num_computed
            if num_pending > 1:
                prefilling.append(sequence)
            elif num_pending == 1:
                most_tokens = sequence.num_prompt_tokens + sequence.params.max_tokens
                if num_drawn < most_tokens and num_drawn < self.max_model_len:  # else its last is drawn, if not read
                    decoding.append(sequence)
            else:
                num_drawing += 1
        return decoding, prefilling, num_drawing

    def _schedule_decode(self, step: "_Step", sequence: Sequence, num_drafts: int) -> None:
        start = sequence.num_computed
        copies = self.cache.reserve(sequence.table, start, start + 1 + num_drafts)
        if copies is None and num_drafts:  # nobody is preempted for the sake of a guess
            num_drafts = 0
            copies = self.cache.reserve(sequence.table, start, start + 1)
        while copies is None:
            victim = self.running[-1]
            self.preempt(victim)
            step.preempted.append(victim.id)
            if victim is sequence:
                return
            copies = self.cache.reserve(sequence.table, start, start + 1)
        if copies:
            step.copies += copies
        step.add(sequence, 1, num_drafts)

    def branch(
        self, sequence: Sequence, start: int, num_tokens: int, num_rows: int
    ) -> tuple[Branch, tuple[tuple[int, int], ...]] | None:
        """Pages for another path of `num_tokens` draft tokens behind a decoding sequence's token number `start`.

        None where there is no room beside the `num_rows` rows of the step: nobody is preempted for the sake of a guess.
        """
        fits = sequence.num_drawn + num_tokens <= self.max_model_len
        if not num_tokens or not fits or num_rows + 1 + num_tokens > self.max_num_batched_tokens:
            return None
        return self.cache.branch(sequence.table, start, start + 1 + num_tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it waits again, to be recomputed with its tokens and random streams."""
        self.running.remove(sequence)
        self.cache.free(sequence.table)
        for choice in (sequence, *sequence.siblings):
            self._give_back_row(choice)
        sequence.is_running = False
        sequence.num_computed = 0
        self._wait(sequence, is_new=False)

    def _admit_waiting(self, step: "_Step") -> None:
        if not self.waiting:
            return
        num_batch_rows = self.max_num_seqs - len(self._free_batch_rows)
        waiting = self.waiting
        while waiting and step.budget > 0 and num_batch_rows < self.max_num_seqs:
            sequence = self.shares.first(waiting) if self.shares.has_tenants else waiting[0]
            if sequence is None or num_batch_rows + sequence.num_batch_rows > self.max_num_seqs:
                break
            if sequence.num_unread:  # preempted a moment ago: what it will say last is still on its way
                break
            # Behind one that waits for a slot only those go on that need none, so that slots come free.
            if sequence.adapter is not None and not self._place(sequence, self.running):
                waiting = [other for other in waiting if other.adapter is None]
                continue
            if self._finds_more_soon(sequence):
                waiting = [other for other in waiting if not self._finds_more_soon(other)]
                continue
            # Each running sequence keeps a page to grow into, else the newcomer would soon be preempted again. Cached
            # pages have no hidden states, so a prompt that is scored or pooled is computed in full.
            found = self.cache.admit(
                sequence.table, sequence.tokens, headroom=num_batch_rows, may_share=not sequence.needs_whole_prompt
            )
            if found is None:
                break
            self._start(sequence, found)
            step.num_admitted += 1
            if waiting is not self.waiting:
                waiting.remove(sequence)
            num_batch_rows += sequence.num_batch_rows
            step.add(sequence, min(sequence.num_pending, step.budget))

    def _finds_more_soon(self, sequence: Sequence) -> bool:
        return not sequence.needs_whole_prompt and self.cache.is_being_computed(sequence.table, sequence.tokens)

    def _start(self, sequence: Sequence, num_found: int) -> None:
        self._wait_no_more(sequence)
        if sequence.share is not None and not sequence.table.num_returns:
            sequence.share.charge(prompt_tokens=sequence.num_prompt_tokens)
        bisect.insort(self.running, sequence, key=_order)
        for choice in (sequence, *sequence.siblings):
            choice.batch_row = self._free_batch_rows.pop()
        sequence.is_running = True
        sequence.num_computed = num_found
        if sequence.num_output == 0:
            sequence.num_cached = num_found

    def _wait_no_more(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        if sequence.share is not None:
            self.shares.waits_no_more(sequence.share)

    def _give_back_row(self, sequence: Sequence) -> None:
        if sequence.batch_row >= 0:
            self._free_batch_rows.append(sequence.batch_row)
            sequence.batch_row = -1


class _Step:
    """The step being planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens left."""
        self.chunks: list[Chunk] = []
        self.copies: list[tuple[int, int]] = []
        self.preempted: list[int] = []
        self.num_admitted = 0

    def add(self, sequence: Sequence, num_tokens: int, num_drafts: int = 0) -> None:
        self.chunks.append(Chunk(sequence.id, sequence.num_computed, num_tokens, num_drafts))
        self.budget -= num_tokens + num_drafts


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order
