"""The slots of each sequence that hold a key at one layer, listed in order: block tables for pages of one slot.

Where a router lets only some tokens into a layer's attention (mixture of depths), every token keeps its slot in the
pages, the same in all layers. Attention over what is left is ordinary paged attention: the pages seen as pages of one
slot, lists of the slots that count as tables, and their numbers as lengths. So the work is in proportion to the keys
that exist, and no kernel needs a mask.

    count[slot] = n where the slot's token has a key, −n where it has none: n tokens have one, from the sequence's
                  first to this one
    list[row, n − 1] = slot    of the token that is the n-th to have one

A count says nothing of who reads it, so it lives in the pages: sequences that share a page agree on it, a copy of the
page takes it along, and a sequence that is rolled back goes on from the count of the last token that stays. What its
list holds beyond is not read. A list belongs to a batch row and stays from step to step, so that a step lists the
tokens that it computes; where pages have come to a row whose contents somebody else has computed, they are listed from
their counts, once, all positions at the same time.

Legend: T tokens, B sequences, P pages, S batch rows, M most tokens of a sequence.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.common.triton_support import runs_triton

_BLOCK = 1024
_PROGRAMS = 8
"""For each sequence. Listing a prompt of others keeps them all at work, decoding one."""


class VisibleSlots(NamedTuple):
    """Of one layer."""

    counts: Tensor
    """[P · page size + 1] int32; the last is nobody's."""
    lists: Tensor
    """[S, M] int32."""

    @classmethod
    def empty(cls, num_slots: int, num_rows: int, most_tokens: int, device: torch.device) -> "VisibleSlots":
        counts = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        return cls(counts, torch.zeros(num_rows, most_tokens, dtype=torch.int32, device=device))


def list_visible_slots_reference(
    counts: list[int],
    lists: list[list[int]],
    selected: list[bool],
    positions: list[list[int]],
    num_new: list[int],
    rows: list[int],
) -> list[int]:
    """`list_visible_slots` in its plainest form: everybody's list is made anew.

    positions: the slot of each position of each sequence, −1 of tokens that are written nowhere.
    """
    found, token = [], 0
    for slots, new, row in zip(positions, num_new, rows, strict=True):
        count, start = 0, len(slots) - new
        for position, slot in enumerate(slots):
            has_key = counts[slot] > 0
            if position >= start:
                has_key, token = selected[token], token + 1
            count += has_key
            if slot < 0:
                continue
            counts[slot] = count if has_key else -count
            if has_key:
                lists[row][count - 1] = slot
        found.append(count)
    return found


