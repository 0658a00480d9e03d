"""Backward of flash attention for Hopper, in Gluon: dK, dV, and dQ by addition, in five products.

A program is a tile of keys and a key/value head. Each of two warpgroups holds 64 of the keys, with dK and dV of them in
registers; a producer warp copies tiles of queries and of dO into a ring of shared memory, head after head of the
group. Formulas and legend: kernels/attention/flash.py; what a tile holds of the next document:
kernels/attention/_flash_hopper.py.
"""

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

from kernels.attention import _flash_hopper
from kernels.attention import _flash_tiles as cut
from kernels.attention._flash_hopper import (
    CONSUMERS,
    descriptor,
    is_copyable,
    last_seen,
    stage_of,
    work_item,
    zero_past,
)
from kernels.attention._flash_tiles import Inputs, Settings, Tile
from kernels.common.ragged_tiles import plan_tiles

TILE = Tile(queries=64, keys=128, num_warps=4, num_stages=2)
_LOG2_E = gl.constexpr(1.4426950408889634)
_VARYING = ("num_queries", "num_kv_heads", "group", "section")


@gluon.jit
def query_tiles(key, s_q, s_k, CAUSAL: gl.constexpr, QUERIES: gl.constexpr):
    """The first tile of queries that see keys from this one on, and how many follow, itself included."""
    first = max(key + s_q - s_k, 0) // QUERIES if CAUSAL else 0
    return first, max((s_q + QUERIES - 1) // QUERIES - first, 0)


@gluon.jit
def _produce(rings, coordinates, tiles, group, ROWS: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr):
    """Copy the keys and values of both consumers, then one tile of queries and one of dO after the other."""
    k_desc, v_desc, q_desc, g_desc, k_smem, v_smem, q_smem, g_smem, _, kv_full, full, empty = rings
    first_key, k_column, first_query, q_column, D = coordinates
    first, count = tiles
    for consumer in gl.static_range(2):
        row = first_key + consumer * ROWS
        mbarrier.expect(kv_full.index(consumer), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row, k_column], kv_full.index(consumer), k_smem.index(consumer))
        tma.async_copy_global_to_shared(v_desc, [row, k_column], kv_full.index(consumer), v_smem.index(consumer))
    for step in range(group * count):
        stage, parity = stage_of(step, STAGES)
        row = first_query + (first + step % count) * QUERIES
        column = q_column + step // count * D
        mbarrier.wait(empty.index(stage), parity ^ 1)
        mbarrier.expect(full.index(stage), q_desc.block_type.nbytes + g_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [row, column], full.index(stage), q_smem.index(stage))
        tma.async_copy_global_to_shared(g_desc, [row, column], full.index(stage), g_smem.index(stage))


