"""A smaller model as a draft.

With pages of its own it has fed [.., last, d_1 .. d_(k-1)] when the target verifies: after full acceptance it lacks d_k
and is fed two tokens next time. That is one case of a general rule: before drafting, the draft is fed all tokens that
it lacks, be it two, a prompt, or what was decoded while drafting did not pay. Roll-back is by length alone.

A model whose keys and values are nearly the target's, such as the target in four bits, reads the target's pages: it
lacks nothing, ever. What it writes for its own guesses the target's verification writes over, before anything there
counts as computed. Source: QSpec, https://arxiv.org/abs/2410.11305.

k draft tokens, R rows, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from model.config import ModelConfig
from serve.engine.batch_state import feed_reference
from serve.engine.drafts.base import DraftContext, Replaceable
from serve.engine.drafts.tree import DraftTree, Wanted
from serve.engine.drafts.trial import Acceptance
from serve.engine.graph_shapes import End, draft_end
from serve.engine.graphs import Batch, UniformSteps
from serve.engine.kv_cache import PAGE_SIZE, BlockTable, PagePool
from serve.engine.pass_inputs import SequenceInput
from serve.engine.requests import Sequence
from serve.engine.runner import Runner
from serve.engine.sampling import select, takes_likeliest


@dataclass(slots=True)
class _Guess:
    """A draft in the making."""

    sequence: Sequence
    length: int
    """Tokens wanted."""
    by_rejection: bool
    """Whether they will be verified so."""


@dataclass(slots=True)
class _Progress:
    """What the draft has read of a sequence."""

    num_returns: int
    """Of the block table when this was written: with another number the pages are others."""
    num_computed: int
    """Tokens whose keys and values it has in the pages."""
    num_noted: int
    """Leading pages of them that are noted as filled."""


class _OwnPages:
    """What the draft has read, in pages of its own under the target's page ids."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._filled = [-1] * pool.num_pages
        """For each page the use (`PagePool.num_uses`) in which the draft has filled it."""
        self._progress: WeakKeyDictionary[BlockTable, _Progress] = WeakKeyDictionary()

    def num_computed(self, sequence: Sequence) -> int:
        return self._read(sequence).num_computed

    def has_computed(self, sequence: Sequence, num_tokens: int) -> None:
        self._read(sequence).num_computed = num_tokens

    def start(self, sequence: Sequence, filling: set[int]) -> int:
        """The first token that must be computed for a guess: pages that others are `filling` now are skipped."""
        return self._skip_filled(sequence.table, self.num_computed(sequence), sequence.num_tokens - 1, filling)

    def observe(self, sequence: Sequence, num_computed: int) -> None:
        progress = self._read(sequence)
        progress.num_computed = num_computed
        for page in sequence.table.ids[progress.num_noted : num_computed // PAGE_SIZE].tolist():
            self._filled[page] = self._pool.num_uses[page]
            progress.num_noted += 1

    def moved(self, sequence: Sequence) -> None:
        """What it has of the last token and behind lies in the pages of before; of all earlier ones it has copies."""
        progress = self._read(sequence)
        progress.num_computed = min(progress.num_computed, sequence.num_tokens - 1)
        progress.num_noted = min(progress.num_noted, progress.num_computed // PAGE_SIZE)

    def _read(self, sequence: Sequence) -> _Progress:
        """What is known of a sequence; of one whose pages are new to the draft, what others have left in them."""
        table = sequence.table
        progress = self._progress.get(table)
        if progress is None or progress.num_returns != table.num_returns:
            num_filled = self._skip_filled(table, 0, sequence.num_tokens - 1, set()) // PAGE_SIZE
            progress = _Progress(table.num_returns, num_filled * PAGE_SIZE, num_filled)
            self._progress[table] = progress
        return progress

    def _skip_filled(self, table: BlockTable, start: int, stop: int, filling: set[int]) -> int:
        """The first of tokens [start, stop] that must be computed; at the latest, `stop`.

        Skips whole pages that are in `filling` or hold the draft's keys and values already.
        """
        number = start // PAGE_SIZE
        while number < stop // PAGE_SIZE:
            page = int(table.ids[number])
            if self._filled[page] != self._pool.num_uses[page] and page not in filling:
                break
            number += 1
        return max(start, number * PAGE_SIZE)


class _TargetsPages:
    """The target has computed all but the last token of whoever is drafted for."""

    def num_computed(self, sequence: Sequence) -> int:
        return sequence.num_tokens - 1

    def has_computed(self, sequence: Sequence, num_tokens: int) -> None: ...

    def start(self, sequence: Sequence, filling: set[int]) -> int:
        return sequence.num_tokens - 1

    def observe(self, sequence: Sequence, num_computed: int) -> None: ...

    def moved(self, sequence: Sequence) -> None: ...


def _input(sequence: Sequence, tokens: list[int], start: int, *, num_rows: int) -> SequenceInput:
    return SequenceInput(tokens, start, sequence.table, num_rows, batch_row=sequence.batch_row)


class ModelDraft:
    """A smaller model of the same vocabulary."""

    model_use: ClassVar[Literal["needed"]] = "needed"
    needs_text: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    runs_passes = True

    def __init__(self, context: DraftContext) -> None:
        if context.model is None:
            raise ValueError("a model that drafts must be loaded")
        state, pool = context.sampler.state, context.cache.pool
        self.shares_pages = context.pages is not None
        self.first_tokens = 1 if self.shares_pages else 2
        pages = context.pages or context.kv_format.allocate(
            context.model.config, pool.num_pages, PAGE_SIZE, state.feed.device, **context.tables.list_sizes
        )
        self.runner = Runner(context.model, pages, feed=state.feed)
        self.sampler, self.max_tokens, self.timer = context.sampler, context.max_tokens, context.timer
        self.last_token = context.model.config.vocab_size - 1
        self.has_prepared = False
        """Whether the latest pass also did what later ones like it need not do again."""
        self._steps: UniformSteps | None = None
        if context.graphs is not None and context.model.can_be_captured:
            self._steps = UniformSteps(self.runner, self.sampler, context.tables, context.graphs)
            self.runner.capture_passes(context.tables, context.graphs, context.max_tokens)
        self._reading = _TargetsPages() if self.shares_pages else _OwnPages(pool)
        self._pool = pool
        self.acceptance: Acceptance | None = None
        self.replaceable: Replaceable | None = None if self.shares_pages else self

    @property
    def config(self) -> ModelConfig:
        return self.runner.model.config

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """What it has read of all sequences it reads again."""
        self.runner.update_weights(weights)
        self._reading = _OwnPages(self._pool)

    def at_hand(self, sequence: Sequence) -> None:
        """Each of its tokens takes a pass."""

    def propose(self, wanted: list[Wanted]) -> dict[int, DraftTree]:
        inputs, guesses = self._catch_up(wanted)
        proposed, num_drawn = list(guesses), 0
        while inputs:
            with self.timer.measure(sum(len(own.tokens) for own in inputs), self):
                steps = self._extend(inputs, guesses, num_drawn)
            num_drawn += 1
            guesses = [guess for guess in guesses if num_drawn < guess.length]
            if steps is not None:
                self._follow(steps, len(inputs), max((guess.length for guess in guesses), default=0) - num_drawn)
                break
            while guesses and all(map(self._takes_likeliest, guesses)):
                num_drawn = self._draw_likeliest(guesses, num_drawn)
                guesses = [guess for guess in guesses if num_drawn < guess.length]
            inputs = [self._next_input(guess.sequence, num_drawn) for guess in guesses]
        return {guess.sequence.id: DraftTree(guess.length, by_rejection=guess.by_rejection) for guess in proposed}

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        if self.acceptance is not None:
            self.acceptance.observe(num_drafted, num_accepted)
        self._reading.observe(sequence, sequence.num_tokens + min(num_accepted, num_drafted - 1))

    def moved(self, sequence: Sequence) -> None:
        self._reading.moved(sequence)

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        if not self.shares_pages:
            self.runner.copy_pages(copies)

    def rehearse(self) -> None:
        self.runner.rehearse(range(1, 1 + self.first_tokens), self.timer)

    def forget_captures(self) -> None:
        """Where the target's layers are its own, passes were captured over weights that are no more."""
        self.runner.forget_captures()

    def num_missing(self, sequence: Sequence) -> int:
        return sequence.num_tokens - self._reading.num_computed(sequence)

    def _catch_up(self, wanted: list[Wanted]) -> tuple[list[SequenceInput], list[_Guess]]:
        """Inputs that bring the draft to each sequence's last token, as far as one pass goes, and who can guess then.

        A sequence that needs more is brought nearer and guesses in a later step. Pages that another sequence fills, or
        has filled, are skipped: a pass writes all keys and values of a layer before it reads any. Of a routed layer it
        does not know before who has some, so there only pages of earlier passes are. Where two fill the same page, they
        write the same; what the draft's cache holds decides how often it is right, never what is emitted.
        """
        inputs: list[SequenceInput] = []
        guesses = []
        filled: set[int] = set()
        room = self.max_tokens
        any_by_rejection = any(one.sequence.verifies_by_rejection for one in wanted)
        for sequence, length, _ in wanted:
            start = self._reading.start(sequence, filled)
            # What the target says of its embedding's padding is no token of the draft: any other serves as well.
            tokens = [min(token, self.last_token) for token in sequence.tokens[start : start + room]]
            stop = start + len(tokens)
            if not tokens:
                continue
            room -= len(tokens)
            if not self.runner.pages.visible:
                filled.update(sequence.table.ids[start // PAGE_SIZE : stop // PAGE_SIZE].tolist())
            is_complete = stop == sequence.num_tokens
            inputs.append(_input(sequence, tokens, start, num_rows=int(is_complete)))
            if is_complete:
                # Of a greedy request both rules say the same: a captured step has one.
                is_with_others = any_by_rejection and self._steps is not None and sequence.params.is_greedy
                guesses.append(_Guess(sequence, length, sequence.verifies_by_rejection or is_with_others))
            else:
                self._reading.has_computed(sequence, stop)
        return inputs, guesses

    def _next_input(self, sequence: Sequence, num_drawn: int) -> SequenceInput:
        """The latest draft token, to be fed for the one after it."""
        token = feed_reference(sequence.batch_row, num_drawn, self.runner.feed.shape[1])
        return _input(sequence, [token], sequence.num_tokens + num_drawn - 1, num_rows=1)

    def _takes_likeliest(self, guess: _Guess) -> bool:
        """Whether its tokens are where the host can read them, and each is the likeliest of the draft's own scores."""
        is_likeliest = takes_likeliest(guess.sequence, guess.sequence.num_output) and not guess.by_rejection
        return is_likeliest and self.runner.feed.is_cpu and self._steps is None and not self.runner.pages.visible

    def _draw_likeliest(self, guesses: list[_Guess], num_drawn: int) -> int:
        """Passes behind the first, until somebody has enough: from tables that are made once, without the sampler.

        Returns how many tokens are drawn then.
        """
        enough, rows = min(guess.length for guess in guesses), [guess.sequence.batch_row for guess in guesses]
        feed, n = self.runner.feed.numpy(), len(guesses)
        inputs = [self._next_input(guess.sequence, num_drawn) for guess in guesses]
        step = self.runner.flatten(inputs, list(range(n)), ahead=enough - num_drawn)
        for column in range(num_drawn, enough):
            with self.timer.measure(n, self):
                _, logits = self.runner.compute(step._replace(tokens=feed[rows, column]))
                self.has_prepared = self.runner.has_prepared
                if logits is not None:
                    feed[rows, 1 + column] = self.sampler.likeliest(logits)
            if column + 1 < enough:
                step = step.following()
        return enough

    def _follow(self, steps: UniformSteps, num_rows: int, num_passes: int) -> None:
        """Passes over what the one before has guessed; whoever wants less computes on, for nobody."""
        for _ in range(num_passes):
            with self.timer.measure(num_rows, self):
                steps.launch_following()
                self.has_prepared = steps.has_prepared

    def _extend(self, inputs: list[SequenceInput], guesses: list[_Guess], num_drawn: int) -> UniformSteps | None:
        """One pass; it draws a token for each guess, whose input is complete.

        Returns what can launch the passes behind it, if it left on the device what they need.
        """
        batch = None if self._steps is None else self._uniform(self._steps, inputs, guesses, num_drawn)
        if self._steps is None or batch is None:
            _, found = self.runner.run(inputs, list(range(len(guesses))))
            self.has_prepared = self.runner.has_prepared
            if found is not None:
                self._draw(guesses, found, num_drawn)
            return None
        end = draft_end(batch.who.sequences, {guess.by_rejection for guess in guesses})
        (logits,) = self._steps.launch(batch, end)
        self.has_prepared = self._steps.has_prepared
        if end is End.LOGITS:
            self._draw(guesses, logits[batch.num_tokens - 1 :: batch.num_tokens], num_drawn)
        return self._steps if end.is_draft else None

    def _uniform(
        self, steps: UniformSteps, inputs: list[SequenceInput], guesses: list[_Guess], num_drawn: int
    ) -> Batch | None:
        """The inputs with equally many tokens each, one or two, if the pass can be captured so.

        Where one lacks a token and another two, the first computes once more what it has.
        """
        q = max(len(own.tokens) for own in inputs)
        starts = [own.start + len(own.tokens) - q for own in inputs]
        if len(inputs) != len(guesses) or q > 2 or min(starts) < 0:
            return None
        before = [[min(guess.sequence.tokens[-2], self.last_token)] if q > 1 else [] for guess in guesses]
        tokens = np.array([[*one, *own.tokens][-q:] for one, own in zip(before, inputs, strict=True)])
        who, n = steps.members(tuple(guess.sequence for guess in guesses)), len(guesses)
        wanted = np.array([guess.length - num_drawn for guess in guesses])
        last, counts = np.full(n, q - 1), np.full(n, num_drawn)
        return Batch(who, tokens, np.array(starts), last=last, counts=counts, wanted=wanted)

    def _draw(self, guesses: list[_Guess], logits: Tensor, num_drawn: int) -> None:
        """Draw one token for each guess, of `logits [R, any]`."""
        for by_rejection in (False, True):
            numbers = [n for n, guess in enumerate(guesses) if guess.by_rejection == by_rejection]
            for some in self.sampler.blocks(numbers):
                rows = self.sampler.rows([guesses[n].sequence for n in some], [num_drawn] * len(some))
                self.sampler.guess(select(logits, some), rows, by_rejection=by_rejection)
