"""Where keys and values live: side by side in a packed batch, or in the pages of a cache.

The transformer calls `attention(layer, q, k, v, norm_rope)` once a layer and never learns which of the two it was
given, so training, prefill, decode and verification run the same model code. Queries and keys come as they were
projected: with pages, one kernel then normalises and rotates them and writes the keys where they stay.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.flash import flash_attention
from kernels.attention.paged import PagedPlan, plan_paged_attention, renew_plan
from kernels.attention.rotary_write import qk_norm_rope
from kernels.attention.visible_slots import SlotPlan, list_visible_slots, plan_visible_slots
from model.config import ModelConfig
from model.kv_format import KVFormat, KVPages, NormRope

_DOCUMENT_PAGE = 16
AttentionOf: TypeAlias = "Callable[[ModelConfig, Tensor], AttentionOverBatch]"
"""From a configuration and cu_seqlens `[B+1]` to attention inside the documents; `PackedAttention` is one."""


class AttentionOverBatch(Protocol):
    """Attention of one flat batch. `q [T, Hq, d]`, `k` and `v [T, Hkv, d]`, as they were projected -> `[T, Hq, d]`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor: ...

    def routed(self, layer: int, selected: Tensor, index: Tensor) -> "AttentionOverBatch":
        """The same at a layer that only some tokens enter: the others have neither query nor key there.

        selected `[T]` bool; index `[C]` int64: their places, in order, as `kernels.token_routing.select_tokens` gives
        them. What is returned attends over these C rows, for this layer only. A window counts the tokens that entered.
        """
        ...


class PackedAttention:
    """Causal attention inside each document of a packed batch; nothing outlives the call."""

    def __init__(self, config: ModelConfig, cu_seqlens: Tensor) -> None:
        """`cu_seqlens [B+1]` int32: where each document starts, and the number of tokens at the end."""
        self.windows, self.cu_seqlens = config.windows, cu_seqlens
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor:
        q, k = qk_norm_rope(q, k, rotary=norm_rope.rotary, norms=norm_rope.norms)
        window = self.windows[layer]
        return flash_attention(q, k, v, self.cu_seqlens, window=window, scale=self.scale, soft_cap=self.soft_cap)

    def routed(self, layer: int, selected: Tensor, index: Tensor) -> "PackedAttention":
        attention = copy.copy(self)
        attention.cu_seqlens = _count_before(selected)[self.cu_seqlens.long()].int()
        return attention


@dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of one engine step lie in the cache, and how attention goes about them; complete when built.

    slots [T] int64: the slot that each token's key and value are written to (page * page_size + offset)
    block_tables [B, max_pages] int32: the pages of each sequence, in order; what lies past its length is not read
    cu_seqlens [B+1] int32: where each sequence's new tokens start in the flat batch
    kv_lengths [B] int32: tokens of each sequence in the cache once this step has written its own
    """

    slots: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lengths: Tensor
    plans: Mapping[int | None, PagedPlan]
    """By window: what follows from lengths and tables alone, once for all layers that every token enters."""
    slot_plan: SlotPlan | None
    """The same for the layers that only some enter; None where there are none."""

    @classmethod
    def plan(
        cls,
        config: ModelConfig,
        slots: Tensor,
        *,
        block_tables: Tensor,
        cu_seqlens: Tensor,
        kv_lengths: Tensor,
        page_size: int,
        listing: Tensor | None = None,
        num_busy: int | None = None,
    ) -> "PagedBatch":
        """A step of a model of this configuration.

        listing [2, B] int32, where its attention is routed: `rows` and `first` of `plan_visible_slots`.
        `num_busy`: as `plan_paged_attention` takes it, for layers that every token enters.
        """
        routed = config.routed_attention
        windows = {window for layer, window in enumerate(config.windows) if layer not in routed}
        plans = {
            window: plan_paged_attention(
                block_tables, cu_seqlens, kv_lengths, page_size, window=window, num_busy=num_busy
            )
            for window in windows
        }
        slot_plan = None
        if routed:
            if listing is None:
                raise ValueError("where attention is routed, a batch says whose lists of slots are whose")
            lengths = {"block_tables": block_tables, "cu_seqlens": cu_seqlens, "kv_lengths": kv_lengths}
            slot_plan = plan_visible_slots(slots, **lengths, rows=listing[0], first=listing[1], page_size=page_size)
        return cls(slots, block_tables, cu_seqlens, kv_lengths, plans, slot_plan)

    def renew(self, block_tables: Tensor, cu_seqlens: Tensor, kv_lengths: Tensor) -> None:
        """On the CPU, lets what was captured with this batch see other tables and lengths; slots are written in place.

        Nobody may have more new tokens than `MOST_QUERIES_TO_GROUP`.
        """
        for plan in self.plans.values():
            renew_plan(plan, block_tables, cu_seqlens, kv_lengths)


class PagedAttention:
    """Writes the new keys and values into pages and attends over each sequence's whole past."""

    def __init__(self, config: ModelConfig, batch: PagedBatch, pages: KVPages) -> None:
        self.windows, self.batch = config.windows, batch
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.pages = pages

    @classmethod
    def over_documents(cls, config: ModelConfig, cu_seqlens: Tensor, kv_format: KVFormat) -> "PagedAttention":
        """What `PackedAttention` computes, from a new cache in this format: for measuring what the format costs."""
        lengths = cu_seqlens.diff()
        pages = (lengths + _DOCUMENT_PAGE - 1) // _DOCUMENT_PAGE
        first = pages.cumsum(0) - pages
        places = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
        slots = places + (first * _DOCUMENT_PAGE - cu_seqlens[:-1]).repeat_interleave(lengths)
        batch = PagedBatch.plan(
            config,
            slots,
            block_tables=(first[:, None] + torch.arange(int(pages.max()), device=first.device)).int(),
            cu_seqlens=cu_seqlens,
            kv_lengths=lengths,
            page_size=_DOCUMENT_PAGE,
            listing=torch.stack((torch.arange(len(pages), device=first.device), torch.zeros_like(first))).int(),
        )
        rows, most = len(lengths), int(lengths.max())
        cache = kv_format.allocate(
            config, int(pages.sum()), _DOCUMENT_PAGE, cu_seqlens.device, num_rows=rows, most_tokens=most
        )
        return cls(config, batch, cache)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm_rope: NormRope) -> Tensor:
        pages, batch, window = self.pages.layers[layer], self.batch, self.windows[layer]
        q = pages.write(q, k, v, batch.slots, norm_rope)
        tables, plan = (batch.block_tables, batch.cu_seqlens, batch.kv_lengths), batch.plans[window]
        return pages.attend(q, *tables, window=window, scale=self.scale, soft_cap=self.soft_cap, plan=plan)

    def routed(self, layer: int, selected: Tensor, index: Tensor) -> "PagedAttention":
        """Notes who has a key at this layer. What is returned sees the pages as pages of one slot."""
        batch, window, slot_plan = self.batch, self.windows[layer], self.batch.slot_plan
        if slot_plan is None:
            raise ValueError(f"attention at layer {layer} is not routed")
        attention, visible, before = copy.copy(self), self.pages.visible[layer], _count_before(selected)
        kv_lengths = list_visible_slots(visible, before, slot_plan)
        if not len(index):  # nobody will ask
            return attention
        tables, cu_seqlens, rows = visible.lists, before[batch.cu_seqlens.long()].int(), slot_plan.rows
        attention.batch = PagedBatch(
            slots=F.pad(batch.slots, (0, 1), value=-1)[index],  # of empty places: none
            block_tables=tables,
            cu_seqlens=cu_seqlens,
            kv_lengths=kv_lengths,
            plans={window: plan_paged_attention(tables, cu_seqlens, kv_lengths, 1, window=window, table_rows=rows)},
            slot_plan=None,
        )
        attention.pages = replace(self.pages, layers={layer: self.pages.layers[layer].as_single_slots()})
        return attention


def _count_before(selected: Tensor) -> Tensor:
    """How many tokens before each one are selected, and how many of all, `[T+1]` int64."""
    return F.pad(selected.cumsum(0), (1, 0))