@gluon.jit
def _write(p_rows, tile, b_values, row, num_rows, stride, D: gl.constexpr, ROWS: gl.constexpr):
    """Through shared memory that nobody needs any more, into rows of 16-byte pieces, up to a document's last."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    tile.store(b_values.to(tile.dtype))
    o_row = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_column = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = p_rows + o_row.to(gl.int64)[:, None] * stride + o_column[None, :]
    gl.store(pointers, tile.load(layout), mask=(o_row < num_rows)[:, None] & (o_column < D)[None, :])


@gluon.jit
def _consume(
    rings, item, tiles, pointers, numbers,
    CONSUMER: gl.constexpr, CAUSAL: gl.constexpr,
    D: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK and dV of ROWS keys of the item, over all tiles of queries of all heads of the group."""
    _, _, _, _, k_smem, v_smem, q_smem, g_smem, s_smem, kv_full, full, empty = rings
    s_k, s_q, key = item
    first, count = tiles
    p_lse, p_delta, p_grad_q, p_grad_k, p_grad_v = pointers
    num_queries, num_kv_heads, group, scale = numbers
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    row = key + CONSUMER * ROWS
    o_key = row + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
    stride_q = num_kv_heads * group * D
    b_zero = gl.zeros([ROWS, QUERIES], gl.float32, scores_layout)
    b_none = gl.zeros([QUERIES, D], gl.float32, sums_layout)
    b_grad_k = gl.zeros([ROWS, D], gl.float32, sums_layout)
    b_grad_v = gl.zeros([ROWS, D], gl.float32, sums_layout)
    k_tile, v_tile, s_tile = k_smem.index(CONSUMER), v_smem.index(CONSUMER), s_smem.index(CONSUMER)
    mbarrier.wait(kv_full.index(CONSUMER), 0)
    if row + ROWS > s_k:
        zero_past(k_tile, s_k - row, D, ROWS)
        zero_past(v_tile, s_k - row, D, ROWS)
    for step in range(group * count):
        stage, parity = stage_of(step, STAGES)
        query = (first + step % count) * QUERIES
        member = step // count
        q_tile, g_tile = q_smem.index(stage), g_smem.index(stage)
        o_query = query + gl.arange(0, QUERIES, gl.SliceLayout(0, scores_layout))
        o_number = member * num_queries + o_query
        b_lse = gl.load(p_lse + o_number, mask=o_query < s_q, other=float("inf"))
        b_delta = gl.load(p_delta + o_number, mask=o_query < s_q, other=0.0)
        mbarrier.wait(full.index(stage), parity)
        if query + QUERIES > s_q:
            zero_past(q_tile, s_q - query, D, QUERIES)
            zero_past(g_tile, s_q - query, D, QUERIES)
        b_scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_grad_p = warpgroup_mma(v_tile, g_tile.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_scores = warpgroup_mma_wait(1, deps=[b_scores])
        m_visible = o_key[:, None] <= (last_seen(o_query, s_q, s_k, CAUSAL) + gl.zeros_like(o_query))[None, :]
        b_p = gl.where(m_visible, gl.exp2(b_scores * (scale * _LOG2_E) - b_lse[None, :]), 0.0)
        # Long over: it keeps the assembler from moving exponentials behind the wait for products.
        mbarrier.wait(kv_full.index(CONSUMER), 0)
        b_grad_p = warpgroup_mma_wait(0, deps=[b_grad_p])
        b_p_operand = gl.convert_layout(b_p.to(g_smem.dtype), operand)
        b_grad_v = warpgroup_mma(b_p_operand, g_tile, b_grad_v, is_async=True)
        b_grad_s = (b_p * (b_grad_p - b_delta[None, :])).to(q_smem.dtype)
        s_tile.store(b_grad_s)
        fence_async_shared()
        b_grad_k = warpgroup_mma(gl.convert_layout(b_grad_s, operand), q_tile, b_grad_k, is_async=True)
        b_grad_q = warpgroup_mma(s_tile.permute((1, 0)), k_tile, b_none, use_acc=False, is_async=True)
        b_grad_v = warpgroup_mma_wait(2, deps=[b_grad_v])
        b_grad_k = warpgroup_mma_wait(1, deps=[b_grad_k])
        mbarrier.arrive(empty.index(stage), count=1)
        b_grad_q = warpgroup_mma_wait(0, deps=[b_grad_q])
        o_row = query + gl.arange(0, QUERIES, gl.SliceLayout(1, sums_layout))
        o_column = member * D + gl.arange(0, D, gl.SliceLayout(0, sums_layout))
        p_sums = p_grad_q + o_row.to(gl.int64)[:, None] * stride_q + o_column[None, :]
        m_sums = (o_row < s_q)[:, None] & (o_column >= 0)[None, :]
        gl.atomic_add(p_sums, b_grad_q * scale, mask=m_sums, sem="relaxed")
    _write(p_grad_k, k_tile, b_grad_k * scale, row, s_k, num_kv_heads * D, D, ROWS)
    _write(p_grad_v, v_tile, b_grad_v, row, s_k, num_kv_heads * D, D, ROWS)


@gluon.jit(do_not_specialize=_VARYING)
def _backward_kernel(
    k_desc, v_desc, q_desc, g_desc, p_lse, p_delta, p_grad_q, p_grad_k, p_grad_v, p_tiles, p_count,
    num_queries, num_kv_heads, group, section, scale,
    CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write dK and dV [S, Hkv, d], add to dQ, fp32 [T, Hq, d]; a program is a tile of keys and a key/value head."""
    ROWS: gl.constexpr = k_desc.block_type.shape[0]
    QUERIES: gl.constexpr = q_desc.block_type.shape[0]
    num_items = gl.load(p_count)
    if gl.program_id(0) >= num_items * num_kv_heads:
        return
    kv_head, document, key = work_item(gl.program_id(0), p_tiles, num_items, section, num_kv_heads)
    start_k, s_k, start_q, s_q = document
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    scores_smem: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, QUERIES], q_desc.dtype)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, ROWS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, ROWS, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, QUERIES, D], q_desc.layout)
    g_smem = gl.allocate_shared_memory(g_desc.dtype, [STAGES, QUERIES, D], g_desc.layout)
    s_smem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, QUERIES], scores_smem)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for consumer in gl.static_range(2):
        mbarrier.init(kv_full.index(consumer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()  # copies, too, shall see the barriers as they are now
    rings = k_desc, v_desc, q_desc, g_desc, k_smem, v_smem, q_smem, g_smem, s_smem, kv_full, full, empty
    first_head = kv_head * group
    rows_q = start_q.to(gl.int64) * (num_kv_heads * group * D) + first_head * D
    rows_k = start_k.to(gl.int64) * (num_kv_heads * D) + kv_head * D
    rows_lse = first_head.to(gl.int64) * num_queries + start_q
    pointers = p_lse + rows_lse, p_delta + rows_lse, p_grad_q + rows_q, p_grad_k + rows_k, p_grad_v + rows_k
    item = s_k, s_q, key
    tiles = query_tiles(key, s_q, s_k, CAUSAL, QUERIES)
    numbers = num_queries, num_kv_heads, group, scale
    coordinates = start_k + key, kv_head * D, start_q, first_head * D, D
    gl.warp_specialize(
        [
            (_consume, (rings, item, tiles, pointers, numbers, 0, CAUSAL, D, ROWS, QUERIES, STAGES)),
            (_consume, (rings, item, tiles, pointers, numbers, 1, CAUSAL, D, ROWS, QUERIES, STAGES)),
            (_produce, (rings, coordinates, tiles, group, ROWS, QUERIES, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


def supports(inputs: Inputs, settings: Settings, grad_out: Tensor) -> bool:
    """Return whether this kernel can take a call: what the forward takes, d of 64, sums in any order.

    At 128 it would spill: dK, dV and dQ alone take 192 registers of a thread.
    """
    fits = inputs.q.shape[2] == 64 and not settings.deterministic
    return fits and is_copyable(grad_out) and _flash_hopper.supports(inputs, settings)


def grad_keys(
    inputs: Inputs, settings: Settings, grad_q: Tensor, lse: Tensor, grad_out: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dK and dV [S, Hkv, d]; add dQ to grad_q, fp32."""
    q, k, v, cu_seqlens_q, cu_seqlens_k = inputs
    grad_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    plan = plan_tiles(cu_seqlens_k, cu_seqlens_q, num_rows=k.shape[0], rows_per_tile=TILE.keys, last_first=False)
    group, rows = q.shape[1] // k.shape[1], TILE.keys // CONSUMERS
    _backward_kernel[(plan[0].shape[0] * k.shape[1],)](
        *(descriptor(k, rows), descriptor(v, rows), descriptor(q, TILE.queries), descriptor(grad_out, TILE.queries)),
        *(lse, delta, grad_q, grad_k, grad_v, *plan),
        num_queries=q.shape[0],
        num_kv_heads=k.shape[1],
        group=group,
        section=max(1, cut.section_of(q, grad_out) // group),
        scale=settings.scale,
        CAUSAL=settings.causal,
        D=q.shape[2],
        STAGES=TILE.num_stages,
        num_warps=TILE.num_warps,
    )
    return grad_k, grad_v
