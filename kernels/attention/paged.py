"""Attention of new tokens over keys and values that live in pages.

    O = softmax(scale · Q Kᵀ + mask) V      within each sequence

Under a soft cap a score s, scaled, is cap · tanh(s / cap) before the mask (kernels/common/soft_cap.py).

A sequence's keys lie in pages of fixed size anywhere in the pool; its block table lists them in order. The slot of
position t is block_table[t // page] · page + t % page. Queries are ragged: prefill, chunk of a prompt, decode and
verification of drafted tokens are one call with other lengths. The last query of sequence b stands at key
kv_lengths[b] − 1 (bottom-right alignment, as in kernels/attention/flash.py); a query that sees no key gives 0.
Sources: https://arxiv.org/abs/2309.06180 (pages), https://arxiv.org/abs/2311.01282 (keys split among programs).

The Triton form packs the query heads of a key/value head and the queries of a sequence into the rows of one matrix, so
keys are read once for all of them, and works through a list of (rows, range of keys) that is made on the device
(kernels/attention/_paged_plan.py). A tile whose keys are split gives partial results, which a second kernel merges:
with L_j = ln Σ exp(scores) of split j,  L = ln Σ_j exp L_j  and  O = Σ_j exp(L_j − L) O_j, all in fp32.
8-bit keys and values are multiplied as they are stored: a key's scale multiplies its column of the scores, a value's
scale its column of the probabilities. The PyTorch form for the CPU is in kernels/attention/_paged_cpu.py.

Legend: T queries of all sequences, B sequences, Hq query heads, Hkv key/value heads, G query heads per key/value head,
d head dim, P pages in the pool; in a kernel R rows (query · G + head of the group) and K keys of a tile, D d rounded
up to a power of two; L to base 2. (acc, weight, top) is a running softmax: Σ p V, Σ p and the largest score so far,
with p = 2^(score_scale · (score − top)) and score_scale = scale · log2(e).
"""

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kernels.attention._cached_rows import CachedRows
from kernels.attention._flash_cpu import visible_keys
from kernels.attention._kv_quantization import dequantize_rows
from kernels.attention._paged_cpu import MOST_QUERIES_TO_GROUP as MOST_QUERIES_TO_GROUP
from kernels.attention._paged_cpu import GroupedPlan, attend_groups
from kernels.attention._paged_plan import ListedPlan, Tiles, padded_head_dim
from kernels.attention.write_pages import check_page_dtypes
from kernels.attention.write_pages import write_pages as write_pages
from kernels.common.soft_cap import check_soft_cap, soft_capped, soft_capped_tile
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, in_fp32, is_interpreted, num_processors, runs_triton

PagedPlan: TypeAlias = GroupedPlan | ListedPlan
"""What `paged_attention` works out from lengths and block tables; the same for every layer of a step."""

