"""What a pass is computed from, on the host.

T tokens of a pass, R rows whose hidden states are wanted, N of them whose logits are.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serve.config import NO_ADAPTER
from serve.engine.kv_cache import PAGE_SIZE, BlockTable


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Consecutive tokens of one sequence, computed in one pass; their pages are reserved."""

    tokens: list[int]
    """Negative ones are stand-ins for tokens in the feed, by `feed_reference`."""
    start: int
    """Position of the first token."""
    table: BlockTable
    num_rows: int
    """Of how many tokens, counted from the last, the hidden state is wanted."""
    adapter: int = NO_ADAPTER
    """Slot of the adapter that they go through."""
    batch_row: int = 0
    """Where its block table is on the device, and its list of visible slots, if attention is routed."""


class Step(NamedTuple):
    """All that a pass is computed from, on the host; what `model.passes.Pass` has it explains."""

    tokens: np.ndarray
    """`[T]` int64, stand-ins included."""
    positions: np.ndarray
    slots: np.ndarray
    block_tables: np.ndarray
    cu_seqlens: np.ndarray
    kv_lengths: np.ndarray
    adapters: np.ndarray | None
    listing: np.ndarray | None
    wanted: np.ndarray | None
    """`[R]` int64: which tokens' hidden states are wanted; None: all of them."""
    sampled: list[int]
    """Of which of those rows logits are, too; N of them."""

    def following(self) -> "Step":
        """Where there is one token of each sequence: the pass over those behind, as far as the tables reach."""
        positions = self.positions + 1
        pages = self.block_tables[np.arange(len(positions)), positions // PAGE_SIZE].astype(np.int64)
        slots = pages * PAGE_SIZE + positions % PAGE_SIZE
        return self._replace(positions=positions, slots=slots, kv_lengths=self.kv_lengths + 1)
