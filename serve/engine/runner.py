"""Runs one flat ragged batch on one model: owns its page memory, builds its tensors.

T tokens, R rows whose hidden states are wanted, B pieces (sequences of this pass), P pages, L layers.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model.attention import PagedAttention, PagedBatch
from model.config import ModelConfig
from serve.config import NO_ADAPTER
from serve.engine.batch_state import resolve
from serve.engine.kv_cache import PAGE_SIZE, BlockTable, pages_for
from serve.engine.transfer import upload


class LanguageModel(Protocol):
    """What the runner asks of a model; `model.transformer.Transformer` is one."""

    config: ModelConfig

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: PagedAttention, *, adapters: Tensor | None = None
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence, computed in one pass; their pages are reserved."""

    tokens: list[int]
    """Negative ones are stand-ins for tokens in the feed, by `feed_reference`."""
    start: int
    """Position of the first token."""
    table: BlockTable
    num_rows: int
    """Of how many tokens, counted from the last, the hidden state is wanted."""
    adapter: int = NO_ADAPTER
    """Number of the adapter that they go through."""


class Runner:
    """One model with its pages. The host waits for nothing here."""

    def __init__(self, model: LanguageModel, num_pages: int, *, dtype: torch.dtype, feed: Tensor) -> None:
        """Allocates `num_pages` pages of keys and values a layer, of `dtype`, on the device of the feed (Places)."""
        self.model = model
        self.feed = feed
        self.device = feed.device
        config = model.config
        shapes = [(num_pages, PAGE_SIZE, heads, config.head_dim) for heads in config.kv_heads]
        self.k_pages = [torch.zeros(shape, dtype=dtype, device=self.device) for shape in shapes]
        self.v_pages = [torch.zeros(shape, dtype=dtype, device=self.device) for shape in shapes]
        self.present = {
            layer: torch.zeros(num_pages * PAGE_SIZE + 1, dtype=torch.bool, device=self.device)
            for layer in config.routed_attention
        }
        """Which slots have a key at the layers whose attention only some tokens enter, as `PagedAttention` has it."""

    def hidden(self, pieces: list[Piece]) -> Tensor:
        """Computes the pieces and stores their keys and values. Returns `[R, D]`, piece after piece."""
        lengths = [len(piece.tokens) for piece in pieces]
        tokens, positions, batch = self._flatten(pieces, lengths)
        attention = PagedAttention(self.model.config, batch, self.k_pages, self.v_pages, present=self.present)
        hidden = self.model(tokens, positions, attention, adapters=self._adapters(pieces, lengths))
        rows = _wanted_rows(pieces, lengths)
        return hidden if rows is None else hidden[upload(rows, self.device)]

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, D] -> [R, V]`."""
        return self.model.logits(hidden)

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copies (source, destination) pages in all layers; every source is read before any destination is written."""
        if not copies:
            return
        sources, destinations = upload(np.array(copies, dtype=np.int64).T.copy(), self.device)
        present = [slots[:-1].view(-1, PAGE_SIZE) for slots in self.present.values()]
        for pages in (*self.k_pages, *self.v_pages, *present):
            pages[destinations] = pages[sources]

    def _adapters(self, pieces: list[Piece], lengths: list[int]) -> Tensor | None:
        """Each token's adapter, `[T]` int32; None when none has one, which spares the layers to look."""
        numbers = np.array([piece.adapter for piece in pieces], dtype=np.int32)
        return None if (numbers == NO_ADAPTER).all() else upload(np.repeat(numbers, lengths), self.device)

    def _flatten(self, pieces: list[Piece], lengths: list[int]) -> tuple[Tensor, Tensor, PagedBatch]:
        cu_seqlens = np.zeros(len(pieces) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        kv_lengths = np.array([piece.start for piece in pieces], dtype=np.int32) + np.array(lengths, dtype=np.int32)
        block_tables = np.zeros((len(pieces), pages_for(int(kv_lengths.max()))), dtype=np.int32)
        for row, piece in enumerate(pieces):
            num_pages = min(piece.table.num_pages, block_tables.shape[1])
            block_tables[row, :num_pages] = piece.table.ids[:num_pages]
        tokens = np.array([token for piece in pieces for token in piece.tokens], dtype=np.int64)
        owner = np.repeat(np.arange(len(pieces)), lengths)
        positions = np.arange(len(tokens)) + (kv_lengths - cu_seqlens[1:])[owner]
        slots = block_tables[owner, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
        known, positions_, slots_, tables, starts, lengths_ = (
            upload(array, self.device) for array in (tokens, positions, slots, block_tables, cu_seqlens, kv_lengths)
        )
        batch = PagedBatch.plan(
            self.model.config, slots_, block_tables=tables, cu_seqlens=starts, kv_lengths=lengths_, page_size=PAGE_SIZE
        )
        return resolve(known, self.feed) if (tokens < 0).any() else known, positions_, batch


def _wanted_rows(pieces: list[Piece], lengths: list[int]) -> np.ndarray | None:
    """Indices of the wanted rows in the flat batch; None when all of them are."""
    if all(piece.num_rows == length for piece, length in zip(pieces, lengths, strict=True)):
        return None
    ends = np.cumsum(lengths)
    ranges = [np.arange(end - piece.num_rows, end) for piece, end in zip(pieces, ends, strict=True)]
    return np.concatenate(ranges)
