"""Runs one flat ragged batch on one model: builds its tensors, over the pages that it was given.

T tokens, R rows whose hidden states are wanted, N of them whose logits are, B sequences of this pass, P pages.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.common.cuda_graph import Graphs
from model.adapter_slots import AdapterSlots
from model.collectives import Group
from model.kv_format import KVPages
from model.passes import PagedModel, Pass, PassRunner
from model.tensor_parallel import ALONE
from serve.config import NO_ADAPTER
from serve.engine.batch_state import feed_reference, resolve, upload
from serve.engine.drafts.length import PassCosts, PassTimer, Prepares
from serve.engine.drafts.tree import NO_DRAFT, DraftTree
from serve.engine.kv_cache import PAGE_SIZE, BlockTable, Branch, pages_for
from serve.engine.pass_inputs import SequenceInput, Step
from serve.engine.prompt_outputs import PromptScores, PromptSum, pool_prompt, score_prompt
from serve.engine.ragged_passes import RaggedPasses
from serve.engine.requests import Sequence
from serve.engine.sampling import PendingSamples, Sampled, select
from serve.engine.scheduler import Chunk
from serve.engine.tables import Tables

if TYPE_CHECKING:
    from serve.engine.ranks import Ranks


_REHEARSALS = 4
"""Of a pass: the first fills caches, the second is captured, the others cost what all later ones do."""


class LanguageModel(PagedModel, Protocol):
    """What the runner asks of a model; `model.transformer.Transformer` is one."""

    adapter_slots: AdapterSlots | None

    def logits(self, hidden: Tensor) -> Tensor: ...

    def update_weights(self, weights: Mapping[str, Tensor]) -> None: ...


@dataclass(slots=True)
class Work:
    """A scheduled chunk and the draft tokens to verify behind it."""

    chunk: Chunk
    sequence: Sequence
    draft: DraftTree = NO_DRAFT
    branches: tuple[Branch, ...] = ()
    """Where the keys and values of the draft's other paths are stored."""

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that the next one can be drawn."""
        return self.chunk.start + self.chunk.num_tokens == self.sequence.num_drawn

    @property
    def num_draft_rows(self) -> int:
        """Rows of the draft in the target's pass: on other paths the sequence's last token is computed once more."""
        return self.draft.num_tokens + sum([1 + len(way.tokens) for way in self.draft.others])

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted from this chunk."""
        return self.sequence.prompt_logprobs is not None

    @property
    def pools_prompt(self) -> bool:
        """Whether the chunk may hold hidden states that the prompt's embedding is made of."""
        return self.sequence.params.pooling is not None and self.chunk.start < self.sequence.num_prompt_tokens

    def of_prompt(
        self, hidden: Tensor, rows: range, logits: Callable[[Tensor, int, int], Tensor]
    ) -> Iterator[PromptScores | PromptSum]:
        """What is wanted of the prompt, of the chunk's `rows` of `hidden [R, D]`; `logits`: as `Runner.logits`."""
        if self.scores_prompt:
            yield from score_prompt(self.sequence, self.chunk.start, rows, partial(logits, hidden))
        if self.pools_prompt:
            states = hidden[rows.start : rows.stop]
            yield from pool_prompt(self.sequence, self.chunk.start, self.chunk.num_tokens, states)

    def input(self, feed_width: int) -> SequenceInput:
        sequence, start, num_tokens = self.sequence, self.chunk.start, self.chunk.num_tokens
        tokens = sequence.tokens[start : start + num_tokens]
        # What the host does not know yet, its own last token or draft tokens, is in the feed.
        first = 1 if len(tokens) == num_tokens else 0
        columns = range(first, 1 + self.draft.num_tokens)
        tokens += [feed_reference(sequence.batch_row, column, feed_width) for column in columns]
        num_rows = len(tokens) if self.sequence.needs_whole_prompt else self.samples * (1 + self.draft.num_tokens)
        return SequenceInput(tokens, start, sequence.table, num_rows, sequence.adapter_slot, sequence.batch_row)

    def inputs_of_others(self) -> list[SequenceInput]:
        """The sequence's last token once more, and the tokens behind it, of each other path of the draft."""
        sequence, last = self.sequence, self.sequence.tokens[-1]
        return [
            SequenceInput(
                [last, *way.tokens], self.chunk.start, branch.table, len(way.tokens), sequence.adapter_slot,
                sequence.batch_row,
            )
            for way, branch in zip(self.draft.others, self.branches, strict=True)
        ]  # fmt: skip


