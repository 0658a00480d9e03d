"""Steps in which every sequence computes equally many tokens: decoding, verification, passes of a draft.

Such a step is the same code for any batch of its size, over tensors that stay: one upload brings what the host decides,
and everything else, tokens, positions, slots, tables, follows from it on the device. So it can be captured
(kernels/common/cuda_graph.py) and costs the host the same whatever the model's layers. Batches are filled up to few
sizes by sequences without keys, whose state is the spare row; a sequence with fewer draft tokens than the others
computes rows that are written nowhere and looked at by nobody.

B sequences of a captured size, n ≤ B of them real, q tokens of each, P pages of a block table, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.common.cuda_graph import Graphs, Outputs
from model.passes import Pass, run_pass
from serve.config import NO_ADAPTER
from serve.engine.batch_state import NOBODY, BatchState, Staged, feed_references, resolve
from serve.engine.drafts.tree import NO_DRAFT, DraftTree
from serve.engine.graph_shapes import End, Shape, captured_size, target_end
from serve.engine.kv_cache import PAGE_SIZE, BlockTable
from serve.engine.requests import Sequence
from serve.engine.runner import Runner
from serve.engine.sampling import (
    PendingSamples,
    Rows,
    Sampler,
    SequenceRows,
    emitted,
    meant_by,
    most_logprobs,
)
from serve.engine.tables import Tables


class Batch(NamedTuple):
    """What a step computes."""

    who: "Members"
    tokens: np.ndarray
    """`[n, q]`, stand-ins included (`feed_reference`)."""
    starts: np.ndarray
    """Positions of the first tokens."""
    last: np.ndarray | int = 0
    """How many tokens are written behind the first."""
    counts: np.ndarray | int = 0
    """Draft tokens that are meant, by `meant_by`; of a guess, those before it."""
    wanted: np.ndarray | int = 0
    """Draft tokens that passes of a draft, this one and those that follow it, are to guess."""
    grown: Iterable[int] | None = None
    """Who may have pages that the device lacks; None: anybody."""

    @property
    def num_tokens(self) -> int:
        """q"""
        return self.tokens.shape[1]

    def may_lack(self) -> Iterator[tuple[int, BlockTable]]:
        """Rows and tables of those who may have pages that the device lacks."""
        rows, tables = self.who.rows, self.who.tables
        return ((rows[n], tables[n]) for n in (range(len(tables)) if self.grown is None else self.grown))


class Members:
    """What of a batch stays from step to step, as long as the same sequences are in it."""

    def __init__(self, number: int, sequences: tuple[Sequence, ...], state: BatchState) -> None:
        """`number`: no other members have it."""
        self.number, self.sequences = number, sequences
        self._state, self._num_writes = state, state.num_writes
        self.rows = np.array([sequence.batch_row for sequence in sequences])
        self.adapters, self.prompts, self._always, self._min_tokens, cuts_tail = state.facts[self.rows].T
        self.has_adapters, self.cuts_tail = bool((self.adapters != NO_ADAPTER).any()), bool(cuts_tail.any())
        self._may_adjust = bool(self._always.any() or self._min_tokens.any())
        self.most_logprobs = most_logprobs(sequences)
        self.tables = [sequence.table for sequence in sequences]
        self.references = feed_references(self.rows[:, None], np.arange(1), state.feed.shape[1])
        """`[n, 1]`: of the latest token of each; those of draft tokens lie below."""
        self._starts: np.ndarray | None = None
        """Of the latest step, if it computed one token of each."""

    def are(self, sequences: tuple[Sequence, ...]) -> bool:
        """Whether these are they, and nothing of it has been written since."""
        return self._num_writes == self._state.num_writes and self.sequences == sequences

    def adjusted(self, positions: np.ndarray) -> np.ndarray | None:
        """The rows of those whose scores are adjusted at a position, −1 for the others; None: nobody's."""
        if not self._may_adjust:
            return None
        adjusted = np.where((self._always != 0) | (positions < self._min_tokens), self.rows, NOBODY)
        return adjusted if adjusted.max() != NOBODY else None

    def next_batch(self, drafts: list[DraftTree]) -> Batch:
        """Of the last token of each, and of draft tokens: none, or one tree of each."""
        if drafts.count(NO_DRAFT) < len(drafts):
            return self._behind(drafts)
        if self._starts is None:
            self._starts = self._positions()
            return Batch(self, self._tokens(1), self._starts)
        # The step before has left what it drew in the feed. Whoever begins a page with that may have got it just now.
        self._starts = self._starts + 1
        return Batch(self, self.references, self._starts, grown=(self._starts % PAGE_SIZE == 0).nonzero()[0])

    def _behind(self, drafts: list[DraftTree]) -> Batch:
        self._starts = None  # how many of them are accepted will be read
        last, counts = np.array([draft.num_tokens for draft in drafts]), np.array([meant_by(draft) for draft in drafts])
        return Batch(self, self._tokens(1 + int(last.max())), self._positions(), last, counts)

    def _positions(self) -> np.ndarray:
        return np.array([sequence.num_drawn - 1 for sequence in self.sequences])

    def _tokens(self, q: int) -> np.ndarray:
        """The last of each and q − 1 draft tokens, `[n, q]`; what the host does not know is in the feed."""
        tokens = self.references - np.arange(q)
        latest = zip(self.references[:, 0].tolist(), self.sequences, strict=True)
        tokens[:, 0] = [reference if one.num_unread else one.tokens[-1] for reference, one in latest]
        return tokens