@triton.jit(do_not_specialize=["most_tokens", "stride_table"], do_not_specialize_on_alignment=["p_rows", "p_first"])
def _list_slots_kernel(
    p_counts, p_lists, p_before, p_slots, p_tables, p_cu_seqlens, p_lengths, p_rows, p_first, p_found, most_tokens,
    stride_table, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every so many blocks of a sequence's positions. Grid: (B, any)."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_token, length = tl.load(p_cu_seqlens + sequence), tl.load(p_lengths + sequence)
    stop_token = tl.load(p_cu_seqlens + sequence + 1)
    start = length - (stop_token - first_token)
    p_table = p_tables + sequence * stride_table
    has_past, last = start > 0, tl.maximum(start - 1, 0)
    last_slot = tl.load(p_table + last // PAGE).to(tl.int64) * PAGE + last % PAGE
    past = tl.abs(tl.load(p_counts + last_slot, mask=has_past, other=0))
    before = tl.load(p_before + first_token)
    p_list = p_lists + tl.load(p_rows + sequence).to(tl.int64) * most_tokens - 1
    for block in range(tl.load(p_first + sequence) + part * BLOCK, length, tl.num_programs(1) * BLOCK):
        b_position = block + tl.arange(0, BLOCK)
        m_past, m_new = b_position < start, (b_position >= start) & (b_position < length)
        b_page = tl.load(p_table + b_position // PAGE, mask=m_past, other=0).to(tl.int64)
        b_slot = b_page * PAGE + b_position % PAGE
        b_token = first_token + b_position - start
        b_through = tl.load(p_before + b_token + 1, mask=m_new, other=0)
        has_key = b_through > tl.load(p_before + b_token, mask=m_new, other=0)
        b_count = past + (b_through - before).to(tl.int32)
        b_slot = tl.where(m_new, tl.load(p_slots + b_token, mask=m_new, other=-1), b_slot)
        b_new, m_new = tl.where(has_key, b_count, -b_count), m_new & (b_slot >= 0)
        tl.store(p_counts + b_slot, b_new, mask=m_new)
        b_count = tl.where(m_new, b_new, tl.load(p_counts + b_slot, mask=m_past, other=0))
        tl.store(p_list + b_count, b_slot.to(tl.int32), mask=(m_past | m_new) & (b_count > 0))
    if part == 0:
        new = (tl.load(p_before + stop_token) - before).to(tl.int32)
        tl.store(p_found + sequence, tl.where(length > 0, past + new, 0))


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """What the same tokens share in every layer; as in `plan_visible_slots`."""

    slots: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lengths: Tensor
    rows: Tensor
    first: Tensor
    page_size: int

    @cached_property
    def positions(self) -> "_Positions":
        return _Positions.of(self)


def plan_visible_slots(
    slots: Tensor,
    *,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    kv_lengths: Tensor,
    rows: Tensor,
    first: Tensor,
    page_size: int,
) -> SlotPlan:
    """Prepare the `list_visible_slots` calls of a step.

    slots [T] int64, −1 of tokens that are written nowhere, the last of their sequence; block_tables [B, max_pages],
    cu_seqlens [B+1] and kv_lengths [B] as in `paged_attention`; rows [B]: whose list is whose; first [B]: the first
    position that may not be in it, at most that of the sequence's first token here; int32. No two sequences may have a
    row, nor may one go on from what another computes here. Raises ValueError for other dtypes.
    """
    for tensor in (block_tables, cu_seqlens, kv_lengths, rows, first):
        if tensor.dtype != torch.int32:
            raise ValueError(f"tables, lengths, rows and positions must be int32, not {tensor.dtype}")
    return SlotPlan(slots, block_tables, cu_seqlens, kv_lengths, rows, first, page_size)


def list_visible_slots(of_layer: VisibleSlots, before: Tensor, plan: SlotPlan) -> Tensor:
    """Note which of the step's tokens have a key, and bring the lists up to date. Returns how many each counts.

    before [T+1] int64: how many tokens of the batch before each one have a key. Returns [B] int32: of the list of each
    sequence's row so many lead. Tokens that are written nowhere count, like others behind all that are.
    """
    if not runs_triton(before):
        return _list_on_cpu(of_layer, before.numpy(), plan.positions)
    counts, lists = of_layer
    found = torch.empty_like(plan.kv_lengths)
    if len(found):
        _list_slots_kernel[(len(found), _PROGRAMS)](
            counts, lists, before, plan.slots, plan.block_tables, plan.cu_seqlens, plan.kv_lengths, plan.rows,
            plan.first, found, lists.stride(0), plan.block_tables.stride(0), PAGE=plan.page_size, BLOCK=_BLOCK,
        )  # fmt: skip
    return found


class _Positions(NamedTuple):
    """For the CPU, in NumPy: N positions to list, of all sequences, those computed before and those computed now.

    NumPy's calls cost a fraction of torch's on arrays this small.
    """

    starts: np.ndarray
    """[B]: the first token of each sequence."""
    stops: np.ndarray
    has_keys: np.ndarray
    """[B] bool: whether it is more than padding."""
    last: np.ndarray
    """[B]: the slot before each sequence's first token, −1 where there is none."""
    past: np.ndarray
    """Slots [N₁] of tokens that others have computed."""
    past_rows: np.ndarray
    written: np.ndarray
    """Tokens [N₂] that have a slot."""
    owners: np.ndarray
    """Their sequences."""
    slots: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, plan: SlotPlan) -> "_Positions":
        cu_seqlens, lengths, first = plan.cu_seqlens.numpy(), plan.kv_lengths.numpy(), plan.first.numpy()
        starts = lengths - np.diff(cu_seqlens)
        number = np.maximum(starts - first, 0)
        past_owners = np.repeat(np.arange(len(starts)), number)
        positions = np.arange(len(past_owners)) + (first + number - np.cumsum(number))[past_owners]
        slots, rows = plan.slots.numpy(), plan.rows.numpy()
        owners = np.repeat(np.arange(len(starts)), np.diff(cu_seqlens))
        written = np.flatnonzero(slots >= 0)
        last = np.maximum(starts - 1, 0)
        return cls(
            starts=cu_seqlens[:-1],
            stops=cu_seqlens[1:],
            has_keys=lengths > 0,
            last=np.where(starts > 0, _slots_at(plan, np.arange(len(starts)), last), -1),
            past=_slots_at(plan, past_owners, positions),
            past_rows=rows[past_owners],
            written=written,
            owners=owners[written],
            slots=slots[written],
            rows=rows[owners[written]],
        )


def _slots_at(plan: SlotPlan, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
    pages = plan.block_tables.numpy()[sequences, positions // plan.page_size].astype(np.int64)
    return pages * plan.page_size + positions % plan.page_size


def _list_on_cpu(of_layer: VisibleSlots, before: np.ndarray, at: _Positions) -> Tensor:
    counts, lists = (part.numpy() for part in of_layer)
    past = np.where(at.last >= 0, np.abs(counts[at.last]), 0)
    through = before[at.written + 1]
    own = past[at.owners] + through - before[at.starts][at.owners]
    counts[at.slots] = np.where(through > before[at.written], own, -own)
    for slots, rows in ((at.past, at.past_rows), (at.slots, at.rows)):
        has_key = counts[slots] > 0
        lists[rows[has_key], counts[slots[has_key]] - 1] = slots[has_key]
    found = past + before[at.stops] - before[at.starts]
    return torch.from_numpy(np.where(at.has_keys, found, 0).astype(np.int32))
