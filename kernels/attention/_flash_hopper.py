"""Forward of flash attention for Hopper, in Gluon: beside the portable kernel, for what it supports.

One producer warp copies tiles of keys and values into a ring of shared memory (TMA); two warpgroups, of 64 queries
each, consume them. While the products of one run on the tensor cores, the other is at its softmax: they take turns to
issue products. Within a warpgroup, the softmax of tile i runs while the product of tile i − 1 with its values does:

    turn i:  issue S_i = Q K_iᵀ,  issue O += P_(i−1) V_(i−1),  pass the turn on
             wait for S_i, give K_i back, P_i = softmax of S_i, wait for V_i and O, give V_(i−1) back, rescale O

Source: FlashAttention-3, https://arxiv.org/abs/2407.08608. Formulas and legend: kernels/attention/flash.py.

A tile may end in the next document. Its keys are masked in the scores; its values are zeroed in shared memory, since
0 · NaN is NaN; its queries have no effect on others and are not stored. Triton's interpreter runs no Gluon:
tests/kernels/gluon_model.py runs these very functions in NumPy, with barriers, copies and products in any order that
the hardware may choose.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import _flash_tiles as cut
from kernels.attention._flash_tiles import Inputs, Settings, Tile

# The queries of both warpgroups, keys of a tile, warps of a warpgroup, tiles of keys and of values in shared memory.
TILE = Tile(queries=128, keys=128, num_warps=4, num_stages=2)
CONSUMERS = 2
_LOG2_E = gl.constexpr(1.4426950408889634)
_VARYING = ("num_queries", "num_heads", "group", "section")


@gluon.jit
def stage_of(tile, STAGES: gl.constexpr):
    """The place of a tile in the ring, and the parity of how often the ring was full before."""
    return tile % STAGES, (tile // STAGES) & 1


@gluon.jit
def turn_parity(tile):
    """Of the phase of a consumer's own barrier that ends when it may issue the products of tile 1, 2, …"""
    return (tile - 1) & 1


@gluon.jit
def last_seen(row, s_q, s_k, CAUSAL: gl.constexpr):
    """The last key that a query sees: a causal mask is aligned at the bottom right."""
    return row + s_k - s_q if CAUSAL else s_k - 1


