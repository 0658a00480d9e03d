"""The work of a paged attention step, listed on the device: which rows attend to which keys, and in how many splits.

Query heads of one key/value head and the queries of a sequence are packed into rows, row = query · G + head of the
group, and cut into tiles. A work item is one tile and one range of its keys; a tile whose keys are split into several
items gives a merge besides. Lengths stay on the device: everything here is bounded by shapes, so that one CUDA graph,
with the two launches of `list_work` in it, serves all lengths.

The splits are as long as possible while the chip is full. Of about sixty lengths the one is taken that minimises

    waves · (keys of the longest item + a fixed cost in keys),    waves = ⌈items · Hkv / programs that run at once⌉

A batch-invariant plan has fixed lengths, cut at multiples of the length, and only chooses which tiles are split at
all: the kernel then computes the same numbers either way.

Legend: T queries of all sequences, B sequences, Hkv key/value heads, G query heads per key/value head, d head dim.
Sequence B, which has no keys, stands for the tokens past the last sequence: they get 0 as any row without keys.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.common.triton_support import num_processors, shared_memory_bytes

# A key tile of this size keeps enough loads in flight at two programs per processor.
_TILE_BYTES = 16 * 1024
# What a program needs of shared memory besides queries, keys and values.
_SCRATCH_BYTES = 3 * 1024
# Warps of a processor whose threads can have 255 registers each.
_REGISTER_WARPS = 8
# How many times the partial results may outnumber the programs that run at once.
_WAVES_OF_SPLITS = 4
# What starting an item, and merging its result, costs in keys of a head.
_ITEM_COST = tl.constexpr(64.0)
# Splits of 1/1, 1/2^(1/8), ... of the longest sequence are tried, down to 1/2^(63/8).
_CANDIDATES = tl.constexpr(64)
_STEPS_PER_HALVING = tl.constexpr(8.0)


class Tiles(NamedTuple):
    """How the work is cut. All but the last three change the order of sums, so they change the last bits."""

    rows: int
    """Packed rows of a tile, a power of two ≥ 16."""
    keys: int
    """Keys of a tile, a power of two ≥ 16."""
    chunk: int
    """The fewest keys of a split, a multiple of `keys`; in a batch-invariant plan the keys of every split."""
    warps: int
    ahead: int
    """Key tiles on their way while one is attended to."""
    residents: int
    """Programs that run at once on each processor."""


def padded_head_dim(head_dim: int) -> int:
    """Return D, the columns of a tile: a power of two that the matrix units take."""
    return max(triton.next_power_of_2(head_dim), 16)


def choose_tiles(q: Tensor, k_pages: Tensor, num_sequences: int, batch_invariant: bool) -> Tiles:
    """Return the tiles for queries [T, Hq, d] over pages [P, page, Hkv, d]; they depend on shapes alone."""
    num_tokens, num_heads, head_dim = q.shape
    rows_each = triton.cdiv(num_tokens, max(num_sequences, 1)) * (num_heads // k_pages.shape[2])
    width = padded_head_dim(head_dim)
    # fp32 has no matrix units: it is there for tests, not for speed.
    in_fp32 = q.dtype == torch.float32
    rows = 16 if in_fp32 else _choose_rows(rows_each, width, batch_invariant)
    key_bytes = width * k_pages.element_size()
    # Keys in 8 bits become 16 bits in registers, of which more than 16 rows leave few; or fp32, in shared memory too.
    multiplied_bytes = width * q.element_size()
    keys = _TILE_BYTES // (max(key_bytes, multiplied_bytes) if in_fp32 or rows > 16 else key_bytes)
    keys = min(max(keys, 16), 128 if rows < 64 else 64)
    warps = 8 if rows * width >= 128 * 128 else 4
    # Matrix units that read shared memory (64 rows and more) hold on to one more tile of keys and values.
    held, tile_bytes = int(rows >= 64), 2 * keys * key_bytes
    fixed_bytes = rows * width * q.element_size() + _SCRATCH_BYTES
    available = shared_memory_bytes(q.device)
    # Two programs of 64 rows fit a processor only so.
    ahead = min(max((available - fixed_bytes) // tile_bytes - held, 1), 1 if rows == 64 else 2)
    residents = min(available // (fixed_bytes + (ahead + held) * tile_bytes), _REGISTER_WARPS // warps)
    return Tiles(rows, keys, 512 if batch_invariant else 128, warps, ahead, max(residents, 1))


def _choose_rows(rows_each: int, width: int, batch_invariant: bool) -> int:
    """Return how many rows a tile has where a sequence has `rows_each` on average.

    Few enough that memory, not arithmetic, bounds the decoding of one token beside the prompt of another; 64 rows of
    256 columns would not fit the registers of four warps.
    """
    some = 64 if width <= 128 else 32
    if batch_invariant:
        return some
    if rows_each >= 1024:
        return 128
    return next((rows for rows in (16, 32) if rows_each <= rows), some)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The work of one step on the device. Unused entries at the end of a table are uninitialised."""

    tiles: Tiles
    firsts: Tensor
    """[4, B+2] int32: of each sequence the first item, partial result and merge, with the totals at B+1; its splits,
    with the length of a split at B+1."""
    items: Tensor
    """[8, most items] int32: row of the block tables, first query, queries, first row, first key, end of the keys,
    length, partial result (−1: the output itself). Keys and rows are positions in the sequence."""
    merges: Tensor
    """[6, most merges] int32: first query, queries, first row, first partial result, distance to the next, splits."""
    num_partials: int
    """Partial results to make room for; 0: nothing can be split."""


