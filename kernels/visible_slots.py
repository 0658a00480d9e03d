"""The slots of each sequence that hold a key at one layer, in order: block tables for pages of one slot.

Where a router lets only some tokens into a layer's attention (mixture of depths), every token keeps its slot in the
pages, the same in all layers, and a bool a slot and layer remembers whether the layer has a key there. Attention
over what is left is ordinary paged attention: the pages seen as pages of one slot, tables of the slots that count, and
their numbers as lengths. So the work is in proportion to the keys that exist, and no kernel needs a mask.

Legend: B sequences, P pages, M = most pages of a sequence · page size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._triton import runs_triton

_BLOCK = 1024


def visible_slots_reference(
    present: list[bool], block_tables: list[list[int]], kv_lengths: list[int], page_size: int
) -> list[list[int]]:
    """`visible_slots` in its plainest form, without padding."""
    found = []
    for table, length in zip(block_tables, kv_lengths, strict=True):
        slots = [table[position // page_size] * page_size + position % page_size for position in range(length)]
        found.append([slot for slot in slots if present[slot]])
    return found


@triton.jit(do_not_specialize=["most_slots", "stride_table"])
def _visible_slots_kernel(
    p_present, p_tables, p_lengths, p_slots, p_counts, most_slots, stride_table,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(p_lengths + sequence)
    count = 0
    for first in range(0, length, BLOCK):
        position = first + tl.arange(0, BLOCK)
        m_position = position < length
        page = tl.load(p_tables + sequence * stride_table + position // PAGE, mask=m_position, other=0)
        b_slot = page * PAGE + position % PAGE
        b_present = tl.load(p_present + b_slot.to(tl.int64), mask=m_position, other=0).to(tl.int32)
        place = count + tl.cumsum(b_present, axis=0) - 1
        tl.store(p_slots + sequence * most_slots + place, b_slot, mask=b_present > 0)
        count += tl.sum(b_present, axis=0)
    tl.store(p_counts + sequence, count)


class SlotPlan(NamedTuple):
    """What the same sequences share in every layer."""

    block_tables: Tensor
    kv_lengths: Tensor
    page_size: int
    slots: Tensor | None
    """On the CPU the slot of each position, [B, M] int32."""
    held: Tensor | None
    """And whether the sequence has that position, [B, M] bool."""


def plan_visible_slots(block_tables: Tensor, kv_lengths: Tensor, page_size: int) -> SlotPlan:
    """Prepare the `visible_slots` calls of a step.

    block_tables [B, max_pages] int32 and kv_lengths [B] int32 as in `paged_attention`. Raises ValueError for others.
    """
    if block_tables.dtype != torch.int32 or kv_lengths.dtype != torch.int32:
        raise ValueError(f"tables and lengths must be int32, not {block_tables.dtype} and {kv_lengths.dtype}")
    if runs_triton(block_tables):
        return SlotPlan(block_tables, kv_lengths, page_size, None, None)
    position = torch.arange(block_tables.shape[1] * page_size, device=block_tables.device, dtype=torch.int32)
    slots = (block_tables[:, :, None] * page_size + position[:page_size]).flatten(1)
    return SlotPlan(block_tables, kv_lengths, page_size, slots, position < kv_lengths[:, None])


def visible_slots(present: Tensor, plan: SlotPlan) -> tuple[Tensor, Tensor]:
    """Return (slots [B, ≤ M] int32, how many of each row count [B] int32); what follows them in a row means nothing.

    present [≥ P · page_size] bool.
    """
    if plan.slots is not None and plan.held is not None:
        return _compact(present, plan.slots, plan.held)
    sequences, most_slots = len(plan.block_tables), plan.block_tables.shape[1] * plan.page_size
    slots = torch.zeros(sequences, most_slots, dtype=torch.int32, device=present.device)
    counts = torch.empty(sequences, dtype=torch.int32, device=present.device)
    if sequences:
        _visible_slots_kernel[(sequences,)](
            present.view(torch.uint8), plan.block_tables, plan.kv_lengths, slots, counts, most_slots,
            plan.block_tables.stride(0), PAGE=plan.page_size, BLOCK=_BLOCK,
        )  # fmt: skip
    return slots, counts


def _compact(present: Tensor, slots: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    visible = present.index_select(0, slots.view(-1)).view(slots.shape).logical_and_(held)
    counts = visible.sum(1, dtype=torch.int32)
    width = int(counts.max()) if len(counts) else 0
    tables = torch.zeros(len(slots), width, dtype=torch.int32, device=slots.device)
    used = torch.arange(width, device=slots.device, dtype=torch.int32) < counts[:, None]
    return tables.masked_scatter_(used, slots.masked_select(visible)), counts
