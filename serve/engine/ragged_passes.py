"""Passes over different numbers of tokens, prompts alone or beside sequences that decode, replayed from CUDA graphs.

Launched kernel by kernel, such a pass costs the host as long as a GPU takes for hundreds of tokens, and whoever decodes
meanwhile waits. So it is captured for few numbers of tokens and for as many sequences as there may be: one upload says
whose tokens they are, block tables lie on the device already, and what fills up the batch is a sequence without keys.

T tokens of a captured size, B sequences: all that may run, and the one that fills up.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.common.cuda_graph import Graphs, Outputs
from model.kv_format import KVPages
from model.passes import PagedModel, Pass, run_pass
from serve.config import NO_ADAPTER
from serve.engine.batch_state import Staged, resolve
from serve.engine.graph_shapes import MOST_TOKENS, captured_tokens
from serve.engine.pass_inputs import SequenceInput, Step
from serve.engine.tables import Tables

_TOKENS_EACH = 64
"""Of a sequence that attention cuts its work for: right for prompts, and no loss for those that decode beside them."""


class RaggedPasses:
    """Runs one model over passes of up to `MOST_TOKENS` tokens."""

    def __init__(
        self, model: PagedModel, pages: KVPages, feed: Tensor, tables: Tables, graphs: Graphs, most_tokens: int
    ) -> None:
        """`most_tokens`: of any pass."""
        self._model, self._pages, self._feed, self._tables, self._graphs = model, pages, feed, tables, graphs
        self._most_tokens = min(MOST_TOKENS, most_tokens)
        self._num_sequences = tables.num_rows
        self._staged = Staged(self._nobody(self._most_tokens), feed.device)

    @property
    def has_prepared(self) -> bool:
        """Whether the latest pass also did what later ones like it need not do again."""
        return self._graphs.has_prepared

    def take(self, inputs: list[SequenceInput]) -> bool:
        """Whether these are computed so: each by its own block table, and few enough."""
        num_tokens = sum(len(one.tokens) for one in inputs)
        rows = {one.batch_row for one in inputs}
        return len(rows) == len(inputs) and captured_tokens(num_tokens) <= self._most_tokens

    def run(self, inputs: list[SequenceInput], step: Step) -> Tensor:
        """The hidden states of the tokens, where the next pass puts its own."""
        self._tables.missing((one.batch_row, one.table) for one in inputs)
        t, n, size = len(step.tokens), len(inputs), captured_tokens(len(step.tokens))
        values = self._nobody(size)
        tokens, starts, sequences = self._parts(values, size)
        tokens[:3, :t] = step.tokens, step.positions, step.slots
        if step.adapters is not None:
            tokens[3, :t] = step.adapters
        starts[: n + 1], starts[n + 1 : -1] = step.cu_seqlens, t
        sequences[:, :n] = step.kv_lengths, [one.batch_row for one in inputs]
        return self._replay(values, size, has_adapters=step.adapters is not None)[:t]

    @torch.inference_mode()
    def prepare(self, size: int) -> None:
        """Run and capture a pass of so many tokens, with nobody in it."""
        for _ in range(2):
            self._replay(self._nobody(size), size, has_adapters=False)

    def _nobody(self, size: int) -> np.ndarray:
        """What a pass is given whose tokens are all of the sequence that fills up."""
        values = np.zeros(4 * size + 3 * self._num_sequences + 1, dtype=np.int32)
        tokens, starts, sequences = self._parts(values, size)
        tokens[2], tokens[3], starts[-1], sequences[1] = -1, NO_ADAPTER, size, self._num_sequences - 1
        return values

    def _parts(self, values: Any, size: int) -> tuple[Any, Any, Any]:
        """Of tokens `[4, T]`: token, position, slot (-1: none), adapter; `cu_seqlens [B+1]`; `[2, B]`: length, row."""
        first, behind = 4 * size, 4 * size + self._num_sequences + 1
        return values[:first].reshape(4, size), values[first:behind], values[behind:].reshape(2, self._num_sequences)

    def _replay(self, values: np.ndarray, size: int, *, has_adapters: bool) -> Tensor:
        self._staged.upload(values)
        given = self._staged.values[: len(values)]
        (hidden,) = self._graphs.run((id(self), size, has_adapters), lambda: self._compute(given, size, has_adapters))
        return hidden

    def _compute(self, values: Tensor, size: int, has_adapters: bool) -> Outputs:
        """Nothing here knows whether it is launched or captured."""
        (tokens, positions, slots, adapters), starts, (lengths, rows) = self._parts(values, size)
        step = Pass(
            tokens=resolve(tokens.long(), self._feed),
            positions=positions.long(),
            slots=slots.long(),
            block_tables=self._tables.pages.index_select(0, rows),
            cu_seqlens=starts,
            kv_lengths=lengths,
            adapters=adapters if has_adapters else None,
            num_busy=-(-size // _TOKENS_EACH),
        )
        return (run_pass(self._model, self._pages, step),)
