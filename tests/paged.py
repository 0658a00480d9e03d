"""Sequences whose keys and values lie in pages, for the tests of paged attention.

Whatever attention must not use is poisoned: slots of no sequence hold NaN (in 8 bits, the largest number with a scale
of NaN), and table entries past a sequence's pages point outside of the pool.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.attention._kv_quantization import quantize_rows_reference
from kernels.attention._paged_plan import Tiles
from kernels.attention.paged import PagedPlan, paged_attention, paged_attention_reference, plan_paged_attention


@dataclass
class PagedCase:
    """One call of `paged_attention` without its window, scale and plan."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    cu_seqlens: Tensor
    kv_lengths: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    visible_slots: Tensor | None = None
    tree_mask: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.q, self.k_pages, self.v_pages, self.block_tables, self.cu_seqlens, self.kv_lengths

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("k_scales", "v_scales", "visible_slots", "tree_mask")}

    def plan(
        self, *, window: int | None = None, tiles: Tiles | None = None, batch_invariant: bool = False
    ) -> PagedPlan:
        return plan_paged_attention(
            *self.operands[3:], self.k_pages.shape[1], window, batch_invariant=batch_invariant, tiles=tiles
        )

    def attend(
        self,
        *,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        **planning: Any,
    ) -> Tensor:
        plan, scores = self.plan(window=window, **planning), {"scale": scale, "soft_cap": soft_cap}
        return paged_attention(*self.operands, window=window, plan=plan, **scores, **self.options)

    def expected(
        self, *, window: int | None = None, scale: float | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """The reference in fp64."""
        q, *others = self.operands
        scores = {"scale": scale, "soft_cap": soft_cap}
        return paged_attention_reference(q.double(), *others, window=window, **scores, **self.options)

    def sequence(self, number: int, first: int = 0, stop: int | None = None) -> "PagedCase":
        """One sequence alone, with its queries first ≤ i < stop and the keys up to the last of them."""
        start, end = self.cu_seqlens[number : number + 2].tolist()
        stop = end - start if stop is None else stop
        rows = slice(start + first, start + stop)
        return replace(
            self,
            q=self.q[rows],
            block_tables=self.block_tables[number : number + 1],
            cu_seqlens=self.cu_seqlens.new_tensor([0, stop - first]),
            kv_lengths=self.kv_lengths[number : number + 1] - (end - start - stop),
        )


def make_case(
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    page: int = 16,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    stored: torch.dtype | None = None,
    order: Tensor | None = None,
) -> PagedCase:
    """Make (queries, keys) for each of `sequences`, the same for each order of physical pages.

    `heads`: query heads and key/value heads; `stored`: dtype of the pages; `order`: which physical page serves as the
    i-th, random by default.
    """
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    rows = [torch.randn(2, length, num_kv_heads, head_dim).to(dtype) for _, length in sequences]
    q = torch.randn(sum(queries for queries, _ in sequences), num_heads, head_dim).to(dtype)
    num_pages = sum(-(-length // page) for _, length in sequences) + 3
    order = torch.randperm(num_pages) if order is None else order
    stored = stored or dtype
    pages, scales = (torch.empty(2, num_pages, page, num_kv_heads, *size) for size in ((head_dim,), ()))
    pages, scales = _poisoned(pages, stored), scales.fill_(torch.nan)
    block_tables = torch.full((len(sequences), max(length for _, length in sequences) // page + 1), 10**6)
    taken = 0
    for number, (_, length) in enumerate(sequences):
        count = -(-length // page)
        table = order[taken : taken + count]
        taken += count
        block_tables[number, :count] = table
        slots = (table[:, None] * page + torch.arange(page)).flatten()[:length]
        for which in range(2):
            _store(rows[number][which], pages[which].flatten(0, 1), scales[which].flatten(0, 1), slots)
    queries, lengths = torch.tensor(sequences).T
    case = PagedCase(
        q=q,
        k_pages=pages[0],
        v_pages=pages[1],
        block_tables=block_tables.int(),
        cu_seqlens=torch.cat((torch.zeros(1), queries.cumsum(0))).int(),
        kv_lengths=lengths.int(),
        k_scales=None if stored == dtype else scales[0],
        v_scales=None if stored == dtype else scales[1],
    )
    return to_device(case, device)


def to_device(case: PagedCase, device: torch.device) -> PagedCase:
    return PagedCase(**{name: None if x is None else x.to(device) for name, x in vars(case).items()})


def _poisoned(pages: Tensor, stored: torch.dtype) -> Tensor:
    if stored == torch.int8:
        return pages.fill_(127).to(stored)
    return pages.fill_(torch.nan).to(stored)


def _store(rows: Tensor, page_rows: Tensor, scale_rows: Tensor, slots: Tensor) -> None:
    if page_rows.dtype == rows.dtype:
        page_rows[slots] = rows
        return
    values, scales = quantize_rows_reference(rows, page_rows.dtype)
    page_rows.view(torch.uint8)[slots] = values.view(torch.uint8)
    scale_rows[slots] = scales


def hide_slots(case: PagedCase, share: float = 0.4) -> PagedCase:
    """The case with some slots hidden, and what they held poisoned."""
    visible = (torch.rand(case.k_pages.shape[:2]) > share).to(case.k_pages.device)
    pages = [x.masked_fill(~visible[:, :, None, None], torch.nan) for x in (case.k_pages, case.v_pages)]
    return replace(case, k_pages=pages[0], v_pages=pages[1], visible_slots=visible)


def grow_trees(case: PagedCase) -> PagedCase:
    """The case with the new tokens of each sequence in a random tree: each sees itself and its ancestors."""
    bounds = case.cu_seqlens.tolist()
    longest = max(stop - start for start, stop in pairwise(bounds))
    mask = torch.zeros(case.q.shape[0], longest + 3, dtype=torch.bool)
    for start, stop in pairwise(bounds):
        for i in range(stop - start):
            parent = int(torch.randint(-1, i, ())) if i else -1
            if parent >= 0:
                mask[start + i] = mask[start + parent]
            mask[start + i, i] = True
    return replace(case, tree_mask=mask.to(case.q.device))


def attend_one_by_one(case: PagedCase, window: int | None = None) -> Tensor:
    """Attention spelled out: for each query and head the list of keys it sees, in fp64. Shares no code with ours."""
    num_heads, head_dim = case.q.shape[1:]
    page, group = case.k_pages.shape[1], num_heads // case.k_pages.shape[2]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    bounds = case.cu_seqlens.tolist()
    for b, length in enumerate(case.kv_lengths.tolist()):
        queries = bounds[b + 1] - bounds[b]
        slots = [(int(case.block_tables[b, t // page]), t % page) for t in range(length)]
        for i in range(queries):
            t, own = bounds[b] + i, length - queries + i
            seen = [j for j in range(own + 1) if window is None or own - j < window]
            if case.tree_mask is not None:
                first_new = length - queries
                seen = [j for j in seen if j < first_new or case.tree_mask[t, j - first_new]]
            if case.visible_slots is not None:
                seen = [j for j in seen if case.visible_slots[slots[j]]]
            for head in range(num_heads if seen else 0):
                scores = [case.q[t, head].double() @ _row(case, "k", slots[j], head // group) for j in seen]
                weights = torch.softmax(torch.stack(scores) / math.sqrt(head_dim), dim=0)
                for weight, j in zip(weights, seen, strict=True):
                    out[t, head] += weight * _row(case, "v", slots[j], head // group)
    return out


def _row(case: PagedCase, which: str, slot: tuple[int, int], head: int) -> Tensor:
    row = getattr(case, f"{which}_pages")[slot][head].double()
    scales = getattr(case, f"{which}_scales")
    return row if scales is None else row * scales[slot][head].double()
