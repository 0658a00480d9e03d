"""Attention over a flat ragged batch of documents, forward and backward.

    O = softmax(scale · Q Kᵀ + mask) V      within each document

Masks are aligned at the bottom right: of a document with s_q queries and s_k keys, query i sees the keys
j ≤ i + s_k − s_q (causal), and with a window w only the last w of them: j > i + s_k − s_q − w. A query that sees no
key gives 0 and receives no gradient. Each key/value head serves G = Hq/Hkv consecutive query heads. Under a soft cap a
score s, scaled, is cap · tanh(s / cap) before the mask, and dS is multiplied with the slope of that
(kernels/common/soft_cap.py).

With S = scale · log2(e) · Q Kᵀ, forward walks the keys once, keeps the maximum and the sum of 2^S of each query, and
saves L = log2 Σ_j 2^S (base 2; +inf for a query without keys). Backward computes P = 2^(S − L) anew:

    δ = rowsum(dO ∘ O),  dS = P ∘ (dO Vᵀ − δ),  dQ = scale · dS K,  dK = scale · dSᵀ Q,  dV = Pᵀ dO

Source: https://arxiv.org/abs/2307.08691. On the CPU, PyTorch does it: kernels/attention/_flash_cpu.py.

Legend: T queries of all documents, S keys of all documents, B documents, Hq query heads, Hkv key/value heads,
G query heads per key/value head, d head dim (WIDTH: the next power of two); within one document s_q queries and
s_k keys. Document B stands for the rows past the last document: its queries see nothing, nothing sees its keys.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.attention import _flash_tiles as cut
from kernels.attention._flash_cpu import Scores, attend_documents, documents, visible_keys
from kernels.attention._flash_cpu import attend_causally as attend_causally
from kernels.attention._flash_tiles import Inputs, Settings
from kernels.common.ragged_tiles import (
    as_operand,
    dot,
    head_rows,
    load_numbers,
    load_tile,
    plan_tiles,
    store_tile,
    tile_mask,
    tile_pointers,
    tile_source,
    work_item,
)
from kernels.common.soft_cap import check_soft_cap, soft_cap_slopes_tile, soft_capped, soft_capped_tile
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, in_fp32, runs_triton

_LOG2_E = tl.constexpr(1.4426950408889634)
# These change from batch to batch; no kernel is compiled anew because one of them is 1 or a multiple of 16.
_VARYING = ("num_queries", "num_heads", "num_kv_heads", "group", "section", "window")


def flash_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """`flash_attention` in its plainest form: one document and one matrix of scores at a time."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // k.shape[1]
    outputs = [q[:0]]
    for queries, keys in documents(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        q_heads = q[queries].transpose(0, 1)
        k_heads = k[keys].repeat_interleave(group, dim=1).transpose(0, 1)
        v_heads = v[keys].repeat_interleave(group, dim=1).transpose(0, 1)
        visible = visible_keys(q_heads.shape[1], k_heads.shape[1], causal, window, q.device)
        scores = soft_capped(scale * q_heads @ k_heads.transpose(1, 2), soft_cap)
        weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1).masked_fill(
            ~visible.any(-1, keepdim=True), 0
        )
        outputs.append((weights @ v_heads).transpose(0, 1))
    return torch.cat(outputs)


@triton.jit
def _visible(o_last, o_key, s_k, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Which keys a query sees; o_last: the key that stands beside it."""
    m_visible = o_key <= o_last if CAUSAL else o_key < s_k
    if WINDOWED:
        m_visible &= o_key > o_last - window
    return m_visible


@triton.jit
def _keys_seen(
    query, s_q, s_k, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The keys that a tile of queries sees, as bounds of three parts: in the middle part every query sees every key.

    The first part holds the edge of the window, the last one the diagonal or the end. Parts start at multiples of KEYS.
    """
    first = query + s_k - s_q
    last = tl.minimum(query + QUERIES, s_q) - 1 + s_k - s_q
    begin = tl.zeros_like(first)
    middle_begin = begin
    middle_end = s_k // KEYS * KEYS
    end = s_k
    if CAUSAL:
        middle_end = tl.maximum(first + 1, 0) // KEYS * KEYS
        end = tl.maximum(last + 1, 0)
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0) // KEYS * KEYS
        middle_begin = tl.cdiv(tl.maximum(last - window + 1, 0), KEYS) * KEYS
    is_empty = middle_begin >= middle_end
    return begin, tl.where(is_empty, begin, middle_begin), tl.where(is_empty, begin, middle_end), end