class Inputs:
    """What the host decides of a step, on the device; all int32, in one piece."""

    def __init__(self, shape: Shape, spare_row: int, device: torch.device) -> None:
        self._size, self._q = shape.size, shape.num_tokens
        self._is_plain = shape.num_tokens == 1 and not shape.end.is_draft
        """Whether there are no draft tokens."""
        self.room = shape.size * (1 + (shape.num_tokens + PAGE_SIZE - 2) // PAGE_SIZE)
        """Pages that the device may lack."""
        nobody = [spare_row, 0, -shape.num_tokens, -1, NO_ADAPTER, 0, 0, NOBODY, 0]
        self._num_columns = len(nobody)
        self.empty = np.zeros((len(nobody) + shape.num_tokens) * shape.size + 3 * self.room, dtype=np.int32)
        columns, _, self._empty_pages = self.parts(self.empty)
        columns[:], self._empty_pages[0] = np.array(nobody, dtype=np.int32)[:, None], spare_row
        self._host, self._number, self._brings_pages = self.empty.copy(), 0, False
        """The latest batch, the number of its members, and whether it had new pages."""
        self._host_parts = self.parts(self._host)
        self._staged = Staged(self.empty, device)
        self.upload, self.values = self._staged.upload, self._staged.values
        """What the latest step was given, or what one for a draft has left for the one behind it."""
        self._no_pages = self.parts(self.values.clone())[2]

    def parts(self, values: Any) -> tuple[Any, Any, Any]:
        """Columns `[9, B]`, tokens `[B, q]` and new pages `[3, m]` (row, column, id), in an array or a tensor.

        Columns: batch row; the first position whose slot may not be listed; position of the first token (−q: no keys);
        how many are written behind it; adapter; draft tokens meant, or before a guess; number of the first output token
        that is drawn; the batch row again where scores are adjusted, else −1; draft tokens wanted from here on.
        """
        first, behind = self._num_columns * self._size, len(values) - 3 * self.room
        return (
            values[:first].reshape(self._num_columns, self._size),
            values[first:behind].reshape(self._size, self._q),
            values[behind:].reshape(3, self.room),
        )

    def write(
        self,
        batch: Batch,
        *,
        first_to_list: np.ndarray,
        positions: np.ndarray,
        adjusted: np.ndarray | None,
        new_pages: np.ndarray,
    ) -> None:
        """Upload a batch and its columns `[n]` as in `parts`; what is as in the batch before it stays."""
        who, n, (columns, tokens, pages) = batch.who, len(batch.tokens), self._host_parts
        if self._number != who.number:
            self._host[:], self._number = self.empty, who.number
            columns[0, :n], columns[3, :n], columns[4, :n] = who.rows, 0, who.adapters
        columns[1, :n], columns[2, :n], columns[6, :n] = first_to_list, batch.starts, positions
        if not self._is_plain:
            columns[3, :n], columns[5, :n], columns[8, :n] = batch.last, batch.counts, batch.wanted
        if adjusted is not None:
            columns[7, :n] = adjusted
        tokens[:n] = batch.tokens
        num_new = new_pages.shape[1]
        if num_new or self._brings_pages:
            pages[:] = self._empty_pages
            pages[:, :num_new], self._brings_pages = new_pages, num_new > 0
        self.upload(self._host)

    def follow(self, columns: Tensor, q: int, feed_width: int) -> None:
        """On the device: what a draft's pass with these columns, over q tokens each, leaves for the one behind it.

        Whoever has got all draft tokens that were wanted computes on, and writes nowhere; so the next pass needs
        nothing from the host.
        """
        rows, _, starts, _, adapters, num_before, positions, adjusted, wanted = columns
        following, last = torch.where(starts < 0, -1, starts + q), torch.where(wanted > 1, 0, -1)
        latest = -1 - rows * feed_width - (1 + num_before)
        own, tokens, pages = self.parts(self.values)
        to_list, before, position = following.clamp_min(0), num_before + 1, positions + 1
        left = rows, to_list, following, last, adapters, before, position, adjusted, wanted - 1
        own.copy_(torch.stack(left))
        tokens.copy_(latest[:, None])
        pages.copy_(self._no_pages)


class UniformSteps:
    """Runs one model over batches of equally many tokens each."""

    def __init__(
        self, runner: Runner, sampler: Sampler, tables: Tables, graphs: Graphs, has_adapters: bool = False
    ) -> None:
        """`has_adapters`: whether a sequence's adapter is meant for this model."""
        self._runner, self._sampler, self._tables, self._graphs = runner, sampler, tables, graphs
        self._has_adapters = has_adapters
        self._inputs: dict[Shape, Inputs] = {}
        self._members: Members | None = None
        """Of the latest batch."""
        self._num_members = 0
        """How many batches had others than the one before."""
        self._following: Shape | None = None
        """What may be launched behind the latest step, if that left what it takes."""

    @property
    def has_prepared(self) -> bool:
        """Whether the latest step also did what later ones like it need not do again."""
        return self._graphs.has_prepared

    def decode(self, who: Members, drafts: list[DraftTree], *, is_masked: bool) -> list[PendingSamples]:
        """Launch a step of the target: what sequences emit behind their last token and draft tokens.

        `drafts`: none, or one of each. `is_masked`: whether any of them has a token mask.
        """
        batch, sequences = who.next_batch(drafts), who.sequences
        n, q = batch.tokens.shape
        end = End.LOGITS if is_masked else target_end(sequences, drafts, q)
        if end is End.LOGITS:
            (logits,) = self.launch(batch, end)
            each = enumerate(zip(sequences, drafts or [NO_DRAFT] * n, strict=True))
            return self._sampler.sample(logits, [SequenceRows(one, at * q, draft) for at, (one, draft) in each])
        found, logits = self.launch(batch, end)
        return [self._sampler.pending(range(n), sequences, found, logits, who.most_logprobs)]

    def members(self, sequences: tuple[Sequence, ...]) -> Members:
        """Of a batch that is launched next; what is known of the latest one's is kept."""
        who = self.going_on(sequences)
        if who is None:
            self._num_members += 1
            who = self._members = Members(self._num_members, sequences, self._sampler.state)
        return who

    def going_on(self, sequences: tuple[Sequence, ...]) -> Members | None:
        """The latest batch's, if exactly these were in it, and nothing has been written of them since."""
        return self._members if self._members is not None and self._members.are(sequences) else None

    def interrupt(self) -> None:
        """The next step is not taken to go on from the latest here: one has been launched otherwise, or pages moved."""
        self._members = None

    def launch(self, batch: Batch, end: End) -> Outputs:
        """Launch a step. Returns what `Sampler.pending` asks for, if the target decides, and the logits `[n · q, V]`.

        They lie where the next step puts its own.
        """
        (n, q), who = batch.tokens.shape, batch.who
        positions = batch.starts + (q if end.is_draft else 1) - who.prompts
        draws = end is not End.LOGITS
        adjusted = who.adjusted(positions) if draws else None
        bias_width = -1 if adjusted is None else self._sampler.state.bias_width
        has_adapters = self._has_adapters and who.has_adapters
        shape = Shape(captured_size(n), q, end, has_adapters, bias_width, draws and who.cuts_tail)
        inputs = self._inputs_of(shape)
        self._following = shape._replace(num_tokens=1) if end.is_draft else None
        inputs.write(
            batch,
            first_to_list=self._first_to_list(batch),
            positions=positions,
            adjusted=adjusted,
            new_pages=self._tables.missing(batch.may_lack(), inputs.room),
        )
        found = self._graphs_run(shape, inputs)
        return found if n == shape.size else (*(part[:n] for part in found[:-1]), found[-1][: n * q])

    def launch_following(self) -> None:
        """Launch a draft's pass over what its latest one has guessed: nothing is uploaded.

        RuntimeError where that one drew nothing.
        """
        if self._following is None:
            raise RuntimeError("the latest step has left nothing for another one behind it")
        self._graphs_run(self._following, self._inputs_of(self._following))

    def _first_to_list(self, batch: Batch) -> np.ndarray:
        if not self._runner.pages.visible:
            return batch.starts
        stops = batch.starts + batch.last + np.maximum(batch.wanted, 1)
        each = zip(batch.who.tables, batch.starts.tolist(), stops.tolist(), strict=True)
        return np.array([self._runner.first_to_list(table, start, stop) for table, start, stop in each])

    @torch.inference_mode()
    def prepare(self, size: int) -> None:
        """Run and capture plain decoding of so many sequences, with nobody in it."""
        shape = Shape(size, num_tokens=1, end=End.MATCHING, has_adapters=False, bias_width=-1, cuts_tail=False)
        inputs = self._inputs_of(shape)
        for _ in range(2):
            inputs.upload(inputs.empty)
            self._graphs_run(shape, inputs)

    def _inputs_of(self, shape: Shape) -> Inputs:
        if shape not in self._inputs:
            self._inputs[shape] = Inputs(shape, self._sampler.state.spare_row, self._runner.device)
            if shape.end.is_draft and shape.num_tokens > 1:
                self._inputs_of(shape._replace(num_tokens=1))  # no capture may make them
        return self._inputs[shape]

    def _graphs_run(self, shape: Shape, inputs: Inputs) -> Outputs:
        return self._graphs.run((id(self), shape), lambda: self._run(shape, inputs))

    def _run(self, shape: Shape, inputs: Inputs) -> Outputs:
        """The step: nothing below knows whether it is launched or captured."""
        columns, tokens, pages = inputs.parts(inputs.values)
        self._tables.take(pages)
        logits = self._logits(shape, columns, tokens)
        if shape.end.is_draft:
            self._guess(shape, columns, logits)
            following = self._inputs_of(shape._replace(num_tokens=1))
            following.follow(columns, shape.num_tokens, self._runner.feed.shape[1])
        elif shape.end is not End.LOGITS:
            return self._decide(shape, columns, logits), logits
        return (logits,)

    def _guess(self, shape: Shape, columns: Tensor, logits: Tensor) -> None:
        """A draft token behind the last of each sequence's own."""
        batch_rows, _, _, _, _, num_before, positions, adjusted, _ = columns.long()
        rows = Rows(
            batch_rows=batch_rows,
            num_before=num_before,
            positions=positions,
            adjusted=adjusted,
            is_adjusted=shape.bias_width >= 0,
            most_before=self._sampler.state.max_drafts,
            cuts_tail=shape.cuts_tail,
            masked=[],
        )
        q = shape.num_tokens
        self._sampler.guess(logits[q - 1 :: q], rows, by_rejection=shape.end is End.DRAFT_FOR_REJECTION)

    def _decide(self, shape: Shape, columns: Tensor, logits: Tensor) -> Tensor:
        """What each sequence emits, `[B, k + 3]`, and what the next step starts from."""
        k, (batch_rows, _, starts, _, _, counts, positions, adjusted, _) = shape.num_tokens - 1, columns
        rows = _rows(batch_rows, positions, adjusted, shape)
        counts = self._sampler.meant(counts, batch_rows.long(), k)
        decide = self._sampler.verify if shape.end is End.REJECTION else self._sampler.match
        found, num_accepted = decide(logits, rows, counts, k)
        counted = adjusted if shape.bias_width >= 0 else None
        self._sampler.state.advance(batch_rows.long(), found, lengths=starts.clamp_min(0) + 1, counted=counted)
        return emitted(found, num_accepted, counts)

    def _logits(self, shape: Shape, columns: Tensor, tokens: Tensor) -> Tensor:
        """Of every token, `[B · q, V]`."""
        batch_rows, _, starts, last, adapters = columns[:5]
        q, device = shape.num_tokens, columns.device
        behind = torch.arange(q, dtype=torch.int32, device=device)
        positions = (starts[:, None] + behind).clamp_min(0).long()
        tables = self._tables.pages.index_select(0, batch_rows)
        slots = tables.gather(1, positions // PAGE_SIZE).long() * PAGE_SIZE + positions % PAGE_SIZE
        step = Pass(
            tokens=resolve(tokens.flatten().long(), self._runner.feed),
            positions=positions.flatten(),
            slots=torch.where(behind <= last[:, None], slots, -1).flatten(),
            block_tables=tables,
            cu_seqlens=torch.arange(0, shape.size * q + 1, q, dtype=torch.int32, device=device),
            kv_lengths=starts + q,
            adapters=adapters[:, None].expand(-1, q).flatten() if shape.has_adapters else None,
            listing=columns[:2] if self._runner.pages.visible else None,
        )
        return self._runner.model.logits(run_pass(self._runner.model, self._runner.pages, step))


def _rows(batch_rows: Tensor, positions: Tensor, adjusted: Tensor, shape: Shape) -> Rows:
    """The rows of a step, sequence after sequence, each after q − 1 draft tokens at most."""
    before = torch.arange(shape.num_tokens, device=batch_rows.device)
    each = (part[:, None].long() for part in (batch_rows, positions, adjusted))
    owners, first, adjusted_rows = (part.expand(-1, shape.num_tokens) for part in each)
    return Rows(
        batch_rows=owners.flatten(),
        num_before=before.expand(len(batch_rows), -1).flatten(),
        positions=(first + before).flatten(),
        adjusted=adjusted_rows.flatten(),
        is_adjusted=shape.bias_width >= 0,
        most_before=shape.num_tokens - 1,
        cuts_tail=shape.cuts_tail,
        masked=[],
    )
