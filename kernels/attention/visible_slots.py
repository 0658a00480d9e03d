"""The slots of each sequence that hold a key at one layer, in order: block tables for pages of one slot.

Where a router lets only some tokens into a layer's attention (mixture of depths), every token keeps its slot in the
pages, the same in all layers, and a bool a slot and layer remembers whether the layer has a key there. Attention
over what is left is ordinary paged attention: the pages seen as pages of one slot, tables of the slots that count, and
their numbers as lengths. So the work is in proportion to the keys that exist, and no kernel needs a mask. A sequence
without a query, as in decoding one whose new token skips the layer, is left out.

Legend: B sequences, P pages, M = most pages of a sequence · page size.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.triton_support import runs_triton

_BLOCK = 1024


def visible_slots_reference(
    present: list[bool], block_tables: list[list[int]], kv_lengths: list[int], page_size: int, num_queries: list[int]
) -> list[list[int]]:
    """`visible_slots` in its plainest form, without padding."""
    found = []
    for table, length, queries in zip(block_tables, kv_lengths, num_queries, strict=True):
        positions = range(length if queries else 0)
        slots = [table[position // page_size] * page_size + position % page_size for position in positions]
        found.append([slot for slot in slots if present[slot]])
    return found


@triton.jit(do_not_specialize=["most_slots", "stride_table"])
def _visible_slots_kernel(
    p_present, p_tables, p_lengths, p_cu_seqlens, p_slots, p_counts, most_slots, stride_table,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    is_asked = tl.load(p_cu_seqlens + sequence) < tl.load(p_cu_seqlens + sequence + 1)
    length = tl.where(is_asked, tl.load(p_lengths + sequence), 0)
    count = 0
    for first in range(0, length, BLOCK):
        position = first + tl.arange(0, BLOCK)
        m_position = position < length
        page = tl.load(p_tables + sequence * stride_table + position // PAGE, mask=m_position, other=0)
        b_slot = page * PAGE + position % PAGE
        b_present = tl.load(p_present + b_slot.to(tl.int64), mask=m_position, other=0).to(tl.int32)
        index = count + tl.cumsum(b_present, axis=0) - 1
        tl.store(p_slots + sequence * most_slots + index, b_slot, mask=b_present > 0)
        count += tl.sum(b_present, axis=0)
    tl.store(p_counts + sequence, count)


class SlotPlan(NamedTuple):
    """What the same sequences share in every layer."""

    block_tables: Tensor
    kv_lengths: Tensor
    page_size: int
    slots: np.ndarray | None
    """On the CPU the slot of each position, [B, M] int32."""
    held: np.ndarray | None
    """And whether the sequence has that position, [B, M] bool."""


def plan_visible_slots(block_tables: Tensor, kv_lengths: Tensor, page_size: int) -> SlotPlan:
    """Prepare the `visible_slots` calls of a step.

    block_tables [B, max_pages] int32 and kv_lengths [B] int32 as in `paged_attention`. Raises ValueError for others.
    """
    if block_tables.dtype != torch.int32 or kv_lengths.dtype != torch.int32:
        raise ValueError(f"tables and lengths must be int32, not {block_tables.dtype} and {kv_lengths.dtype}")
    if runs_triton(block_tables):
        return SlotPlan(block_tables, kv_lengths, page_size, None, None)
    position = np.arange(block_tables.shape[1] * page_size, dtype=np.int32)
    slots = block_tables.numpy()[:, :, None] * np.int32(page_size) + position[:page_size]
    held = position < kv_lengths.numpy()[:, None]
    return SlotPlan(block_tables, kv_lengths, page_size, slots.reshape(held.shape), held)


def visible_slots(present: Tensor, plan: SlotPlan, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (slots [B, ≤ M] int32, how many of each row count [B] int32); what follows them in a row means nothing.

    present [≥ P · page_size] bool; cu_seqlens [B+1] int32: where each sequence's queries start. Of a sequence without
    any, no slot counts.
    """
    if plan.slots is not None and plan.held is not None:
        return _compact(present.numpy(), plan.slots, plan.held, np.flatnonzero(np.diff(cu_seqlens.numpy())))
    sequences, most_slots = len(plan.block_tables), plan.block_tables.shape[1] * plan.page_size
    slots = torch.zeros(sequences, most_slots, dtype=torch.int32, device=present.device)
    counts = torch.empty(sequences, dtype=torch.int32, device=present.device)
    if sequences:
        _visible_slots_kernel[(sequences,)](
            present.view(torch.uint8), plan.block_tables, plan.kv_lengths, cu_seqlens, slots, counts, most_slots,
            plan.block_tables.stride(0), PAGE=plan.page_size, BLOCK=_BLOCK,
        )  # fmt: skip
    return slots, counts


def _compact(present: np.ndarray, slots: np.ndarray, held: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Those of the sequences `rows`; in NumPy, whose calls cost a fraction of torch's on arrays this small."""
    visible = present.take(slots[rows]) & held[rows]
    counts = np.zeros(len(slots), dtype=np.int32)
    counts[rows] = np.count_nonzero(visible, axis=1)
    tables = np.zeros((len(slots), counts.max(initial=0)), dtype=np.int32)
    for row, is_visible in zip(rows, visible, strict=True):
        tables[row, : counts[row]] = slots[row][is_visible]
    return torch.from_numpy(tables), torch.from_numpy(counts)
