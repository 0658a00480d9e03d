"""Writing new keys and values into the pages of the cache, as they are or in 8 bits.

    page, offset = slot // page size, slot % page size;    pages[page, offset] = x

In 8 bits a token's scale per head is stored beside it (kernels/attention/_kv_quantization.py).
Source: https://arxiv.org/abs/2309.06180.

The kernel has one program per token. A token without a slot is skipped on the device, so nothing waits for the GPU.

Legend: T tokens, Hkv key/value heads, d head dim, P pages in the pool; HEADS and D are Hkv and d rounded up to powers
of two.
"""

import torch
from torch import Tensor

from kernels.attention._kv_quantization import LIMITS, quantize_rows, quantize_rows_reference, row_scales
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, compute_capability, runs_triton

# Ada. Triton converts to and from e4m3 on no older GPU.
_FIRST_WITH_FP8 = (8, 9)


def write_pages_reference(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    fixed: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`write_pages` in its plainest form: one token at a time."""
    for x, pages, scales, own in zip(
        (k, v), (k_pages, v_pages), (k_scales, v_scales), fixed or (None, None), strict=True
    ):
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            at = divmod(slot, pages.shape[1])
            if scales is None:
                pages[at] = x[token]
            else:
                pages[at], scales[at] = quantize_rows_reference(x[token], pages.dtype, own)


@triton.jit
def _write_heads(
    p_x, p_pages, p_scales, p_fixed, page, offset,
    stride_head, stride_page, stride_offset, stride_page_head,
    stride_scale_page, stride_scale_offset, stride_scale_head,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store the heads of one token, whose first number p_x points to, at its offset in a page."""
    head, column = tl.arange(0, HEADS), tl.arange(0, D)
    m_heads = head < NUM_HEADS
    m_x = m_heads[:, None] & (column < HEAD_DIM)[None, :]
    b_x = tl.load(p_x + head[:, None] * stride_head + column[None, :], mask=m_x, other=0.0)
    if LIMIT > 0:
        b_x = b_x.to(tl.float32)
        b_scales = row_scales(b_x, LIMIT) if p_fixed is None else tl.load(p_fixed + head, mask=m_heads, other=1.0)
        b_x = quantize_rows(b_x, b_scales, LIMIT)
        o_scales = page * stride_scale_page + offset * stride_scale_offset + head * stride_scale_head
        tl.store(p_scales + o_scales, b_scales, mask=m_heads)
    o_page = page * stride_page + offset * stride_offset + head * stride_page_head
    tl.store(p_pages + o_page[:, None] + column[None, :], b_x.to(p_pages.dtype.element_ty), mask=m_x)


@triton.jit
def _write_kernel(
    p_k, p_v, p_k_pages, p_v_pages, p_k_scales, p_v_scales, p_k_fixed, p_v_fixed, p_slots,
    stride_k, stride_k_head, stride_v, stride_v_head,
    stride_k_page, stride_k_place, stride_k_page_head, stride_v_page, stride_v_place, stride_v_page_head,
    stride_scale_page, stride_scale_offset, stride_scale_head,
    PAGE: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid: T. LIMIT: 0 where keys and values are stored as they are."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + token).to(tl.int64)
    if slot >= 0:
        page, offset = slot // PAGE, slot % PAGE
        _write_heads(
            p_k + token * stride_k, p_k_pages, p_k_scales, p_k_fixed, page, offset,
            stride_k_head, stride_k_page, stride_k_place, stride_k_page_head,
            stride_scale_page, stride_scale_offset, stride_scale_head, NUM_HEADS, HEADS, HEAD_DIM, D, LIMIT,
        )  # fmt: skip
        _write_heads(
            p_v + token * stride_v, p_v_pages, p_v_scales, p_v_fixed, page, offset,
            stride_v_head, stride_v_page, stride_v_place, stride_v_page_head,
            stride_scale_page, stride_scale_offset, stride_scale_head, NUM_HEADS, HEADS, HEAD_DIM, D, LIMIT,
        )  # fmt: skip


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    fixed: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Store keys and values [T, Hkv, d] at slots [T] int64 of the pages [P, page, Hkv, d]; a slot < 0 is skipped.

    The pages have the dtype of k and v, or int8 or float8_e4m3fn together with k_scales and v_scales
    [P, page, Hkv] fp32, which are written too: `fixed`, those of keys and values, [Hkv] fp32 each, or a token's own. No
    two tokens may have one slot. Raises ValueError for other dtypes, and
    for float8_e4m3fn on a GPU below compute capability 8.9.
    """
    check_page_dtypes(k.dtype, k_pages, v_pages, k_scales, v_scales)
    if not runs_triton(k):
        if slots.numel() and slots.min().item() < 0:
            kept = slots >= 0
            k, v, slots = k[kept], v[kept], slots[kept]
        _write_rows(k, k_pages, k_scales, slots, fixed and fixed[0])
        _write_rows(v, v_pages, v_scales, slots, fixed and fixed[1])
        return
    check_rows(k=k, v=v)
    if k_pages.stride(-1) != 1 or v_pages.stride(-1) != 1:
        raise ValueError("pages must be contiguous in their last dimension, the head dim")
    if k_scales is not None and v_scales is not None and k_scales.stride() != v_scales.stride():
        raise ValueError(f"k_scales and v_scales must have one layout, not {k_scales.stride()} and {v_scales.stride()}")
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    _write_kernel[(num_tokens,)](
        k, v, k_pages, v_pages, k_scales, v_scales, *(fixed or (None, None)), slots.contiguous(),
        *k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
        *((0, 0, 0) if k_scales is None else k_scales.stride()),
        PAGE=k_pages.shape[1], NUM_HEADS=num_heads, HEADS=triton.next_power_of_2(num_heads),
        HEAD_DIM=head_dim, D=triton.next_power_of_2(head_dim), LIMIT=LIMITS.get(k_pages.dtype, 0.0),
    )  # fmt: skip


def _write_rows(x: Tensor, pages: Tensor, scales: Tensor | None, slots: Tensor, fixed: Tensor | None) -> None:
    """The same of keys or values without Triton; every token has a slot."""
    if scales is None:
        pages.flatten(0, 1).index_copy_(0, slots, x)
        return
    values, new_scales = quantize_rows_reference(x, pages.dtype, fixed)
    # Not every torch copies rows of fp8, but all copy bytes.
    pages.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, values.view(torch.uint8))
    scales.flatten(0, 1).index_copy_(0, slots, new_scales)


def check_page_dtypes(
    dtype: torch.dtype, k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None
) -> None:
    """Raise ValueError unless pages hold `dtype` without scales, or 8 bits with them that this GPU can convert."""
    if k_pages.dtype != v_pages.dtype:
        raise ValueError(f"key pages are {k_pages.dtype} and value pages {v_pages.dtype}; they must be alike")
    quantized = k_pages.dtype in LIMITS
    if not quantized and k_pages.dtype != dtype:
        raise ValueError(f"pages are {k_pages.dtype}; for {dtype} they hold {dtype}, torch.int8 or torch.float8_e4m3fn")
    if (k_scales is not None) != quantized or (v_scales is not None) != quantized:
        raise ValueError(f"pages of {k_pages.dtype} {'need k_scales and v_scales' if quantized else 'take no scales'}")
    capability = compute_capability(k_pages.device)
    if k_pages.dtype == torch.float8_e4m3fn and capability < _FIRST_WITH_FP8:
        here = f"{k_pages.device} has {capability[0]}.{capability[1]}"
        raise ValueError(f"pages of {k_pages.dtype} need a GPU of compute capability 8.9, and {here}: use torch.int8")