@triton.jit
def _queries_seeing(
    key, s_q, s_k, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The queries that see a tile of keys, as bounds of three parts: in the middle part every query sees every key.

    The first part holds the diagonal, the last one the edge of the window or the end. Parts start at multiples of
    QUERIES. A tile that ends after the last key has no middle part.
    """
    first = key + s_q - s_k
    last = first + KEYS - 1
    begin = tl.zeros_like(first)
    middle_begin = begin
    middle_end = s_q // QUERIES * QUERIES
    end = s_q
    if CAUSAL:
        begin = tl.maximum(first, 0) // QUERIES * QUERIES
        middle_begin = tl.cdiv(tl.maximum(last, 0), QUERIES) * QUERIES
    if WINDOWED:
        middle_end = tl.minimum(middle_end, tl.maximum(first + window, 0) // QUERIES * QUERIES)
        end = tl.minimum(end, tl.maximum(last + window, 0))
    is_empty = (middle_begin >= middle_end) | (key + KEYS > s_k)
    return begin, tl.where(is_empty, begin, middle_begin), tl.where(is_empty, begin, middle_end), end


@triton.jit(do_not_specialize=_VARYING)
def _forward_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_tiles, p_count,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    num_queries, num_heads, group, section, window, scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LIMIT: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write O [T, Hq, d] and L [Hq, T]; an item is a tile of queries and a query head."""
    num_tiles, scale = tl.load(p_count), in_fp32(scale)
    scale_log2 = scale * _LOG2_E
    for item in tl.range(tl.program_id(0), num_tiles * num_heads, tl.num_programs(0)):
        head, start_q, s_q, start_k, s_k, query = work_item(item, p_tiles, num_tiles, section, num_heads)
        o_query = query + tl.arange(0, QUERIES)
        o_last = o_query + s_k - s_q
        q_rows = head_rows(p_q, start_q, head, stride_qt, stride_qh)
        k_rows = head_rows(p_k, start_k, head // group, stride_kt, stride_kh)
        v_rows = head_rows(p_v, start_k, head // group, stride_vt, stride_vh)
        k_source = tile_source(k_rows, s_k, stride_kt, D, KEYS, WIDTH, DESCRIPTORS)
        v_source = tile_source(v_rows, s_k, stride_vt, D, KEYS, WIDTH, DESCRIPTORS)
        b_q = load_tile(q_rows, query, s_q, stride_qt, True, D, QUERIES, WIDTH, False)
        b_out = tl.zeros([QUERIES, WIDTH], tl.float32)
        b_max = tl.full([QUERIES], float("-inf"), tl.float32)
        b_sum = tl.zeros([QUERIES], tl.float32)
        bounds = _keys_seen(query, s_q, s_k, window, CAUSAL, WINDOWED, QUERIES, KEYS)
        for PART in tl.static_range(0 if WINDOWED else 1, 3):
            for key in tl.range(bounds[PART], bounds[PART + 1], KEYS):
                b_k = load_tile(k_source, key, s_k, stride_kt, PART != 1, D, KEYS, WIDTH, DESCRIPTORS)
                b_scores = dot(b_q, tl.trans(b_k), tl.zeros([QUERIES, KEYS], tl.float32), INTERPRETED)
                if LIMIT is not None:
                    b_scores = soft_capped_tile(b_scores, LIMIT)
                if PART != 1:
                    o_key = key + tl.arange(0, KEYS)
                    m_visible = _visible(o_last[:, None], o_key[None, :], s_k, window, CAUSAL, WINDOWED)
                    b_scores = tl.where(m_visible, b_scores, float("-inf"))
                b_new_max = tl.maximum(b_max, tl.max(b_scores, 1) * scale_log2)
                b_shift = b_new_max
                if PART != 1:
                    b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
                b_p = tl.exp2(b_scores * scale_log2 - b_shift[:, None])
                b_decay = tl.exp2(b_max - b_shift)
                b_sum = b_sum * b_decay + tl.sum(b_p, 1)
                b_v = load_tile(v_source, key, s_k, stride_vt, PART != 1, D, KEYS, WIDTH, DESCRIPTORS)
                b_out = dot(as_operand(b_p, b_v.dtype, INTERPRETED), b_v, b_out * b_decay[:, None], INTERPRETED)
                b_max = b_new_max
        is_blind = b_sum == 0.0
        b_sum = tl.where(is_blind, 1.0, b_sum)
        b_lse = tl.where(is_blind, float("inf"), b_max + tl.log2(b_sum))
        tl.store(head_rows(p_lse, start_q, head, 1, num_queries) + o_query, b_lse, mask=o_query < s_q)
        out_rows = head_rows(p_out, start_q, head, num_heads * D, D)
        store_tile(out_rows, b_out / b_sum[:, None], query, s_q, num_heads * D, D, QUERIES, WIDTH)


@triton.jit(do_not_specialize=_VARYING)
def _grad_queries_kernel(
    p_q, p_k, p_v, p_out, p_grad_out, p_lse, p_delta, p_grad_q, p_tiles, p_count,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    num_queries, num_heads, group, section, window, scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LIMIT: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ONLY_DELTA: tl.constexpr, DESCRIPTORS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write δ [Hq, T] and, unless ONLY_DELTA, dQ [T, Hq, d]; an item is a tile of queries and a query head."""
    num_tiles, scale = tl.load(p_count), in_fp32(scale)
    scale_log2 = scale * _LOG2_E
    for item in tl.range(tl.program_id(0), num_tiles * num_heads, tl.num_programs(0)):
        head, start_q, s_q, start_k, s_k, query = work_item(item, p_tiles, num_tiles, section, num_heads)
        o_query = query + tl.arange(0, QUERIES)
        out_rows = head_rows(p_out, start_q, head, num_heads * D, D)
        grad_rows = head_rows(p_grad_out, start_q, head, num_heads * D, D)
        b_out = load_tile(out_rows, query, s_q, num_heads * D, True, D, QUERIES, WIDTH, False)
        b_grad_out = load_tile(grad_rows, query, s_q, num_heads * D, True, D, QUERIES, WIDTH, False)
        b_delta = tl.sum(b_out.to(tl.float32) * b_grad_out.to(tl.float32), 1)
        tl.store(head_rows(p_delta, start_q, head, 1, num_queries) + o_query, b_delta, mask=o_query < s_q)
        if not ONLY_DELTA:
            o_last = o_query + s_k - s_q
            q_rows = head_rows(p_q, start_q, head, stride_qt, stride_qh)
            k_rows = head_rows(p_k, start_k, head // group, stride_kt, stride_kh)
            v_rows = head_rows(p_v, start_k, head // group, stride_vt, stride_vh)
            k_source = tile_source(k_rows, s_k, stride_kt, D, KEYS, WIDTH, DESCRIPTORS)
            v_source = tile_source(v_rows, s_k, stride_vt, D, KEYS, WIDTH, DESCRIPTORS)
            b_q = load_tile(q_rows, query, s_q, stride_qt, True, D, QUERIES, WIDTH, False)
            lse_rows = head_rows(p_lse, start_q, head, 1, num_queries)
            b_lse = load_numbers(lse_rows, o_query, s_q, float("inf"), True)
            b_grad_q = tl.zeros([QUERIES, WIDTH], tl.float32)
            bounds = _keys_seen(query, s_q, s_k, window, CAUSAL, WINDOWED, QUERIES, KEYS)
            for PART in tl.static_range(0 if WINDOWED else 1, 3):
                for key in tl.range(bounds[PART], bounds[PART + 1], KEYS):
                    b_k = load_tile(k_source, key, s_k, stride_kt, PART != 1, D, KEYS, WIDTH, DESCRIPTORS)
                    b_v = load_tile(v_source, key, s_k, stride_vt, PART != 1, D, KEYS, WIDTH, DESCRIPTORS)
                    b_scores = dot(b_q, tl.trans(b_k), tl.zeros([QUERIES, KEYS], tl.float32), INTERPRETED)
                    b_grad_p = dot(b_grad_out, tl.trans(b_v), tl.zeros([QUERIES, KEYS], tl.float32), INTERPRETED)
                    if LIMIT is not None:
                        b_scores = soft_capped_tile(b_scores, LIMIT)
                    b_p = tl.exp2(b_scores * scale_log2 - b_lse[:, None])
                    if PART != 1:
                        o_key = key + tl.arange(0, KEYS)
                        m_visible = _visible(o_last[:, None], o_key[None, :], s_k, window, CAUSAL, WINDOWED)
                        b_p = tl.where(m_visible, b_p, 0.0)
                    b_grad_scores = b_p * (b_grad_p - b_delta[:, None])
                    if LIMIT is not None:
                        b_grad_scores *= soft_cap_slopes_tile(b_scores, LIMIT)
                    b_grad_q = dot(as_operand(b_grad_scores, b_k.dtype, INTERPRETED), b_k, b_grad_q, INTERPRETED)
            grad_q_rows = head_rows(p_grad_q, start_q, head, num_heads * D, D)
            store_tile(grad_q_rows, b_grad_q * scale, query, s_q, num_heads * D, D, QUERIES, WIDTH)


@triton.jit(do_not_specialize=_VARYING)
def _grad_keys_kernel(
    p_q, p_k, p_v, p_grad_out, p_lse, p_delta, p_grad_q, p_grad_k, p_grad_v, p_tiles, p_count,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    num_queries, num_kv_heads, group, section, window, scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LIMIT: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ADD_GRAD_Q: tl.constexpr, DESCRIPTORS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write dK and dV [S, Hkv, d]; if ADD_GRAD_Q, add to dQ, fp32 [T, Hq, d].

    An item is a tile of keys and a key/value head; it sums over the heads and queries that see the tile.
    """
    num_tiles, scale = tl.load(p_count), in_fp32(scale)
    scale_log2 = scale * _LOG2_E
    stride_ot = num_kv_heads * group * D
    for item in tl.range(tl.program_id(0), num_tiles * num_kv_heads, tl.num_programs(0)):
        kv_head, start_k, s_k, start_q, s_q, key = work_item(item, p_tiles, num_tiles, section, num_kv_heads)
        o_key = key + tl.arange(0, KEYS)
        k_rows = head_rows(p_k, start_k, kv_head, stride_kt, stride_kh)
        v_rows = head_rows(p_v, start_k, kv_head, stride_vt, stride_vh)
        b_k = load_tile(k_rows, key, s_k, stride_kt, True, D, KEYS, WIDTH, False)
        b_v = load_tile(v_rows, key, s_k, stride_vt, True, D, KEYS, WIDTH, False)
        b_grad_k = tl.zeros([KEYS, WIDTH], tl.float32)
        b_grad_v = tl.zeros([KEYS, WIDTH], tl.float32)
        bounds = _queries_seeing(key, s_q, s_k, window, CAUSAL, WINDOWED, QUERIES, KEYS)
        for member in tl.range(group):
            head = kv_head * group + member
            q_rows = head_rows(p_q, start_q, head, stride_qt, stride_qh)
            grad_rows = head_rows(p_grad_out, start_q, head, stride_ot, D)
            grad_q_rows = head_rows(p_grad_q, start_q, head, stride_ot, D)
            lse_rows = head_rows(p_lse, start_q, head, 1, num_queries)
            delta_rows = head_rows(p_delta, start_q, head, 1, num_queries)
            q_source = tile_source(q_rows, s_q, stride_qt, D, QUERIES, WIDTH, DESCRIPTORS)
            grad_source = tile_source(grad_rows, s_q, stride_ot, D, QUERIES, WIDTH, DESCRIPTORS)
            for PART in tl.static_range(0 if CAUSAL else 1, 3):
                for query in tl.range(bounds[PART], bounds[PART + 1], QUERIES):
                    o_query = query + tl.arange(0, QUERIES)
                    b_q = load_tile(q_source, query, s_q, stride_qt, PART != 1, D, QUERIES, WIDTH, DESCRIPTORS)
                    b_grad_out = load_tile(
                        grad_source, query, s_q, stride_ot, PART != 1, D, QUERIES, WIDTH, DESCRIPTORS
                    )
                    b_lse = load_numbers(lse_rows, o_query, s_q, float("inf"), PART != 1)
                    b_delta = load_numbers(delta_rows, o_query, s_q, 0.0, PART != 1)
                    b_scores = dot(b_k, tl.trans(b_q), tl.zeros([KEYS, QUERIES], tl.float32), INTERPRETED)
                    b_grad_p = dot(b_v, tl.trans(b_grad_out), tl.zeros([KEYS, QUERIES], tl.float32), INTERPRETED)
                    if LIMIT is not None:
                        b_scores = soft_capped_tile(b_scores, LIMIT)
                    b_p = tl.exp2(b_scores * scale_log2 - b_lse[None, :])
                    if PART != 1:
                        o_last = o_query + s_k - s_q
                        m_visible = _visible(o_last[None, :], o_key[:, None], s_k, window, CAUSAL, WINDOWED)
                        b_p = tl.where(m_visible, b_p, 0.0)
                    b_grad_v = dot(as_operand(b_p, b_q.dtype, INTERPRETED), b_grad_out, b_grad_v, INTERPRETED)
                    b_grad_scores = b_p * (b_grad_p - b_delta[None, :])
                    if LIMIT is not None:
                        b_grad_scores *= soft_cap_slopes_tile(b_scores, LIMIT)
                    b_grad_scores = as_operand(b_grad_scores, b_q.dtype, INTERPRETED)
                    b_grad_k = dot(b_grad_scores, b_q, b_grad_k, INTERPRETED)
                    if ADD_GRAD_Q:
                        b_zero = tl.zeros([WIDTH, QUERIES], tl.float32)
                        b_grad_q = tl.trans(dot(tl.trans(b_k), b_grad_scores, b_zero, INTERPRETED)) * scale
                        tl.atomic_add(
                            tile_pointers(grad_q_rows, query, stride_ot, QUERIES, WIDTH),
                            b_grad_q,
                            mask=tile_mask(query, s_q, D, QUERIES, WIDTH),
                            sem="relaxed",
                        )
        grad_k_rows = head_rows(p_grad_k, start_k, kv_head, num_kv_heads * D, D)
        grad_v_rows = head_rows(p_grad_v, start_k, kv_head, num_kv_heads * D, D)
        store_tile(grad_k_rows, b_grad_k * scale, key, s_k, num_kv_heads * D, D, KEYS, WIDTH)
        store_tile(grad_v_rows, b_grad_v, key, s_k, num_kv_heads * D, D, KEYS, WIDTH)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Attend within each document; differentiable in q, k and v.

    q [T, Hq, d]; k and v [S, Hkv, d]; cu_seqlens_q [B+1] int32: where each document's queries start and end;
    cu_seqlens_k: the same for keys, by default equal to cu_seqlens_q; `window`: number of keys a query sees,
    itself included; `scale` defaults to 1/sqrt(d); `soft_cap`: what scores tend to, if anything. Returns [T, Hq, d] in
    the dtype of q, under autocast in its dtype; rows past the last document are 0.

    On a GPU: fp32, bf16 or fp16 with d ≤ 256, nothing waits for the device. The same input gives the same bits forward.
    Backward, it does so if `deterministic`, by default as `torch.use_deterministic_algorithms` says: dQ is then a sum
    of its own, for which two of five products are computed a second time; otherwise blocks add to it in any order.
    Raises ValueError for a window without causal and for inputs that do not fit together.
    """
    if window is not None and not causal:
        raise ValueError("a window counts the keys up to the query itself: it needs causal=True")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys does not hold the query's own; it must be at least 1")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    check_soft_cap(soft_cap)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    if not runs_triton(q):
        rows = list(documents(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]))
        return attend_documents(q, k, v, rows, Scores(causal, window, scale, soft_cap))
    _check(q, k, v, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    # A window of all keys hides none.
    window = None if window is not None and window >= k.shape[0] else window
    # torch.compile takes no tensor twice, so equal documents stay None.
    documents_q, documents_k = (x if x is None else x.int().contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
    settings = Settings(causal, window, scale, deterministic, soft_cap)
    return _FlashAttention.apply(q, k, v, documents_q, documents_k, settings)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise ValueError for what the kernels cannot compute."""
    check_rows(q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if q.shape[2] > 256:
        raise ValueError(f"the head dim is {q.shape[2]}; Triton kernels take up to 256")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(f"queries are of {cu_seqlens_q.shape[0] - 1} documents, keys of {cu_seqlens_k.shape[0] - 1}")
    if len({x.device for x in (q, k, v, cu_seqlens_q, cu_seqlens_k)}) > 1:
        raise ValueError("q, k, v and cu_seqlens must be on one device")


class _FlashAttention(torch.autograd.Function):
    """Keeps the inputs, O and L; the backward pass computes the probabilities anew."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, settings: Settings
    ) -> Tensor:
        out, lse = _attend(Inputs.of(q, k, v, cu_seqlens_q, cu_seqlens_k), settings)
        ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        inputs = Inputs.of(q, k, v, cu_seqlens_q, cu_seqlens_k)
        settings, grad_out = ctx.settings, grad_out.contiguous()
        delta = torch.empty_like(lse)
        grad_q = _grad_queries(inputs, settings, out, lse, grad_out, delta)
        grad_k, grad_v = _grad_keys(inputs, settings, grad_q, lse, grad_out, delta)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _attend(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return O [T, Hq, d] and L [Hq, T]."""
    hopper = cut.for_hopper(inputs.q, "_flash_hopper")
    if hopper is not None and hopper.supports(inputs, settings):
        return hopper.attend(inputs, settings)
    return _attend_anywhere(inputs, settings)


def _attend_anywhere(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    tiles = cut.choose_tiles(q.shape[2], q.dtype, q.device)
    tile = tiles.forward
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    plan = cut.plan_queries(inputs, tile)
    _forward_kernel[cut.grid_of(plan[0], q, tiles)](
        *(q, k, v, out, lse, *plan),
        *cut.strides_of(inputs),
        num_queries=q.shape[0],
        section=cut.section_of(k, v) * (q.shape[1] // k.shape[1]),
        num_heads=q.shape[1],
        DESCRIPTORS=cut.takes_descriptors(tile, k, v),
        **cut.common_arguments(inputs, settings, tile),
    )
    return out, lse


def _grad_queries(
    inputs: Inputs, settings: Settings, out: Tensor, lse: Tensor, grad_out: Tensor, delta: Tensor
) -> Tensor:
    """Write δ into delta [Hq, T]; return dQ [T, Hq, d], or zeros in fp32 to which `_grad_keys` adds it up."""
    q, k, v = inputs[:3]
    tiles = cut.choose_tiles(q.shape[2], q.dtype, q.device)
    tile = tiles.grad_queries
    is_added_later = tiles.adds_grad_q and not settings.deterministic
    if is_added_later:
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    else:
        grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    plan = cut.plan_queries(inputs, tile)
    _grad_queries_kernel[cut.grid_of(plan[0], q, tiles)](
        *(q, k, v, out, grad_out, lse, delta, grad_q, *plan),
        *cut.strides_of(inputs),
        num_queries=q.shape[0],
        section=cut.section_of(k, v) * (q.shape[1] // k.shape[1]),
        num_heads=q.shape[1],
        ONLY_DELTA=is_added_later,
        DESCRIPTORS=cut.takes_descriptors(tile, k, v),
        **cut.common_arguments(inputs, settings, tile),
    )
    return grad_q


def _grad_keys(
    inputs: Inputs, settings: Settings, grad_q: Tensor, lse: Tensor, grad_out: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dK and dV [S, Hkv, d]; if the order of additions is free, add dQ to grad_q."""
    q, k, v, cu_seqlens_q, cu_seqlens_k = inputs
    hopper = cut.for_hopper(q, "_flash_hopper_backward")
    if hopper is not None and hopper.supports(inputs, settings, grad_out):
        return hopper.grad_keys(inputs, settings, grad_q, lse, grad_out, delta)
    tiles = cut.choose_tiles(q.shape[2], q.dtype, q.device)
    tile = tiles.grad_keys
    grad_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # The first keys of a document are seen by the most queries.
    plan = plan_tiles(cu_seqlens_k, cu_seqlens_q, num_rows=k.shape[0], rows_per_tile=tile.keys, last_first=False)
    _grad_keys_kernel[cut.grid_of(plan[0], k, tiles)](
        *(q, k, v, grad_out, lse, delta, grad_q, grad_k, grad_v, *plan),
        *cut.strides_of(inputs),
        num_queries=q.shape[0],
        section=max(1, cut.section_of(q, grad_out) // (q.shape[1] // k.shape[1])),
        num_kv_heads=k.shape[1],
        ADD_GRAD_Q=tiles.adds_grad_q and not settings.deterministic,
        DESCRIPTORS=cut.takes_descriptors(tile, q, grad_out),
        **cut.common_arguments(inputs, settings, tile),
    )
    return grad_k, grad_v
