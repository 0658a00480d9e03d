"""Paged attention in PyTorch, for the CPU: kernels/attention/paged.py says what it computes.

Decoding and verifying sequences go to `_decode_cpu`, prompts to `_prefill_cpu`, where these take them. Other sequences
are grouped by similar length. One gather per group lines up their keys, and one call of torch's attention serves the
group: the G query heads of a key/value head go in as G rows, so that keys are read once instead of G times. A sequence
whose pages lie side by side is used in place when it is alone in its group. 8-bit keys and values are decoded as they
are gathered.

Legend: T queries of all sequences, B sequences, Hq query heads, Hkv key/value heads, G query heads per key/value head,
d head dim, P pages in the pool; in a group g sequences of n queries and at most m keys.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.attention._cached_rows import CachedRows, take
from kernels.attention._decode_cpu import DecodePlan, attend_decode, plans
from kernels.attention._decode_cpu import takes as decodes
from kernels.attention._flash_cpu import attend_causally, attend_masked
from kernels.attention._prefill_cpu import PrefillPlan, attend_prefill
from kernels.attention._prefill_cpu import takes as prefills
from kernels.common.cpu_graph import refuse_capture

# Sequences with more queries than this (prompts) are attended one by one.
MOST_QUERIES_TO_GROUP = 16
# The gathered keys of a group should stay in the cache, and not be padding for the most part.
_KEYS_PER_GROUP = 4096
_SHORTEST_TO_LONGEST = 0.8


@dataclass(frozen=True, slots=True)
class _Group:
    """g sequences of n queries each that are attended together."""

    size: int
    queries: slice | Tensor
    """Where their queries are among all T: one range, or row numbers [g·n] int64."""
    keys: slice | Tensor
    """Where their keys are in the pool: one range of slots, or slot numbers [g·m] int64."""
    mask: Tensor | None
    """Which keys each query sees, bool [g, n, m]; None: all."""


class _Sequence(NamedTuple):
    row: int
    """In block_tables."""
    start: int
    """Of its queries among all T."""
    queries: int
    first_key: int
    """Position of the first key that any of its queries sees; not 0 under a window."""
    length: int
    """Keys in the cache."""

    @property
    def keys(self) -> int:
        return self.length - self.first_key


class GroupedPlan:
    """What the CPU works out from lengths and block tables; the same for every layer of a step."""

    def __init__(
        self,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        kv_lengths: Tensor,
        *,
        page_size: int,
        window: int | None,
        batch_invariant: bool,
        table_rows: Tensor | None = None,
    ) -> None:
        """In a batch-invariant plan everyone is attended alone."""
        self.page_size, self.window = page_size, window
        self._batch_invariant, self._table_rows = batch_invariant, table_rows
        self._decode: DecodePlan | None = None
        self.renew(block_tables, cu_seqlens_q, kv_lengths)

    def renew(self, block_tables: Tensor, cu_seqlens_q: Tensor, kv_lengths: Tensor) -> None:
        """Make it the plan of these. What was captured with it follows as far as its sequences decode or verify."""
        refuse_capture("attention on the CPU is planned from lengths")
        for of_before in ("_sequences", "tables", "groups", "prefill", "prompts"):
            self.__dict__.pop(of_before, None)
        self._given = block_tables, cu_seqlens_q, kv_lengths
        if self._decode is not None:
            self._decode.renew(*self._given, self._table_rows)

    @property
    def decode(self) -> DecodePlan | None:
        """Decoding and verifying sequences, for the kernel in C; None where there are none, or no such kernel."""
        if self._decode is None and plans():
            self._decode = DecodePlan(self.page_size, self.window, MOST_QUERIES_TO_GROUP)
            self._decode.renew(*self._given, self._table_rows)
        return self._decode if self._decode is not None and self._decode.num_sequences else None

    @cached_property
    def tables(self) -> np.ndarray:
        return self._given[0].numpy()

    @cached_property
    def _sequences(self) -> tuple[list[_Sequence], list[_Sequence]]:
        """Those that decode or verify, and those with many queries."""
        short: list[_Sequence] = []
        many: list[_Sequence] = []
        _, cu_seqlens_q, kv_lengths = self._given
        bounds, window = cu_seqlens_q.tolist(), self.window
        rows = range(len(bounds) - 1) if self._table_rows is None else self._table_rows.tolist()
        for (start, stop), row, length in zip(pairwise(bounds), rows, kv_lengths.tolist(), strict=True):
            queries = stop - start
            first_key = 0 if window is None else max(0, length - queries - window + 1)
            if queries:
                sequences = short if queries <= min(length, MOST_QUERIES_TO_GROUP) else many
                sequences.append(_Sequence(row, start, queries, first_key, length))
        return short, many

    @cached_property
    def groups(self) -> tuple[_Group, ...]:
        """Decoding and verifying sequences, for torch."""
        short, _ = self._sequences
        groups: Iterable[list[_Sequence]] = [[s] for s in short] if self._batch_invariant else _similar(short)
        return tuple(_plan_group(members, self.tables, self.page_size, self.window) for members in groups)

    @cached_property
    def prefill(self) -> PrefillPlan | None:
        """Sequences with many queries, for the kernel in C."""
        _, many = self._sequences
        if not many:
            return None
        sequences = np.array([(s.row, s.start, s.queries, s.length) for s in many])
        return PrefillPlan(sequences, self.tables, self.page_size, self.window)

    @cached_property
    def prompts(self) -> tuple[_Group, ...]:
        """Sequences with many queries, for torch: one by one, their mask is causal."""
        return tuple(
            _Group(1, slice(s.start, s.start + s.queries), _find_keys([s], self.tables, self.page_size), None)
            for s in self._sequences[1]
        )


def _similar(sequences: list[_Sequence]) -> Iterator[list[_Sequence]]:
    """Split into groups of equal query counts and similar numbers of keys, each in the order of the batch."""
    group: list[_Sequence] = []
    for sequence in sorted(sequences, key=lambda s: (s.queries, s.keys), reverse=True):
        if group and not (
            sequence.queries == group[0].queries
            and sequence.keys >= _SHORTEST_TO_LONGEST * group[0].keys
            and (len(group) + 1) * group[0].keys <= _KEYS_PER_GROUP
        ):
            yield sorted(group, key=_start)
            group = []
        group.append(sequence)
    if group:
        yield sorted(group, key=_start)


def _start(sequence: _Sequence) -> int:
    return sequence.start


# Plans are worked out in NumPy, whose calls cost a fraction of torch's on arrays this small. Routed layers (mixture of
# depths) make one each in every step.


def _plan_group(members: list[_Sequence], tables: np.ndarray, page_size: int, window: int | None) -> _Group:
    queries = members[0].queries
    starts = np.array([s.start for s in members])
    rows = (starts[:, None] + np.arange(queries)).ravel()
    consecutive = starts[-1] - starts[0] == (len(members) - 1) * queries
    return _Group(
        size=len(members),
        queries=slice(rows[0], rows[-1] + 1) if consecutive else torch.from_numpy(rows),
        keys=_find_keys(members, tables, page_size),
        mask=_mask(members, window),
    )


def _find_keys(members: list[_Sequence], tables: np.ndarray, page_size: int) -> slice | Tensor:
    """Return the slots of the members' keys; those of shorter members are padded with their first."""
    row, first_key, length = np.array([(s.row, s.first_key, s.length) for s in members]).T[:, :, None]
    positions = first_key + np.arange(max(s.keys for s in members))
    np.copyto(positions, first_key, where=positions >= length)
    page, offset = np.divmod(positions, page_size) if page_size > 1 else (positions, 0)
    slots = (tables[row, page].astype(np.int64) * page_size + offset).ravel()
    if len(members) == 1 and len(slots) and (slots[1:] - slots[:-1] == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots)