class Place(NamedTuple):
    """Where in the rows of a pass is what of some work."""

    item: Work
    rows: range
    """Of the hidden states: the chunk's."""
    first: int
    """The first row of logits; behind the draft's are those of its other paths."""


def lay_out(work: list[Work], feed_width: int) -> tuple[list[SequenceInput], list[int], list[Place]]:
    """Side by side in one pass: its inputs, the rows of which logits are wanted, and what is where in them."""
    inputs: list[SequenceInput] = []
    sampled: list[int] = []
    places: list[Place] = []
    first = 0
    for item in work:
        own, k = item.input(feed_width), item.draft.num_tokens
        inputs.append(own)
        places.append(Place(item, range(first, first + own.num_rows - k), len(sampled)))
        first += own.num_rows
        if item.samples:
            sampled += range(first - 1 - k, first)
        for other in item.inputs_of_others():
            inputs.append(other)
            sampled += range(first, first + other.num_rows)
            first += other.num_rows
    return inputs, sampled, places


Found = tuple[Tensor, Tensor | None]
"""What a pass has computed: the wanted hidden states `[R, D]`, sequence after sequence, and the logits `[N, V]` of some
of them, None where these are none."""


class UnderWay(NamedTuple):
    """A pass that other stages go on with, from which nothing has been drawn yet."""

    end: Callable[[], Found]
    """Waits for them."""
    places: list[Place]
    num_returns: list[int]
    """Of each sequence then; see `BlockTable`."""
    launch_s: float
    """What it took the host to launch it."""

    @classmethod
    def launch(cls, work: list[Work], runner: "Runner") -> "UnderWay":
        began = time.perf_counter()
        inputs, sampled, places = lay_out(work, runner.feed.shape[1])
        end, returns = runner.begin(inputs, sampled), [item.sequence.table.num_returns for item in work]
        return cls(end, places, returns, time.perf_counter() - began)

    def places_left(self) -> list[Place]:
        """Of those that have kept their pages: who has ended has no more to say, who was preempted says it later."""
        return [p for p, n in zip(self.places, self.num_returns, strict=True) if p.item.sequence.table.num_returns == n]

    @contextmanager
    def measured(self, costs: PassCosts | None) -> Iterator[None]:
        """Record what it costs the host, launched before and ended within this context, the wait for others included.

        Of what decodes alone, as without stages; and nothing where nobody asks.
        """
        began, work = time.perf_counter(), [place.item for place in self.places]
        yield
        if costs is not None and all(item.chunk.num_tokens == 1 for item in work):
            num_rows = sum(1 + item.num_draft_rows for item in work)
            costs.record(num_rows, self.launch_s + time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that has been launched, and what the host will know of it."""

    samples: list[PendingSamples] = field(default_factory=list)
    of_prompts: list[PromptScores | PromptSum] = field(default_factory=list)
    under_way: UnderWay | None = None
    """In place of both, what they will be drawn from."""

    def read(self) -> list[Sampled]:
        """Wait for the device, and read what it found, in the order of the batch."""
        found: dict[int, Sampled] = {}
        for group in self.samples:
            found |= group.read()
        for part in self.of_prompts:
            part.read()
        return [found[number] for number in sorted(found)]


class Runner:
    """One model with its pages. The host waits for nothing here, but for other ranks."""

    def __init__(
        self,
        model: LanguageModel,
        pages: KVPages,
        *,
        feed: Tensor,
        ranks: "Ranks | None" = None,
        back: Group = ALONE,
    ) -> None:
        """`pages`: where keys and values are, on the device of the feed. `ranks`: those that compute each pass too.

        `back`: the way from the last stage of the model to the first, of one that is told what to compute.
        """
        self.model, self.pages, self.feed, self._ranks = model, pages, feed, ranks
        self._back = back if ranks is None else ranks.grid.back
        self.device = feed.device
        self._passes = PassRunner(model, pages)
        self.captured: RaggedPasses | None = None
        """Computes what it takes, where there are CUDA graphs."""
        self._latest: Prepares = self._passes

    def capture_passes(self, tables: Tables, graphs: Graphs, most_tokens: int) -> None:
        """From here on; passes of at most so many tokens. Not where attention routes tokens past a layer."""
        if not self.pages.visible:
            self.captured = RaggedPasses(self.model, self.pages, self.feed, tables, graphs, most_tokens)

    @property
    def has_prepared(self) -> bool:
        """Whether the latest pass also did what later ones like it need not do again."""
        return self._latest.has_prepared

    def run(self, inputs: list[SequenceInput], sampled: list[int]) -> Found:
        """Computes the inputs and stores their keys and values; `sampled`: the rows of which logits are wanted."""
        return self.begin(inputs, sampled)()

    def begin(self, inputs: list[SequenceInput], sampled: list[int]) -> Callable[[], Found]:
        """As `run`, but for what waits for later stages of the model: what it returns is called for that.

        Passes end in the order in which they were begun.
        """
        step = self.flatten(inputs, sampled)
        if self.captured is None or not self.captured.take(inputs):
            return self._begin(step)
        self._latest = self.captured
        return partial(self.complete, step, self._wanted(step, self.captured.run(inputs, step)))

    @torch.inference_mode()
    def rehearse(self, sizes: range, timer: PassTimer) -> None:
        """Prepare passes of one sequence's so many tokens, and measure what they cost from then on.

        These tokens are nobody's, and their keys and values are written nowhere.
        """
        if self.pages.visible:  # whose lists would have to name somebody
            return
        for size in sizes:
            n, starts = np.arange(size, dtype=np.int64), np.array([0, size], dtype=np.int32)
            tables = np.zeros((1, pages_for(size)), dtype=np.int32)
            step = Step(0 * n, n, 0 * n - 1, tables, starts, starts[1:], None, None, None, n.tolist())
            for _ in range(_REHEARSALS):
                with timer.measure(size, self):
                    self._begin(step)()

    def _begin(self, step: Step) -> Callable[[], Found]:
        if self._ranks is None:
            return partial(self.complete, step, self.launch(step))
        if (step.tokens < 0).any():
            step = step._replace(tokens=resolve(upload(step.tokens, self.device), self.feed).cpu().numpy())
        with self._ranks.run(step[:-1], step.sampled):
            return partial(self._end, self._ranks, step, self.launch(step))

    def _end(self, ranks: "Ranks", step: Step, hidden: Tensor) -> Found:
        with ranks.end():
            return self.complete(step, hidden)

    def compute(self, step: Step) -> Found:
        """As `run`, of what it makes of its inputs."""
        return self.complete(step, self.launch(step))

    def launch(self, step: Step) -> Tensor:
        """A rank's part of a pass; the last stage sends back what it returns, the wanted hidden states `[R, D]`."""
        tokens, positions, slots, tables, starts, lengths = (upload(part, self.device) for part in step[:6])
        if (step.tokens < 0).any():
            tokens = resolve(tokens, self.feed)
        adapters, listing = (None if part is None else upload(part, self.device) for part in step[6:8])
        self._latest = self._passes
        hidden = self._passes.hidden(Pass(tokens, positions, slots, tables, starts, lengths, adapters, listing))
        hidden = self._wanted(step, hidden)
        if self._back.index == self._back.count - 1 > 0:
            self._back.send(hidden)
        return hidden

    def _wanted(self, step: Step, hidden: Tensor) -> Tensor:
        return hidden if step.wanted is None else hidden[upload(step.wanted, self.device)]

    def complete(self, step: Step, hidden: Tensor) -> Found:
        """What is left, in the first stage, of what it has launched: waits for the last one, and has the logits."""
        if self._back.count > 1:
            hidden = self._back.receive(torch.empty_like(hidden))
        if not step.sampled:
            return hidden, None
        return hidden, self.model.logits(hidden if len(step.sampled) == len(hidden) else select(hidden, step.sampled))

    def logits(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Of rows [start, stop) of what the latest pass has returned, `[R, D] -> [stop - start, V]`."""
        if self._ranks is None:
            return self.model.logits(hidden[start:stop])
        with self._ranks.logits(start, stop):
            return self.model.logits(hidden[start:stop])

    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Gives the model other weights; raises what the model raises."""
        self.model.update_weights(weights)
        self.forget_captures()

    def forget_captures(self) -> None:
        """Whoever gives the model's weights other memory calls this."""
        self._passes.forget_captures()

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies (source, destination) pages in all layers; every source is read before any destination is written."""
        if not copies:
            return
        if self._ranks is not None:
            self._ranks.copy_pages(copies)
        sources, destinations = upload(np.array(copies, dtype=np.int64).T.copy(), self.device)
        self.pages.copy(sources, destinations)

    def _adapters(self, inputs: list[SequenceInput], lengths: list[int]) -> np.ndarray | None:
        numbers = np.array([item.adapter for item in inputs], dtype=np.int32)
        return None if (numbers == NO_ADAPTER).all() else np.repeat(numbers, lengths)

    def first_to_list(self, table: BlockTable, start: int, stop: int) -> int:
        """The first token whose slot a pass over [start, stop) of a sequence, which is launched now, must list."""
        return table.list_tokens(self.pages, start, stop) if self.pages.visible else start

    def _listing(self, inputs: list[SequenceInput]) -> np.ndarray | None:
        if not self.pages.visible:
            return None
        first = [self.first_to_list(item.table, item.start, item.start + len(item.tokens)) for item in inputs]
        return np.array([[item.batch_row for item in inputs], first], dtype=np.int32)

    def flatten(self, inputs: list[SequenceInput], sampled: list[int], ahead: int = 0) -> Step:
        """What `run` computes; its tables reach as many tokens further as are `ahead`."""
        lengths = [len(item.tokens) for item in inputs]
        ends = [item.start + length for item, length in zip(inputs, lengths, strict=True)]
        kv_lengths = np.array(ends, dtype=np.int32)
        cu_seqlens = np.array([0, *accumulate(lengths)], dtype=np.int32)
        block_tables = np.zeros((len(inputs), pages_for(max(ends) + ahead)), dtype=np.int32)
        for row, item in enumerate(inputs):
            num_pages = min(item.table.num_pages, block_tables.shape[1])
            block_tables[row, :num_pages] = item.table.ids[:num_pages]
        tokens = np.array([token for item in inputs for token in item.tokens], dtype=np.int64)
        if set(lengths) == {1}:  # numbers cost less than arrays
            positions = np.array([item.start for item in inputs], dtype=np.int64)
            slots = np.array([item.table.slot(item.start) for item in inputs], dtype=np.int64)
        else:
            owner = np.repeat(np.arange(len(inputs)), lengths)
            positions = np.arange(len(tokens)) + (kv_lengths - cu_seqlens[1:])[owner]
            slots = block_tables[owner, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
        others = self._adapters(inputs, lengths), self._listing(inputs), _wanted_rows(inputs, lengths)
        return Step(tokens, positions, slots, block_tables, cu_seqlens, kv_lengths, *others, sampled)


def _wanted_rows(inputs: list[SequenceInput], lengths: list[int]) -> np.ndarray | None:
    """Indices of the wanted rows in the flat batch; None when all of them are."""
    if all(item.num_rows == length for item, length in zip(inputs, lengths, strict=True)):
        return None
    ends = np.cumsum(lengths)
    ranges = [np.arange(end - item.num_rows, end) for item, end in zip(inputs, ends, strict=True)]
    return np.concatenate(ranges)