@gluon.jit
def key_tiles(query, s_q, s_k, CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """How many tiles of keys the queries of an item see: at least one, so that nobody waits for what never comes.

    It is the same for both consumers, since they take turns.
    """
    end = last_seen(min(query + QUERIES, s_q) - 1, s_q, s_k, CAUSAL) + 1
    return max((end + KEYS - 1) // KEYS, 1)


@gluon.jit
def full_tiles(row, s_q, s_k, num_tiles, CAUSAL: gl.constexpr, KEYS: gl.constexpr):
    """How many tiles, from the first, every query from this row on sees as a whole; at least the one peeled off."""
    return min(max((last_seen(row, s_q, s_k, CAUSAL) + 1) // KEYS, 1), num_tiles)


@gluon.jit
def _produce(rings, coordinates, num_tiles, KEYS: gl.constexpr, STAGES: gl.constexpr):
    """Copy the queries of both consumers, then one tile of keys and one of values after the other."""
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty = rings
    first_query, q_column, first_key, k_column = coordinates
    for consumer in gl.static_range(2):
        mbarrier.expect(q_full.index(consumer), q_desc.block_type.nbytes)
        row = first_query + consumer * q_desc.block_type.shape[0]
        tma.async_copy_global_to_shared(q_desc, [row, q_column], q_full.index(consumer), q_smem.index(consumer))
    for tile in range(num_tiles):
        stage, parity = stage_of(tile, STAGES)
        row = first_key + tile * KEYS
        mbarrier.wait(k_empty.index(stage), parity ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row, k_column], k_full.index(stage), k_smem.index(stage))
        mbarrier.wait(v_empty.index(stage), parity ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [row, k_column], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _softmax(b_scores, b_max, b_sum, o_last, first_key, scale_log2, MASKED: gl.constexpr):
    """P of one tile in fp32, how much earlier sums shrink, and the new maximum and sum of each query."""
    if MASKED:
        o_key = first_key + gl.arange(0, b_scores.shape[1], gl.SliceLayout(0, b_scores.type.layout))
        b_scores = gl.where(o_key[None, :] <= o_last[:, None], b_scores, float("-inf"))
    b_new_max = gl.maximum(b_max, gl.max(b_scores, 1) * scale_log2)
    b_shift = b_new_max
    if MASKED:
        b_shift = gl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = gl.exp2(b_scores * scale_log2 - b_shift[:, None])
    b_decay = gl.exp2(b_max - b_shift)
    return b_p, b_decay, b_new_max, b_sum * b_decay + gl.sum(b_p, 1)


@gluon.jit
def _turns(
    begin, end, state, rings, turns, b_zero, o_last, scale_log2,
    CONSUMER: gl.constexpr, MASKED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The turns of some tiles: products of one tile beside the softmax of the next."""
    _, _, _, q_smem, k_smem, v_smem, _, k_full, k_empty, v_full, v_empty = rings
    mine, other = turns
    b_p, b_out, b_max, b_sum = state
    for tile in range(begin, end):
        stage, parity = stage_of(tile, STAGES)
        before, _parity = stage_of(tile - 1, STAGES)
        mbarrier.wait(k_full.index(stage), parity)
        mbarrier.wait(mine, turn_parity(tile))
        k_tile = k_smem.index(stage).permute((1, 0))
        b_scores = warpgroup_mma(q_smem.index(CONSUMER), k_tile, b_zero, use_acc=False, is_async=True)
        b_out = warpgroup_mma(b_p, v_smem.index(before), b_out, is_async=True)
        mbarrier.arrive(other, count=1)
        b_scores = warpgroup_mma_wait(1, deps=[b_scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        b_new_p, b_decay, b_max, b_sum = _softmax(b_scores, b_max, b_sum, o_last, tile * KEYS, scale_log2, MASKED)
        # Here and not where they are needed: the assembler moves exponentials behind the wait for products, but not
        # behind one for a barrier.
        mbarrier.wait(v_full.index(stage), parity)
        b_out = warpgroup_mma_wait(0, deps=[b_out])
        mbarrier.arrive(v_empty.index(before), count=1)
        b_out = b_out * gl.convert_layout(b_decay, gl.SliceLayout(1, b_out.type.layout))[:, None]
        b_p = gl.convert_layout(b_new_p.to(v_smem.dtype), b_p.type.layout)
    return b_p, b_out, b_max, b_sum


@gluon.jit
def zero_past(v_tile, num_rows, D: gl.constexpr, KEYS: gl.constexpr):
    """Zero the rows of a tile from num_rows on. Both consumers write the same bytes: it matters not who is first."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    b_v = v_tile.load(layout)
    m_row = gl.arange(0, KEYS, gl.SliceLayout(1, layout)) < num_rows
    v_tile.store(gl.where(m_row[:, None], b_v, gl.zeros_like(b_v)))
    fence_async_shared()


@gluon.jit
def _consume(
    rings, turns, item, outputs, num_tiles, scale_log2,
    CONSUMER: gl.constexpr, CAUSAL: gl.constexpr,
    D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend from ROWS queries of the item over all tiles of keys."""
    _, _, _, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, _ = rings
    s_q, s_k, query = item
    p_out, p_lse, stride_out = outputs
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    row = query + CONSUMER * ROWS
    o_query = row + gl.arange(0, ROWS, rows_layout)
    o_last = last_seen(o_query, s_q, s_k, CAUSAL) + gl.zeros([ROWS], gl.int32, rows_layout)
    b_zero = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
    b_max = gl.full([ROWS], float("-inf"), gl.float32, rows_layout)
    b_sum = gl.zeros([ROWS], gl.float32, rows_layout)
    b_out = gl.zeros([ROWS, D], gl.float32, out_layout)
    q_tile = q_smem.index(CONSUMER)
    mbarrier.wait(q_full.index(CONSUMER), 0)
    mbarrier.wait(k_full.index(0), 0)
    b_scores = warpgroup_mma(q_tile, k_smem.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_scores = warpgroup_mma_wait(0, deps=[b_scores])
    mbarrier.arrive(k_empty.index(0), count=1)
    b_p, _, b_max, b_sum = _softmax(b_scores, b_max, b_sum, o_last, 0, scale_log2, True)
    b_p = gl.convert_layout(b_p.to(v_smem.dtype), gl.DotOperandLayout(0, out_layout, 2))
    mbarrier.wait(v_full.index(0), 0)
    full = full_tiles(row, s_q, s_k, num_tiles, CAUSAL, KEYS)
    state = b_p, b_out, b_max, b_sum
    state = _turns(1, full, state, rings, turns, b_zero, o_last, scale_log2, CONSUMER, False, KEYS, STAGES)
    state = _turns(full, num_tiles, state, rings, turns, b_zero, o_last, scale_log2, CONSUMER, True, KEYS, STAGES)
    b_p, b_out, b_max, b_sum = state
    last, _parity = stage_of(num_tiles - 1, STAGES)
    if num_tiles * KEYS > s_k:
        zero_past(v_smem.index(last), s_k - (num_tiles - 1) * KEYS, D, KEYS)
    b_out = warpgroup_mma(b_p, v_smem.index(last), b_out, is_async=True)
    m_blind = b_sum == 0.0
    b_sum = gl.where(m_blind, 1.0, b_sum)
    gl.store(p_lse + o_query, gl.where(m_blind, float("inf"), b_max + gl.log2(b_sum)), mask=o_query < s_q)
    b_out = warpgroup_mma_wait(0, deps=[b_out])
    b_out = b_out / gl.convert_layout(b_sum, gl.SliceLayout(1, out_layout))[:, None]
    # Through the memory of the queries, which nobody needs any more, into rows of 16-byte pieces.
    q_tile.store(b_out.to(q_smem.dtype))
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    o_row = row + gl.arange(0, ROWS, gl.SliceLayout(1, store_layout))
    o_column = gl.arange(0, D, gl.SliceLayout(0, store_layout))
    pointers = p_out + o_row.to(gl.int64)[:, None] * stride_out + o_column[None, :]
    gl.store(pointers, q_tile.load(store_layout), mask=(o_row < s_q)[:, None] & (o_column < D)[None, :])


@gluon.jit
def work_item(item, p_tiles, num_tiles, section, num_heads):
    """As `kernels.common.ragged_tiles.work_item`; an item past the last one has no queries and no keys."""
    first_head = item // (num_tiles * section) * section
    heads_here = min(section, num_heads - first_head)
    item_of_section = item - first_head * num_tiles
    p_numbers = p_tiles + item_of_section // heads_here * 5
    document = gl.load(p_numbers), gl.load(p_numbers + 1), gl.load(p_numbers + 2), gl.load(p_numbers + 3)
    return first_head + item_of_section % heads_here, document, gl.load(p_numbers + 4)


@gluon.jit(do_not_specialize=_VARYING)
def _forward_kernel(
    q_desc, k_desc, v_desc, p_out, p_lse, p_tiles, p_count,
    num_queries, num_heads, group, section, scale,
    CAUSAL: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write O [T, Hq, d] and L [Hq, T]; a program is a tile of queries and a query head."""
    ROWS: gl.constexpr = q_desc.block_type.shape[0]
    num_items = gl.load(p_count)
    if gl.program_id(0) >= num_items * num_heads:
        return
    head, document, query = work_item(gl.program_id(0), p_tiles, num_items, section, num_heads)
    start_q, s_q, start_k, s_k = document
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KEYS, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for consumer in gl.static_range(2):
        mbarrier.init(q_full.index(consumer), count=1)
        mbarrier.init(turn.index(consumer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()  # copies, too, shall see the barriers as they are now
    mbarrier.arrive(turn.index(0), count=1)
    num_tiles = key_tiles(query, s_q, s_k, CAUSAL, 2 * ROWS, KEYS)
    rings = q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty
    coordinates = start_q + query, head * D, start_k, head // group * D
    stride_out = num_heads * D
    p_out += start_q.to(gl.int64) * stride_out + head * D
    p_lse += head.to(gl.int64) * num_queries + start_q
    item = s_q, s_k, query
    outputs = p_out, p_lse, stride_out
    scale_log2 = scale * _LOG2_E
    first, second = (turn.index(0), turn.index(1)), (turn.index(1), turn.index(0))
    gl.warp_specialize(
        [
            (_consume, (rings, first, item, outputs, num_tiles, scale_log2, 0, CAUSAL, D, ROWS, KEYS, STAGES)),
            (_consume, (rings, second, item, outputs, num_tiles, scale_log2, 1, CAUSAL, D, ROWS, KEYS, STAGES)),
            (_produce, (rings, coordinates, num_tiles, KEYS, STAGES)),
        ],
        [4, 1],
        [240, 24],  # registers a thread; the first consumer keeps what is left of 504, another 240
    )


def supports(inputs: Inputs, settings: Settings) -> bool:
    """Return whether this kernel can take a call: 16-bit floats, d of 64 or 128, no window, no cap, rows for TMA."""
    q = inputs.q
    return (
        q.dtype != torch.float32
        and q.shape[2] in (64, 128)
        and settings.window is None
        and settings.soft_cap is None
        and all(map(is_copyable, inputs[:3]))
    )


def is_copyable(x: Tensor) -> bool:
    """Return whether the heads of a row lie next to each other, and rows start at multiples of 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x.shape[0] > 0 and aligned and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) and x.stride(2) == 1


def descriptor(x: Tensor, rows: int) -> Any:
    """All heads of x [*, heads, d] as one matrix, copied in blocks of so many rows and one head."""
    block = [rows, x.shape[2]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], block, layout)


def attend(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return O [T, Hq, d] and L [Hq, T] of what `supports` says yes to."""
    q, k, v = inputs[:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    plan = cut.plan_queries(inputs, TILE)
    group = q.shape[1] // k.shape[1]
    _forward_kernel[(plan[0].shape[0] * q.shape[1],)](
        *(descriptor(q, TILE.queries // CONSUMERS), descriptor(k, TILE.keys), descriptor(v, TILE.keys)),
        *(out, lse, *plan),
        num_queries=q.shape[0],
        num_heads=q.shape[1],
        group=group,
        section=cut.section_of(k, v) * group,
        scale=settings.scale,
        CAUSAL=settings.causal,
        D=q.shape[2],
        KEYS=TILE.keys,
        STAGES=TILE.num_stages,
        num_warps=TILE.num_warps,
    )
    return out, lse
