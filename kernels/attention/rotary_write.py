"""What stands between the projections and the attention of a layer: head norms, rotation, the write into pages.

    q' = rotate(norm(q)),   k' = rotate(norm(k)),   pages[slot of t] = k'[t], v[t]

Layers may lack norm or rotation. Training keeps these steps apart (`qk_norm_rope`), since each has a gradient. Serving
takes them in one kernel, which reads q, k and v once and writes q' and the pages once: a decoded token would spend
more time on launching four kernels than in them. Every step rounds where the kernel of its own does, so the results
are the same bits.

Sources: kernels/rms_norm.py, rotary.py, write_pages.py. Legend: T tokens, Hq query heads, Hkv key/value heads, d head
dim, P pages; in a program HEADS heads of one token, D numbers each, a power of two ≥ d.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention._kv_quantization import LIMITS, quantize_rows, row_scales
from kernels.attention._rotary_write_cpu import rotate_and_write_rows, writes
from kernels.attention.rotary import apply_rotary, apply_rotary_reference, check_rotary, split_heads
from kernels.attention.write_pages import check_page_dtypes, write_pages, write_pages_reference
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, runs_triton
from kernels.rms_norm import apply_weight, inverse_rms, rms_norm, rms_norm_reference


class HeadNorms(NamedTuple):
    """RMSNorm over the head dim of queries and keys."""

    q_weight: Tensor
    """[d]"""
    k_weight: Tensor
    """[d]"""
    eps: float


def qk_norm_rope(
    q: Tensor, k: Tensor, *, rotary: tuple[Tensor, Tensor] | None, norms: HeadNorms | None
) -> tuple[Tensor, Tensor]:
    """Normalise, then rotate queries [T, Hq, d] and keys [T, Hkv, d]; None leaves a step out. Differentiable."""
    if norms is not None:
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    return (q, k) if rotary is None else apply_rotary(q, k, *rotary)


def rotate_and_write_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    fixed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`rotate_and_write` in its plainest form: one step after the other."""
    if norms is not None:
        q, k = (rms_norm_reference(x, weight, norms.eps) for x, weight in ((q, norms.q_weight), (k, norms.k_weight)))
    if rotary is not None:
        q, k = apply_rotary_reference(q, k, *rotary)
    k_scales, v_scales = scales or (None, None)
    write_pages_reference(k, v, k_pages, v_pages, slots, k_scales=k_scales, v_scales=v_scales, fixed=fixed)
    return q