_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ROWS_PER_MERGE = 4


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    kv_lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    visible_slots: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """`paged_attention` in its plainest form: collect each sequence's keys and values, then attend."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    bounds, group, page_size = cu_seqlens_q.tolist(), q.shape[1] // k_pages.shape[2], k_pages.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for b, length in enumerate(kv_lengths.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        num_queries = rows.stop - rows.start
        pages = block_tables[b, : -(-length // page_size)].long()
        keys, values = (
            dequantize_rows(x[pages], None if scales is None else scales[pages], q.dtype).flatten(0, 1)[:length]
            for x, scales in ((k_pages, k_scales), (v_pages, v_scales))
        )
        visible = visible_keys(num_queries, length, True, window, q.device)
        if tree_mask is not None:
            new = min(num_queries, length)
            visible[:, length - new :] &= tree_mask[rows, num_queries - new : num_queries]
        if visible_slots is not None:
            present = visible_slots[pages].flatten()[:length]
            visible &= present
            values = values.masked_fill(~present[:, None, None], 0)
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = soft_capped(torch.einsum("nhd,mhd->hnm", scale * q[rows], keys), soft_cap)
        weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1).masked_fill(
            ~visible.any(-1, keepdim=True), 0
        )
        out[rows] = torch.einsum("hnm,mhd->nhd", weights, values)
    return out


@triton.jit
def _attend_keys(
    b_acc, b_weight, b_top, rows, pages, strides, low, high, first_new, window, score_scale,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    QUANTIZED: tl.constexpr, HIDES: tl.constexpr, TREE: tl.constexpr, MASKED: tl.constexpr,
    VALUE_TYPE: tl.constexpr, EVICT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Fold the keys low ≤ position < high into (acc, weight, top).

    rows: queries, position of each row's own key, which rows exist, and where the tree masks of the rows start;
    first_new: position of the first new token; MASKED: not every row sees every key of every tile that has some key in
    the range. Otherwise the range consists of whole tiles.
    """
    b_q, b_last, m_rows, p_tree, o_tree = rows
    p_table, p_k, p_v, p_k_scales, p_v_scales, p_visible = pages
    k_page, k_place, v_page, v_place, scale_page, scale_place, visible_page, visible_place = strides
    column = tl.arange(0, D)
    for first in range(low // KEYS * KEYS, high, KEYS):
        b_position = first + tl.arange(0, KEYS)
        m_keys = (b_position >= low) & (b_position < high) if MASKED else tl.full([KEYS], True, tl.int1)
        b_page = tl.load(p_table + b_position // PAGE, mask=m_keys, other=0).to(tl.int64)
        b_place = b_position % PAGE
        if HIDES:
            o_visible = b_page * visible_page + b_place * visible_place
            m_keys = m_keys & (tl.load(p_visible + o_visible, mask=m_keys, other=0) != 0)
        m_tile = m_keys[:, None] & (column < HEAD_DIM)[None, :]
        o_k = b_page * k_page + b_place * k_place
        b_k = tl.load(p_k + o_k[:, None] + column[None, :], mask=m_tile, other=0.0, eviction_policy=EVICT)
        b_scores = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")
        o_scale = b_page * scale_page + b_place * scale_place
        if QUANTIZED:
            b_scores = b_scores * tl.load(p_k_scales + o_scale, mask=m_keys, other=0.0)[None, :]
        if LIMIT is not None:
            b_scores = soft_capped_tile(b_scores, LIMIT)
        if MASKED:
            m_scores = m_keys[None, :] & (b_position[None, :] <= b_last[:, None])
            if WINDOWED:
                m_scores = m_scores & (b_position[None, :] > b_last[:, None] - window)
            if TREE:
                b_new = b_position - first_new
                m_tree = m_rows[:, None] & (m_keys & (b_new >= 0))[None, :]
                m_scores = m_scores & (tl.load(p_tree + o_tree[:, None] + b_new[None, :], mask=m_tree, other=1) != 0)
            b_scores = tl.where(m_scores, b_scores, float("-inf"))

        b_new_top = tl.maximum(b_top, tl.max(b_scores, axis=1))
        # The top of a row that has seen no key is −inf: its powers must be 0, not 2^(−inf + inf).
        b_scaled_top = tl.where(b_new_top == float("-inf"), 0.0, b_new_top) * score_scale
        b_p = tl.exp2(tl.fma(b_scores, score_scale, -b_scaled_top[:, None]))
        b_shrink = tl.exp2(b_top * score_scale - b_scaled_top)
        b_weight = b_weight * b_shrink + tl.sum(b_p, axis=1)
        b_top = b_new_top
        if QUANTIZED:
            b_p = b_p * tl.load(p_v_scales + o_scale, mask=m_keys, other=0.0)[None, :]
        o_v = b_page * v_page + b_place * v_place
        b_v = tl.load(p_v + o_v[:, None] + column[None, :], mask=m_tile, other=0.0, eviction_policy=EVICT)
        b_acc = tl.dot(b_p.to(VALUE_TYPE), b_v.to(VALUE_TYPE), b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_weight, b_top


@triton.jit
def _attend_range(
    rows, pages, strides, low, high, first_new, first_query, last_query, window, score_scale,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, QUANTIZED: tl.constexpr, HIDES: tl.constexpr, TREE: tl.constexpr,
    SPLIT_LOOP: tl.constexpr, VALUE_TYPE: tl.constexpr, EVICT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Return (result [R, D], L [R]) of the rows over the keys low ≤ position < high; (0, −inf) for none.

    SPLIT_LOOP: the tiles that all rows see in full go through a loop without masks. It pays for many rows, and where
    the mask of a tree is read; otherwise one loop keeps the loads flowing from the first key to the last. Two loops
    may round differently, so a batch-invariant plan has one.
    """
    b_acc, b_weight = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS], tl.float32)
    b_top = tl.full([ROWS], float("-inf"), tl.float32)
    full_low, full_high = low, low
    if SPLIT_LOOP:
        if WINDOWED:
            full_low = tl.maximum(low, first_new + last_query - window + 1)
        full_high = tl.minimum(high, first_new if TREE else first_new + first_query + 1)
        full_low = (full_low + KEYS - 1) // KEYS * KEYS
        full_high = tl.maximum(full_high // KEYS * KEYS, full_low)
    for LOOP in tl.static_range((0 if WINDOWED else 1) if SPLIT_LOOP else 2, 3):
        if LOOP == 0:
            loop_low, loop_high = low, tl.minimum(full_low, high)
        elif LOOP == 1:
            loop_low, loop_high = full_low, full_high
        else:
            loop_low, loop_high = full_high, high
        b_acc, b_weight, b_top = _attend_keys(
            b_acc, b_weight, b_top, rows, pages, strides, loop_low, loop_high, first_new, window, score_scale,
            PAGE, HEAD_DIM, D, KEYS, WINDOWED, QUANTIZED, HIDES, TREE, LOOP != 1, VALUE_TYPE, EVICT, LIMIT,
        )  # fmt: skip
    b_some_weight = tl.where(b_weight > 0, b_weight, 1.0)
    return b_acc / b_some_weight[:, None], b_top * score_scale + tl.log2(b_some_weight)


@triton.jit
def _merge(b_total, b_weight, b_top, b_out, b_l):
    """Add the result b_out [R, D] with L = b_l [R] to (total, weight, top).

    With nothing there yet the result itself comes out, and a result without keys changes nothing, to the last bit. The
    products are fused explicitly, so that every kernel rounds alike.
    """
    b_new_top = tl.maximum(b_top, b_l)
    b_finite_top = tl.where(b_new_top == float("-inf"), 0.0, b_new_top)
    b_shrink, b_share = tl.exp2(b_top - b_finite_top), tl.exp2(b_l - b_finite_top)
    b_total = tl.fma(b_total, b_shrink[:, None], b_out * b_share[:, None])
    return b_total, tl.fma(b_weight, b_shrink, b_share), b_new_top


@triton.jit(do_not_specialize=["most_items", "num_sequences", "window", "stride_table", "stride_tree"])
def _attend_kernel(
    p_q, p_k, p_v, p_k_scales, p_v_scales, p_visible, p_tree, p_tables, p_items, p_firsts, p_out, p_partial, p_l,
    most_items, num_sequences, window, score_scale, stride_table, stride_tree, stride_q, stride_q_head,
    stride_k_page, stride_k_place, stride_k_head, stride_v_page, stride_v_place, stride_v_head,
    stride_scale_page, stride_scale_place, stride_scale_head, stride_visible_page, stride_visible_place,
    PAGE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr, QUANTIZED: tl.constexpr,
    HIDES: tl.constexpr, TREE: tl.constexpr, SPLIT_LOOP: tl.constexpr, QUERY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr, EVICT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Work through the items: the result of each goes to p_out [T, Hq, d] or, of a split, to p_partial and p_l.

    Grid: any. CHUNK > 0 in a batch-invariant plan: keys are attended in chunks of that many, and the results merged
    in order, here or, where the chunks are items of their own, by `_merge_kernel`.
    """
    column, score_scale = tl.arange(0, D), in_fp32(score_scale)
    for task in range(tl.program_id(0), tl.load(p_firsts + num_sequences + 1) * KV_HEADS, tl.num_programs(0)):
        head = tl.cast(task % KV_HEADS, tl.int64)
        p_item = p_items + task // KV_HEADS
        table, start = tl.load(p_item).to(tl.int64), tl.load(p_item + most_items).to(tl.int64)
        queries, first_row = tl.load(p_item + 2 * most_items), tl.load(p_item + 3 * most_items)
        low, high = tl.load(p_item + 4 * most_items), tl.load(p_item + 5 * most_items)
        first_new = tl.load(p_item + 6 * most_items) - queries
        partial = tl.load(p_item + 7 * most_items).to(tl.int64)

        b_row = first_row + tl.arange(0, ROWS)
        b_query, b_head = b_row // GROUP, head * GROUP + b_row % GROUP
        first_query, last_query = first_row // GROUP, tl.minimum((first_row + ROWS - 1) // GROUP, queries - 1)
        m_rows = b_row < queries * GROUP
        m_out = m_rows[:, None] & (column < HEAD_DIM)[None, :]
        o_q = (start + b_query) * stride_q + b_head * stride_q_head
        b_q = tl.load(p_q + o_q[:, None] + column[None, :], mask=m_out, other=0.0).to(QUERY_TYPE)
        o_tree = (b_query - first_query) * stride_tree  # within the tile: 32 bits are enough
        rows = (b_q, first_new + b_query, m_rows, p_tree + (start + first_query) * stride_tree, o_tree)
        p_k_head, p_v_head = p_k + head * stride_k_head, p_v + head * stride_v_head
        p_k_scale, p_v_scale = p_k_scales, p_v_scales
        if QUANTIZED:
            p_k_scale, p_v_scale = p_k_scales + head * stride_scale_head, p_v_scales + head * stride_scale_head
        pages = (p_tables + table * stride_table, p_k_head, p_v_head, p_k_scale, p_v_scale, p_visible)
        strides = (
            stride_k_page, stride_k_place, stride_v_page, stride_v_place,
            stride_scale_page, stride_scale_place, stride_visible_page, stride_visible_place,
        )  # fmt: skip

        if CHUNK > 0:
            b_out, b_weight = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS], tl.float32)
            b_top = tl.full([ROWS], float("-inf"), tl.float32)
            for first in range(low // CHUNK * CHUNK, high, CHUNK):
                b_chunk, b_chunk_l = _attend_range(
                    rows, pages, strides, tl.maximum(low, first), tl.minimum(high, first + CHUNK),
                    first_new, first_query, last_query, window, score_scale,
                    PAGE, HEAD_DIM, D, ROWS, KEYS, WINDOWED, QUANTIZED, HIDES, TREE, SPLIT_LOOP, VALUE_TYPE, EVICT,
                    LIMIT,
                )  # fmt: skip
                b_out, b_weight, b_top = _merge(b_out, b_weight, b_top, b_chunk, b_chunk_l)
            b_some_weight = tl.where(b_weight > 0, b_weight, 1.0)
            b_out, b_l = tl.div_rn(b_out, b_some_weight[:, None]), b_top + tl.log2(b_some_weight)
        else:
            b_out, b_l = _attend_range(
                rows, pages, strides, low, high, first_new, first_query, last_query, window, score_scale,
                PAGE, HEAD_DIM, D, ROWS, KEYS, WINDOWED, QUANTIZED, HIDES, TREE, SPLIT_LOOP, VALUE_TYPE, EVICT, LIMIT,
            )  # fmt: skip

        if partial < 0:
            o_out = ((start + b_query) * KV_HEADS * GROUP + b_head) * HEAD_DIM
            tl.store(p_out + o_out[:, None] + column[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            o_l = (partial * KV_HEADS + head) * ROWS + tl.arange(0, ROWS)
            tl.store(p_l + o_l, b_l, mask=m_rows)
            tl.store(p_partial + o_l[:, None] * HEAD_DIM + column[None, :], b_out, mask=m_out)


@triton.jit(do_not_specialize=["most_merges", "num_sequences"])
def _merge_kernel(
    p_partial, p_l, p_merges, p_firsts, p_out, most_merges, num_sequences,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of each split tile, MERGED rows at a time, in the order of the keys. Grid: any."""
    PARTS: tl.constexpr = ROWS // MERGED
    column = tl.arange(0, D)
    num_tasks = tl.load(p_firsts + 3 * num_sequences + 5) * KV_HEADS * PARTS
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        p_merge = p_merges + task // (KV_HEADS * PARTS)
        head = tl.cast(task // PARTS % KV_HEADS, tl.int64)
        start, queries = tl.load(p_merge).to(tl.int64), tl.load(p_merge + most_merges)
        first_partial = tl.load(p_merge + 3 * most_merges).to(tl.int64)
        distance, splits = tl.load(p_merge + 4 * most_merges), tl.load(p_merge + 5 * most_merges)
        o_row = task % PARTS * MERGED + tl.arange(0, MERGED)
        b_row = tl.load(p_merge + 2 * most_merges) + o_row
        m_rows = b_row < queries * GROUP
        b_total, b_weight = tl.zeros([MERGED, D], tl.float32), tl.zeros([MERGED], tl.float32)
        b_top = tl.full([MERGED], float("-inf"), tl.float32)
        # Eight at a time: their loads do not wait for one another.
        for first in range(0, splits, 8):
            for more in tl.static_range(8):
                m_split = m_rows & (first + more < splits)
                o_l = ((first_partial + (first + more) * distance) * KV_HEADS + head) * ROWS + o_row
                b_l = tl.load(p_l + o_l, mask=m_split, other=float("-inf"))
                m_out = m_split[:, None] & (column < HEAD_DIM)[None, :]
                b_out = tl.load(p_partial + o_l[:, None] * HEAD_DIM + column[None, :], mask=m_out, other=0.0)
                b_total, b_weight, b_top = _merge(b_total, b_weight, b_top, b_out, b_l)
        b_total = tl.div_rn(b_total, tl.where(b_weight > 0, b_weight, 1.0)[:, None])
        o_out = ((start + b_row // GROUP) * KV_HEADS * GROUP + head * GROUP + b_row % GROUP) * HEAD_DIM
        m_out = m_rows[:, None] & (column < HEAD_DIM)[None, :]
        tl.store(p_out + o_out[:, None] + column[None, :], b_total.to(p_out.dtype.element_ty), mask=m_out)


def plan_paged_attention(
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    kv_lengths: Tensor,
    page_size: int,
    window: int | None = None,
    *,
    batch_invariant: bool = False,
    tiles: Tiles | None = None,
    table_rows: Tensor | None = None,
    num_busy: int | None = None,
) -> PagedPlan:
    """Prepare the `paged_attention` calls of a step, which share block tables, lengths and window.

    batch_invariant: in the Triton form a query's result then depends on nothing but itself and the keys it sees, to
    the last bit: not on other sequences, nor on how a prompt is cut into chunks or how many drafted tokens are
    verified at once. In the PyTorch form it does not depend on other sequences. `tiles`: how the Triton form cuts the
    work, instead of its own choice. `table_rows` [B] int32: which row of the block tables is each sequence's, where it
    is not its own number. `num_busy`: sequences that the Triton form cuts its work for, where others only fill up a
    batch. Made within the capture of a CUDA graph, the plan is renewed by each replay.
    """
    if runs_triton(block_tables):
        most_keys = block_tables.shape[1] * page_size
        return ListedPlan(cu_seqlens_q, kv_lengths, most_keys, window, batch_invariant, tiles, table_rows, num_busy)
    return GroupedPlan(
        block_tables, cu_seqlens_q, kv_lengths, page_size=page_size, window=window, batch_invariant=batch_invariant,
        table_rows=table_rows,
    )  # fmt: skip


def renew_plan(plan: PagedPlan, block_tables: Tensor, cu_seqlens_q: Tensor, kv_lengths: Tensor) -> None:
    """Make a plan of the CPU that of other tables and lengths, so that calls captured with it follow them.

    No sequence may have more than `MOST_QUERIES_TO_GROUP` queries. ValueError for a plan of the Triton form: it reads
    its tensors anew whenever its launches are replayed.
    """
    if isinstance(plan, ListedPlan):
        raise ValueError("plans of the Triton form are renewed by their tensors")
    plan.renew(block_tables, cu_seqlens_q, kv_lengths)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    kv_lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    plan: PagedPlan | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    visible_slots: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """Attend over paged keys and values.

    q [T, Hq, d]; k_pages and v_pages [P, page, Hkv, d]; block_tables [B, max_pages] int32; cu_seqlens_q [B+1] int32;
    kv_lengths [B] int32; `window`: number of keys a query sees, itself included; `scale` defaults to 1/sqrt(d);
    `soft_cap`: what scores tend to, if anything; `plan`: the result of `plan_paged_attention` for the same block
    tables, lengths and window.
    Pages have the dtype of q, or int8 or float8_e4m3fn with `k_scales` and `v_scales` [P, page, Hkv] fp32 that
    multiply them. `visible_slots` [P, page] bool: a slot with False has no key here (mixture-of-depths: its token was
    routed past this layer). `tree_mask` [T, M] bool, M ≥ the queries of any sequence: entry [t, j] says whether query t
    sees the j-th new token of its own sequence; it hides keys and shows none that come later. Under a window, tokens
    of a tree count as those of a chain do, one by one in their order.
    Returns [T, Hq, d] in the dtype of q. For inference only. What lies in slots beyond a sequence's length, outside
    its window or hidden is not used. Raises ValueError where dtypes or layouts do not fit.
    """
    check_page_dtypes(q.dtype, k_pages, v_pages, k_scales, v_scales)
    check_soft_cap(soft_cap)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if plan is None:
        plan = plan_paged_attention(block_tables, cu_seqlens_q, kv_lengths, k_pages.shape[1], window)
    if isinstance(plan, ListedPlan):
        pages = _Pages(k_pages, v_pages, k_scales, v_scales, visible_slots)
        return _launch(q, pages, block_tables, plan, scale=scale, soft_cap=soft_cap, tree_mask=tree_mask)
    if visible_slots is None and tree_mask is None:
        k_slots, v_slots = CachedRows.of_pages(k_pages, k_scales), CachedRows.of_pages(v_pages, v_scales)
        return attend_groups(q, k_slots, v_slots, plan, scale, soft_cap)
    return paged_attention_reference(
        q.float(), k_pages, v_pages, block_tables, cu_seqlens_q, kv_lengths, window=window, scale=scale,
        soft_cap=soft_cap, k_scales=k_scales, v_scales=v_scales, visible_slots=visible_slots, tree_mask=tree_mask,
    ).to(q.dtype)  # fmt: skip


class _Pages(NamedTuple):
    """Keys and values of one layer and what belongs to them."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    visible: Tensor | None


def _launch(
    q: Tensor,
    pages: _Pages,
    block_tables: Tensor,
    plan: ListedPlan,
    *,
    scale: float,
    soft_cap: float | None,
    tree_mask: Tensor | None,
) -> Tensor:
    """Attend in two launches, neither of which depends on lengths."""
    _check_layout(q, pages, block_tables, scale=scale, tree_mask=tree_mask)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out
    work, (page_size, num_kv_heads) = plan.work_for(q, pages.k), pages.k.shape[1:3]
    tiles = work.tiles
    partial = q.new_empty((work.num_partials, num_kv_heads, tiles.rows, head_dim), dtype=torch.float32)
    partial_l = q.new_empty(partial.shape[:3], dtype=torch.float32)
    shape = {
        "GROUP": num_heads // num_kv_heads, "KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim,
        "D": padded_head_dim(head_dim), "ROWS": tiles.rows,
    }  # fmt: skip
    quantized = pages.k_scales is not None
    value_type = tl.bfloat16 if quantized and q.dtype == torch.float16 else _TRITON_TYPES[q.dtype]
    programs = num_processors(q.device)
    # Triton spreads its stages evenly over loads that wait for one another: table, hidden slots, keys.
    loads_in_a_row = 3 if pages.visible is not None and tiles.rows < 64 else 2
    _attend_kernel[(min(work.items.shape[1] * num_kv_heads, programs * tiles.residents),)](
        q, pages.k, pages.v, *(q if x is None else x for x in (pages.k_scales, pages.v_scales)),  # q: not read
        *(q if x is None else x.view(torch.uint8) for x in (pages.visible, tree_mask)), block_tables, work.items,
        work.firsts, out, partial, partial_l,
        work.items.shape[1], plan.kv_lengths.shape[0], plan.window or 0, scale / math.log(2), block_tables.stride(0),
        0 if tree_mask is None else tree_mask.stride(0), *q.stride()[:2], *pages.k.stride()[:3], *pages.v.stride()[:3],
        *(pages.k_scales.stride() if pages.k_scales is not None else (0, 0, 0)),
        *(pages.visible.stride() if pages.visible is not None else (0, 0)),
        PAGE=page_size, KEYS=tiles.keys, CHUNK=tiles.chunk if plan.batch_invariant else 0,
        WINDOWED=plan.window is not None, QUANTIZED=quantized, HIDES=pages.visible is not None,
        TREE=tree_mask is not None, SPLIT_LOOP=_split_loop_pays(tiles.rows, plan, pages, tree_mask),
        QUERY_TYPE=tl.float32 if is_interpreted(q) else _TRITON_TYPES[q.dtype],
        VALUE_TYPE=tl.float32 if is_interpreted(q) else value_type,
        EVICT="evict_first" if tiles.rows <= 32 else "", LIMIT=None if soft_cap is None else soft_cap / scale,
        num_warps=tiles.warps,
        num_stages=1 + tiles.ahead * loads_in_a_row, **shape,
    )  # fmt: skip
    # Also where nothing can be split: no context is the first to need a merge, which would have to be compiled then.
    most_tasks = max(work.merges.shape[1] * num_kv_heads * (tiles.rows // _ROWS_PER_MERGE), 1)
    _merge_kernel[(min(most_tasks, programs * 16),)](
        partial, partial_l, work.merges, work.firsts, out, work.merges.shape[1], plan.kv_lengths.shape[0],
        MERGED=_ROWS_PER_MERGE, **shape,
    )  # fmt: skip
    return out


def _split_loop_pays(rows: int, plan: ListedPlan, pages: _Pages, tree_mask: Tensor | None) -> bool:
    """Return whether keys that all rows see go through a loop without masks, as `_attend_range` explains."""
    if plan.batch_invariant or pages.visible is not None:
        return False
    return plan.window is None if tree_mask is not None else rows >= 64


def _check_layout(q: Tensor, pages: _Pages, block_tables: Tensor, *, scale: float, tree_mask: Tensor | None) -> None:
    """Raise ValueError where the kernels could not read what they are given."""
    check_rows(q=q)
    if q.shape[1] % pages.k.shape[2] or q.shape[2] != pages.k.shape[3] or pages.k.shape != pages.v.shape:
        raise ValueError(f"q {tuple(q.shape)} does not fit pages {tuple(pages.k.shape)} and {tuple(pages.v.shape)}")
    if pages.k.stride(-1) != 1 or pages.v.stride(-1) != 1:
        raise ValueError("pages must be contiguous in their last dimension, the head dim")
    if scale <= 0:
        raise ValueError(f"the scale is {scale}; it must be positive")
    if q.shape[2] > 256:
        raise ValueError(f"the head dim is {q.shape[2]}; at most 256 is supported")
    if block_tables.stride(-1) != 1 and block_tables.shape[-1] > 1:
        raise ValueError("block_tables must be contiguous in its last dimension")
    if pages.k_scales is not None and pages.v_scales is not None and pages.k_scales.stride() != pages.v_scales.stride():
        raise ValueError("k_scales and v_scales must have one layout")
    if tree_mask is not None and (tree_mask.shape[0] != q.shape[0] or tree_mask.stride(-1) != 1):
        raise ValueError(f"tree_mask has {tree_mask.shape[0]} rows for {q.shape[0]} queries, or strided columns")
