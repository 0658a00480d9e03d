"""Where keys and values live: side by side in a packed batch, or in the pages of a cache.

The transformer calls `attention(layer, q, k, v, turn)` once a layer and never learns which of the two it was given, so
training, prefill, decode and verification run the same model code. Queries and keys come as they were projected: with
pages, one kernel then normalises and rotates them and writes the keys where they stay.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.flash_attention import flash_attention
from kernels.paged_attention import PagedPlan, paged_attention, plan_paged_attention
from kernels.rotary_write import HeadNorms, rotate_and_write, turn_heads
from model.config import ModelConfig


class Turn(NamedTuple):
    """What queries and keys go through before they meet; None where a layer leaves a step out."""

    norms: HeadNorms | None
    """The normalisation of each head."""
    rotary: tuple[Tensor, Tensor] | None
    """Cosine and sine of each token's angles, by `kernels.rotary.rotary_tables`."""


class AttentionOverBatch(Protocol):
    """Attention of one flat batch. `q [T, Hq, d]`, `k` and `v [T, Hkv, d]`, not yet turned -> `[T, Hq, d]`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn) -> Tensor: ...


class PackedAttention:
    """Causal attention inside each document of a packed batch; nothing outlives the call."""

    def __init__(self, config: ModelConfig, cu_seqlens: Tensor) -> None:
        """`cu_seqlens [B+1]` int32: where each document starts, and the number of tokens at the end."""
        self.windows = config.windows
        self.cu_seqlens = cu_seqlens

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn) -> Tensor:
        q, k = turn_heads(q, k, rotary=turn.rotary, norms=turn.norms)
        return flash_attention(q, k, v, self.cu_seqlens, window=self.windows[layer])


@dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of one engine step lie in the cache; complete when built.

    slots [T] int64: the slot that each token's key and value are written to (page * page_size + offset)
    block_tables [B, max_pages] int32: the pages of each sequence, in order; what lies past its length is not read
    cu_seqlens [B+1] int32: where each sequence's new tokens start in the flat batch
    kv_lengths [B] int32: tokens of each sequence in the cache once this step has written its own
    """

    slots: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lengths: Tensor


class PagedAttention:
    """Writes the new keys and values into pages and attends over each sequence's whole past."""

    def __init__(
        self,
        config: ModelConfig,
        batch: PagedBatch,
        k_pages: list[Tensor],
        v_pages: list[Tensor],
        *,
        k_scales: list[Tensor] | None = None,
        v_scales: list[Tensor] | None = None,
    ) -> None:
        """`k_pages[layer]`, `v_pages[layer]`: `[P, page_size, Hkv, d]`; in 8 bits with scales `[P, page_size, Hkv]`."""
        self.windows = config.windows
        self.batch = batch
        self.k_pages, self.v_pages = k_pages, v_pages
        self.k_scales, self.v_scales = k_scales, v_scales
        # What depends on lengths and tables alone is worked out once a step, not once a layer.
        self.plans: dict[int | None, PagedPlan] = {
            window: plan_paged_attention(
                batch.block_tables, batch.cu_seqlens, batch.kv_lengths, k_pages[0].shape[1], window=window
            )
            for window in set(config.windows)
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn) -> Tensor:
        k_pages, v_pages, batch = self.k_pages[layer], self.v_pages[layer], self.batch
        k_scales = None if self.k_scales is None else self.k_scales[layer]
        v_scales = None if self.v_scales is None else self.v_scales[layer]
        scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
        q = rotate_and_write(
            q, k, v, k_pages, v_pages, batch.slots, rotary=turn.rotary, norms=turn.norms, scales=scales
        )
        window = self.windows[layer]
        return paged_attention(
            q,
            k_pages,
            v_pages,
            batch.block_tables,
            batch.cu_seqlens,
            batch.kv_lengths,
            window=window,
            plan=self.plans[window],
            k_scales=k_scales,
            v_scales=v_scales,
        )