@triton.jit
def _load_heads(p_in, p_weight, p_cos, p_sin, o_head, m_heads, eps, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Some heads of one token, [HEADS, D] in the dtype of p_in, normalised if there is a weight, rotated if tables."""
    DTYPE: tl.constexpr = p_in.dtype.element_ty
    columns = tl.arange(0, D)
    m_columns = columns < HEAD_DIM
    mask = m_heads[:, None] & m_columns[None, :]
    b_x = tl.load(p_in + o_head[:, None] + columns[None, :], mask=mask, other=0.0)
    # The other number of each pair, once more from memory: it is in the cache, but in another thread.
    others = (columns + HEAD_DIM // 2) % HEAD_DIM
    b_other = b_x
    if p_cos is not None:
        b_other = tl.load(p_in + o_head[:, None] + others[None, :], mask=mask, other=0.0)
    if p_weight is not None:
        b_inverse = inverse_rms(b_x.to(tl.float32), eps, HEAD_DIM)[:, None]
        b_weight = tl.load(p_weight + columns, mask=m_columns, other=0.0)[None, :]
        b_x = apply_weight(b_x.to(tl.float32) * b_inverse, b_weight, DTYPE)
        if p_cos is not None:
            b_weight = tl.load(p_weight + others, mask=m_columns, other=0.0)[None, :]
            b_other = apply_weight(b_other.to(tl.float32) * b_inverse, b_weight, DTYPE)
    if p_cos is not None:
        b_cos = tl.load(p_cos + columns, mask=m_columns, other=0.0)[None, :]
        b_sin = tl.load(p_sin + columns, mask=m_columns, other=0.0)[None, :]
        b_x = tl.fma(b_x.to(tl.float32), b_cos, b_other.to(tl.float32) * b_sin).to(DTYPE)
    return b_x


@triton.jit
def _write_heads(
    p_in, p_weight, p_cos, p_sin, p_pages, p_scales, p_fixed, slot, first_head,
    head_stride, page_stride, offset_stride, page_head_stride,
    scale_page_stride, scale_offset_stride, scale_head_stride, eps,
    PAGE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LIMIT: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store HEADS of a token's heads at its slot, in 8 bits with their scales if LIMIT > 0."""
    heads, columns = first_head + tl.arange(0, HEADS), tl.arange(0, D)
    m_heads = heads < NUM_HEADS
    heads = heads.to(tl.int64)
    b_x = _load_heads(p_in, p_weight, p_cos, p_sin, heads * head_stride, m_heads, eps, HEAD_DIM, D)
    page, offset = slot // PAGE, slot % PAGE
    if LIMIT > 0:
        b_x = b_x.to(tl.float32)
        b_scales = row_scales(b_x, LIMIT) if p_fixed is None else tl.load(p_fixed + heads, mask=m_heads, other=1.0)
        b_x = quantize_rows(b_x, b_scales, LIMIT)
        o_scales = page * scale_page_stride + offset * scale_offset_stride + heads * scale_head_stride
        tl.store(p_scales + o_scales, b_scales, mask=m_heads)
    o_heads = page * page_stride + offset * offset_stride + heads * page_head_stride
    mask = m_heads[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(p_pages + o_heads[:, None] + columns[None, :], b_x.to(p_pages.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_and_write_kernel(
    p_q, p_k, p_v, p_q_weight, p_k_weight, p_cos, p_sin, p_slots, p_out, p_k_pages, p_v_pages, p_k_scales, p_v_scales,
    p_k_fixed, p_v_fixed,
    q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token,
    page_stride, offset_stride, page_head_stride, scale_page_stride, scale_offset_stride, scale_head_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr, KV_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, LIMIT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Program (token, block): Q_BLOCKS blocks of heads of q, then KV_BLOCKS of k, then as many of v."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if p_cos is not None:
        p_cos += token * cos_token
        p_sin += token * sin_token
    if block < Q_BLOCKS:
        heads, columns = block * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
        m_heads = heads < Q_HEADS
        o_head = heads.to(tl.int64) * q_head
        b_q = _load_heads(p_q + token * q_token, p_q_weight, p_cos, p_sin, o_head, m_heads, eps, HEAD_DIM, D)
        o_out = (token * Q_HEADS + heads)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(p_out + o_out, b_q, mask=m_heads[:, None] & (columns < HEAD_DIM)[None, :])
    else:
        slot = tl.load(p_slots + token).to(tl.int64)
        if slot >= 0:
            if block < Q_BLOCKS + KV_BLOCKS:
                _write_heads(
                    p_k + token * k_token, p_k_weight, p_cos, p_sin, p_k_pages, p_k_scales, p_k_fixed,
                    slot, (block - Q_BLOCKS) * HEADS, k_head, page_stride, offset_stride, page_head_stride,
                    scale_page_stride, scale_offset_stride, scale_head_stride, eps,
                    PAGE=PAGE, NUM_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, LIMIT=LIMIT, HEADS=HEADS, D=D,
                )  # fmt: skip
            else:
                _write_heads(
                    p_v + token * v_token, None, None, None, p_v_pages, p_v_scales, p_v_fixed,
                    slot, (block - Q_BLOCKS - KV_BLOCKS) * HEADS, v_head, page_stride, offset_stride, page_head_stride,
                    scale_page_stride, scale_offset_stride, scale_head_stride, eps,
                    PAGE=PAGE, NUM_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, LIMIT=LIMIT, HEADS=HEADS, D=D,
                )  # fmt: skip


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    fixed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Normalise and rotate queries and keys, and write keys and values into pages. Returns the new q, [T, Hq, d].

    q [T, Hq, d], k and v [T, Hkv, d], slots, k_pages and v_pages as in `write_pages`; `rotary`: the two tables by
    `rotary_tables`, or None; `scales` and `fixed`: of 8-bit pages. For inference only. Without rotary and
    norms the result is q itself. Raises ValueError for dtypes that do not match.
    """
    k_scales, v_scales = scales or (None, None)
    if not runs_triton(q):
        if scales is None and writes(q, k, v, (k_pages, v_pages), norms):
            return rotate_and_write_rows(q, k, v, (k_pages, v_pages), slots, rotary, norms)
        q, k = qk_norm_rope(q, k, rotary=rotary, norms=norms)
        write_pages(k, v, k_pages, v_pages, slots, k_scales=k_scales, v_scales=v_scales, fixed=fixed)
        return q
    _check(q, k, v, (k_pages, v_pages), (k_scales, v_scales), rotary=rotary, norms=norms)
    (tokens, q_heads, d), kv_heads = q.shape, k.shape[1]
    cos, sin = rotary or (None, None)
    changes_q = rotary is not None or norms is not None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if changes_q else q
    heads, half, warps = split_heads(d, max(q_heads, kv_heads))
    q_blocks, kv_blocks = triton.cdiv(q_heads, heads) if changes_q else 0, triton.cdiv(kv_heads, heads)
    _rotate_and_write_kernel[(tokens, q_blocks + 2 * kv_blocks)](
        q, k, v, None if norms is None else norms.q_weight, None if norms is None else norms.k_weight, cos, sin,
        slots.contiguous(), out, k_pages, v_pages, k_scales, v_scales, *(fixed or (None, None)),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0),
        *k_pages.stride()[:3], *((0, 0, 0) if k_scales is None else k_scales.stride()),
        0.0 if norms is None else norms.eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, Q_BLOCKS=q_blocks, KV_BLOCKS=kv_blocks,
        PAGE=k_pages.shape[1], HEAD_DIM=d, LIMIT=LIMITS.get(k_pages.dtype, 0.0), HEADS=heads, D=2 * half,
        num_warps=warps,
    )  # fmt: skip
    return out


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    *,
    rotary: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
) -> None:
    check_rows(q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if rotary is not None:
        check_rotary(q, k, *rotary)
    if norms is not None:
        check_rows(q_weight=norms.q_weight, k_weight=norms.k_weight)
    check_page_dtypes(k.dtype, *pages, *scales)
    for one, other in (pages, scales):
        if one is not None and other is not None and (one.stride() != other.stride() or one.shape != other.shape):
            raise ValueError(f"keys and values must have one layout, not {one.stride()} and {other.stride()}")