@dataclass(frozen=True, slots=True, eq=False)
class ListedPlan:
    """What a plan needs to list its work as soon as the shape of the queries is known; once for each such shape."""

    cu_seqlens_q: Tensor
    kv_lengths: Tensor
    most_keys: int
    """Keys that a block table has room for."""
    window: int | None
    batch_invariant: bool
    tiles: Tiles | None
    """None: chosen by `choose_tiles`."""
    table_rows: Tensor | None = None
    """[B] int32: each sequence's row of the block tables; None: its own number."""
    num_busy: int | None = None
    """Sequences that queries are taken to be divided among; None: all of them."""
    _listed: dict[Hashable, Work] = field(default_factory=dict)

    def work_for(self, q: Tensor, k_pages: Tensor) -> Work:
        key = (q.shape, q.dtype, k_pages.shape[2], k_pages.dtype)
        if key not in self._listed:
            num_sequences = self.kv_lengths.shape[0] if self.num_busy is None else self.num_busy
            tiles = self.tiles or choose_tiles(q, k_pages, num_sequences, self.batch_invariant)
            self._listed[key] = list_work(self, tiles, q, k_pages.shape[2])
        return self._listed[key]


def list_work(plan: ListedPlan, tiles: Tiles, q: Tensor, num_kv_heads: int) -> Work:
    """List the work of queries [T, Hq, d] in two launches, without waiting for the device."""
    (num_tokens, num_heads, _), num_sequences = q.shape, plan.kv_lengths.shape[0]
    group, programs = num_heads // num_kv_heads, num_processors(q.device) * tiles.residents
    most_tiles = min(num_tokens * triton.cdiv(group, tiles.rows), num_tokens * group // tiles.rows + num_sequences + 1)
    num_partials = _count_partials(plan, tiles, most_tiles, triton.cdiv(_WAVES_OF_SPLITS * programs, num_kv_heads))
    work = Work(
        tiles=tiles,
        firsts=q.new_empty((4, num_sequences + 2), dtype=torch.int32),
        items=q.new_empty((8, most_tiles + num_partials), dtype=torch.int32),
        merges=q.new_empty((6, num_partials // 2), dtype=torch.int32),
        num_partials=num_partials,
    )
    window, align = plan.window or 0, tiles.chunk if plan.batch_invariant else tiles.keys
    _count_kernel[(1,)](
        plan.cu_seqlens_q, plan.kv_lengths, work.firsts, num_sequences, num_tokens, window, programs, num_partials,
        GROUP=group, KV_HEADS=num_kv_heads, ROWS=tiles.rows, KEYS=tiles.keys, CHUNK=tiles.chunk, ALIGN=align,
        WINDOWED=plan.window is not None, INVARIANT=plan.batch_invariant, num_warps=4,
    )  # fmt: skip
    block = 128
    _list_kernel[(triton.cdiv(work.items.shape[1], block),)](
        plan.cu_seqlens_q, plan.kv_lengths, plan.table_rows, work.firsts, work.items, work.merges, num_sequences,
        num_tokens, window, work.items.shape[1], work.merges.shape[1], (num_sequences + 1).bit_length(),
        GROUP=group, ROWS=tiles.rows, ALIGN=align, WINDOWED=plan.window is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return work


def _count_partials(plan: ListedPlan, tiles: Tiles, most_tiles: int, wanted: int) -> int:
    """Return a bound on the partial results of a head: enough to fill the chip, and to split one longest sequence."""
    most_splits = triton.cdiv(plan.most_keys, tiles.chunk) + 1
    if most_splits <= 2:
        return 0
    return min(max(wanted, most_splits if plan.batch_invariant else 2), most_tiles * most_splits)


@triton.jit
def _load_sequence(p_cu_seqlens, p_kv_lengths, b, num_sequences, num_tokens):
    """Return (first query, queries, length) of sequences b; 0 queries past number B."""
    b_start = tl.load(p_cu_seqlens + b, mask=b <= num_sequences, other=num_tokens).to(tl.int32)
    b_stop = tl.load(p_cu_seqlens + b + 1, mask=b < num_sequences, other=num_tokens).to(tl.int32)
    b_length = tl.load(p_kv_lengths + b, mask=b < num_sequences, other=0).to(tl.int32)
    return b_start, b_stop - b_start, b_length


@triton.jit
def _measure(b_queries, b_length, window, GROUP: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
             WINDOWED: tl.constexpr):  # fmt: skip
    """Return (tiles, span): no tile of the sequence sees more than `span` keys past a multiple of ALIGN."""
    b_tiles = tl.cdiv(b_queries * GROUP, ROWS)
    b_span = b_length
    if WINDOWED:
        QUERIES: tl.constexpr = (ROWS + GROUP - 2) // GROUP + 1
        first = tl.maximum(b_length - b_queries - window + 1, 0)
        b_whole = b_length - first // ALIGN * ALIGN
        b_span = tl.where(b_tiles <= 1, b_whole, tl.minimum(b_length, window + QUERIES + ALIGN - 2))
    return b_tiles, tl.where(b_tiles > 0, b_span, 0)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "window", "programs", "num_partials"])
def _count_kernel(
    p_cu_seqlens, p_kv_lengths, p_firsts, num_sequences, num_tokens, window, programs, num_partials,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    ALIGN: tl.constexpr, WINDOWED: tl.constexpr, INVARIANT: tl.constexpr,
):  # fmt: skip
    """Choose the length of a split and fill `Work.firsts`. Grid: 1."""
    longest = 0
    for first in range(0, num_sequences, 512):
        b = first + tl.arange(0, 512)
        _, b_queries, b_length = _load_sequence(p_cu_seqlens, p_kv_lengths, b, num_sequences, num_tokens)
        _, b_span = _measure(b_queries, b_length, window, GROUP, ROWS, ALIGN, WINDOWED)
        longest = tl.maximum(longest, tl.max(b_span, axis=0))

    # A sequence is split where its span exceeds the candidate's limit; no limit is below the next split's length.
    b_part = tl.exp2(tl.arange(0, _CANDIDATES).to(tl.float32) / -_STEPS_PER_HALVING)
    b_limit = tl.cdiv(tl.ceil(longest * b_part).to(tl.int32), KEYS) * KEYS
    b_limit = tl.maximum(b_limit, CHUNK)
    b_chunk = tl.full([_CANDIDATES], CHUNK, tl.int32) if INVARIANT else b_limit
    b_items, b_partials = tl.zeros([_CANDIDATES], tl.int32), tl.zeros([_CANDIDATES], tl.int32)
    for first in range(0, num_sequences + 1, 32):
        b = first + tl.arange(0, 32)
        _, b_queries, b_length = _load_sequence(p_cu_seqlens, p_kv_lengths, b, num_sequences, num_tokens)
        b_tiles, b_span = _measure(b_queries, b_length, window, GROUP, ROWS, ALIGN, WINDOWED)
        b_more = (b_span[None, :] > b_limit[:, None]) * b_tiles[None, :] * tl.cdiv(b_span[None, :], b_chunk[:, None])
        b_items += tl.sum(tl.where(b_more > 0, b_more, b_tiles[None, :]), axis=1)
        b_partials += tl.sum(b_more, axis=1)
    b_waves = tl.cdiv(b_items * KV_HEADS, programs)
    b_cost = b_waves.to(tl.float32) * (tl.minimum(b_limit, longest).to(tl.float32) + _ITEM_COST)
    b_cost = tl.where((b_partials <= num_partials) | (b_limit >= longest), b_cost, float("inf"))
    limit = tl.max(tl.where(b_cost == tl.min(b_cost, axis=0), b_limit, 0), axis=0)
    chunk = CHUNK if INVARIANT else limit

    row, item, partial, merge = num_sequences + 2, 0, 0, 0
    for first in range(0, num_sequences + 2, 512):
        b = first + tl.arange(0, 512)
        _, b_queries, b_length = _load_sequence(p_cu_seqlens, p_kv_lengths, b, num_sequences, num_tokens)
        b_tiles, b_span = _measure(b_queries, b_length, window, GROUP, ROWS, ALIGN, WINDOWED)
        b_splits = tl.where(b_span > limit, tl.cdiv(b_span, chunk), 1)
        b_item, b_merge = b_tiles * b_splits, tl.where(b_splits > 1, b_tiles, 0)
        b_partial = b_merge * b_splits
        m_b = b < row
        tl.store(p_firsts + b, item + tl.cumsum(b_item, axis=0) - b_item, mask=m_b)
        tl.store(p_firsts + row + b, partial + tl.cumsum(b_partial, axis=0) - b_partial, mask=m_b)
        tl.store(p_firsts + 2 * row + b, merge + tl.cumsum(b_merge, axis=0) - b_merge, mask=m_b)
        tl.store(p_firsts + 3 * row + b, tl.where(b <= num_sequences, b_splits, chunk), mask=m_b)
        item, partial, merge = item + tl.sum(b_item), partial + tl.sum(b_partial), merge + tl.sum(b_merge)


@triton.jit(
    do_not_specialize=["num_sequences", "num_tokens", "window", "most_items", "most_merges", "steps"],
    do_not_specialize_on_alignment=["p_table_rows"],
)
def _list_kernel(
    p_cu_seqlens, p_kv_lengths, p_table_rows, p_firsts, p_items, p_merges, num_sequences, num_tokens, window,
    most_items, most_merges, steps,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill `Work.items` and `Work.merges`. Grid: ⌈most items / BLOCK⌉; steps: of the search, ⌈log2(B + 2)⌉."""
    row = num_sequences + 2
    b_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_items = b_index < tl.load(p_firsts + num_sequences + 1)
    # The last sequence whose first item is not past this one: firsts[low] ≤ index < firsts[high].
    b_low, b_high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + num_sequences + 1
    for _ in range(0, steps):
        b_middle = (b_low + b_high) // 2
        m_low = tl.load(p_firsts + b_middle) <= b_index
        b_low, b_high = tl.where(m_low, b_middle, b_low), tl.where(m_low, b_high, b_middle)

    chunk, b_splits = tl.load(p_firsts + 3 * row + num_sequences + 1), tl.load(p_firsts + 3 * row + b_low)
    b_start, b_queries, b_length = _load_sequence(p_cu_seqlens, p_kv_lengths, b_low, num_sequences, num_tokens)
    b_tiles = tl.maximum(tl.cdiv(b_queries * GROUP, ROWS), 1)
    b_local = b_index - tl.load(p_firsts + b_low)
    # Tiles that read the same keys run side by side; later tiles see more keys and start first.
    b_split, b_turn = b_local // b_tiles, b_local % b_tiles
    b_row = (b_tiles - 1 - b_turn) * ROWS
    b_last = tl.minimum(b_queries - 1, (b_row + ROWS - 1) // GROUP)
    b_end = tl.maximum(b_length - b_queries + b_last + 1, 0)
    b_key = tl.zeros([BLOCK], tl.int32)
    if WINDOWED:
        b_key = tl.minimum(tl.maximum(b_length - b_queries + b_row // GROUP - window + 1, 0), b_end)
    m_split = b_splits > 1
    b_from = b_key // ALIGN * ALIGN + b_split * chunk
    b_key = tl.where(m_split, tl.maximum(b_key, b_from), b_key)
    b_end = tl.where(m_split, tl.minimum(b_end, b_from + chunk), b_end)
    b_partial = tl.load(p_firsts + row + b_low) + b_local

    p_item, b_table = p_items + b_index, b_low
    if p_table_rows is not None:
        b_table = tl.load(p_table_rows + b_low, mask=b_low < num_sequences, other=0)
    tl.store(p_item, b_table, mask=m_items)
    tl.store(p_item + most_items, b_start, mask=m_items)
    tl.store(p_item + 2 * most_items, b_queries, mask=m_items)
    tl.store(p_item + 3 * most_items, b_row, mask=m_items)
    tl.store(p_item + 4 * most_items, b_key, mask=m_items)
    tl.store(p_item + 5 * most_items, b_end, mask=m_items)
    tl.store(p_item + 6 * most_items, b_length, mask=m_items)
    tl.store(p_item + 7 * most_items, tl.where(m_split, b_partial, -1), mask=m_items)

    p_merge = p_merges + tl.load(p_firsts + 2 * row + b_low) + b_turn
    m_merges = m_items & m_split & (b_split == 0)
    tl.store(p_merge, b_start, mask=m_merges)
    tl.store(p_merge + most_merges, b_queries, mask=m_merges)
    tl.store(p_merge + 2 * most_merges, b_row, mask=m_merges)
    tl.store(p_merge + 3 * most_merges, b_partial, mask=m_merges)
    tl.store(p_merge + 4 * most_merges, b_tiles, mask=m_merges)
    tl.store(p_merge + 5 * most_merges, b_splits, mask=m_merges)