def _mask(members: list[_Sequence], window: int | None) -> Tensor | None:
    """Return which keys the queries of a group see, bool [g, n, m]; None where all."""
    queries = members[0].queries
    keys = np.array([s.keys for s in members])[:, None, None]
    if queries == 1 and (keys == keys[0]).all():
        return None
    key = np.arange(keys.max())
    last = keys - queries + np.arange(queries)[:, None]
    visible = key <= last
    return torch.from_numpy(visible if window is None else visible & (key > last - window))


def attend_groups(
    q: Tensor, k_slots: CachedRows, v_slots: CachedRows, plan: GroupedPlan, scale: float, soft_cap: float | None = None
) -> Tensor:
    """Return the attention of all queries, [T, Hq, d] in and out."""
    out, scores = q.new_empty(q.shape), (scale, soft_cap)
    in_c = plan.decode is not None and decodes(q, k_slots.rows, v_slots.rows)
    if plan.prefill is not None or not in_c:
        refuse_capture("attention that torch computes on the CPU, or of prompts, follows lengths")
    if plan.decode is not None and in_c:
        attend_decode(q, k_slots.rows, v_slots.rows, plan.decode, out, *scores)
    elif len(plan.groups) == 1 and plan.prefill is None:
        return _attend_group(q, k_slots, v_slots, plan.groups[0], *scores)
    else:
        for group in plan.groups:
            _put(out, group.queries, _attend_group(take(q, group.queries), k_slots, v_slots, group, *scores))
    if plan.prefill is not None and prefills(q, k_slots, v_slots):
        attend_prefill(q, k_slots, v_slots, plan.prefill, out, *scores)
        return out
    for prompt in plan.prompts:
        k, v = (slots.take(prompt.keys, q.dtype) for slots in (k_slots, v_slots))
        _put(out, prompt.queries, attend_causally(take(q, prompt.queries), k, v, plan.window, *scores))
    return out


def _attend_group(
    q: Tensor, k_slots: CachedRows, v_slots: CachedRows, group: _Group, scale: float, soft_cap: float | None
) -> Tensor:
    """Return the attention of a group's queries, [g·n, Hq, d] in and out."""
    g, (num_kv_heads, d) = group.size, k_slots.rows.shape[1:]
    k, v = (
        slots.take(group.keys, q.dtype).view(g, -1, num_kv_heads, d).transpose(1, 2) for slots in (k_slots, v_slots)
    )
    mask = group.mask
    if q.shape[0] == g:  # decode: a view where the rows below are copies
        rows = q.reshape(g, num_kv_heads, -1, d)
        mask = None if mask is None else mask[:, None]
        return attend_masked(rows, k, v, mask, scale=scale, soft_cap=soft_cap).reshape(q.shape)
    rows = q.reshape(g, -1, num_kv_heads, q.shape[1] // num_kv_heads, d).transpose(1, 2)
    if mask is not None:
        mask = mask.repeat_interleave(rows.shape[3], dim=1)[:, None]
    out = attend_masked(rows.flatten(2, 3), k, v, mask, scale=scale, soft_cap=soft_cap)
    return out.view(rows.shape).transpose(1, 2).reshape(q.shape)


def _put(rows: Tensor, where: slice | Tensor, values: Tensor) -> None:
    if isinstance(where, slice):
        rows[where] = values
    else:
        rows.index_copy_(0, where, values)
