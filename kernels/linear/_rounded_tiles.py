"""Products of rows in 8 bits with weights in 8 bits on tensor cores: integers with integers, FP8 with FP8.

    y[t, n] = s[t] · scale[n] · Σ_k q[t, k] · code[n, k]

For many rows and one scale an output. Codes are multiplied as they lie in the words of `_quantized_tiles`: both
operands have the inputs of a tile in that order, and a sum has none. INT8 is summed in int32, exactly; FP8 within 128
inputs by the tensor cores (which keep fewer bits than fp32 there), then in fp32 (https://arxiv.org/abs/2412.19437).

Legend: T tokens, K input features, N output features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.common.triton_support import compute_capability, is_interpreted
from kernels.linear._quantized_tiles import TiledWeight

_TILE, _OUTPUTS, _BLOCKS_BESIDE = 64, 128, 8
# Rows, and tiles of K at once. Sums of FP8 take twice the registers: those of these tiles, and all before them.
_TOKENS = {"int8": (256, 1), "fp8": (128, 2)}
_FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_FIRST_WITH_FP8 = (8, 9)


def multiplies(weight: TiledWeight, dtype: torch.dtype) -> bool:
    """Whether tensor cores take rows of `dtype` and this weight as they are."""
    has_type = dtype == torch.int8 or compute_capability(weight.words.device) >= _FIRST_WITH_FP8
    return weight.group == 0 and weight.format == _FORMATS[dtype] and has_type


@triton.jit
def _tile(p_codes, o_rows, stride_row):
    """Rows of 64 codes, which lie `stride_row` bytes apart; of FP8 as bytes, which is for the interpreter, values."""
    b_codes = tl.load(p_codes + o_rows.to(tl.int64)[:, None] * stride_row + tl.arange(0, 64)[None, :])
    if p_codes.dtype.element_ty == tl.uint8:
        b_bits = b_codes.to(tl.int32)
        b_bits = ((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)
        b_codes = b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
    return b_codes


@triton.jit(do_not_specialize=["num_rows"])
def _codes_kernel(
    p_q, p_row_scales, p_words, p_scales, p_out, num_rows, num_outputs, num_tiles, stride_q,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, BESIDE: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """A tile of y [T, N] of q, whose columns are in the order of the words [tiles, N, 16]."""
    # Neighbouring programs share rows and outputs, which then stay in the cache.
    blocks, row_blocks = tl.cdiv(num_outputs, OUTPUTS), tl.cdiv(num_rows, TOKENS)
    group = tl.program_id(0) // (BESIDE * row_blocks)
    beside = tl.minimum(blocks - group * BESIDE, BESIDE)
    place = tl.program_id(0) - group * BESIDE * row_blocks
    o_n = (group * BESIDE + place % beside) * OUTPUTS + tl.arange(0, OUTPUTS)
    o_t = place // beside * TOKENS + tl.arange(0, TOKENS)
    m_n, m_t = o_n < num_outputs, o_t < num_rows
    # What is not there is read as the last, and not stored.
    o_output, o_row = tl.minimum(o_n, num_outputs - 1), tl.minimum(o_t, num_rows - 1)
    b_sum = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32 if FLOAT8 else tl.int32)
    for first in tl.range(0, num_tiles, DEPTH):
        b_part = tl.zeros_like(b_sum) if FLOAT8 else b_sum
        for step in tl.static_range(DEPTH):
            # Behind the last tile of the weight q holds zeros.
            p_tile = p_words + tl.cast(tl.minimum(first + step, num_tiles - 1), tl.int64) * num_outputs * 64
            b_w = _tile(p_tile, o_output, 64)
            b_q = _tile(p_q + (first + step) * 64, o_row, stride_q)
            b_part = tl.dot(b_w, tl.trans(b_q), b_part, out_dtype=b_sum.dtype)
        b_sum = b_sum + b_part if FLOAT8 else b_part
    b_y = b_sum.to(tl.float32) * tl.load(p_scales + o_n, mask=m_n, other=0.0)[:, None]
    b_y *= tl.load(p_row_scales + o_t, mask=m_t, other=0.0)[None, :]
    o_out = o_t.to(tl.int64)[:, None] * num_outputs + o_n[None, :]
    tl.store(p_out + o_out, tl.trans(b_y).to(p_out.dtype.element_ty), mask=m_t[:, None] & m_n[None, :])


def product_of_codes(q: Tensor, row_scales: Tensor, weight: TiledWeight) -> Tensor:
    """y [T, N] in the dtype of q, of q [T, K], whose values are those of codes, and row_scales fp32 [T]."""
    (rows, n), is_integer = (len(q), weight.shape[0]), weight.format == "int8"
    out, (tokens, depth) = q.new_empty(rows, n), _TOKENS[weight.format]
    dtype = torch.int8 if is_integer else torch.float8_e4m3fn
    codes = in_order_of_words(q.to(dtype), depth)
    dtype = torch.uint8 if is_interpreted(q) and not is_integer else dtype
    _codes_kernel[(triton.cdiv(n, _OUTPUTS) * triton.cdiv(rows, tokens),)](
        codes.view(dtype), row_scales, weight.words.view(dtype), weight.scales, out, rows, n, len(weight.words),
        codes.stride(0), OUTPUTS=_OUTPUTS, TOKENS=tokens, DEPTH=depth, BESIDE=_BLOCKS_BESIDE, FLOAT8=not is_integer,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def in_order_of_words(codes: Tensor, tiles: int) -> Tensor:
    """Codes of 8 bits [T, K], each tile of 64 in the order of the bytes of its words; zeros up to whole `tiles`."""
    padded = F.pad(codes.view(torch.uint8), (0, -codes.shape[1] % (_TILE * tiles)))
    parts = padded.view(len(codes), -1, 4, 2, 4, 2)  # tile, m, i, lane, b
    return parts.permute(0, 1, 4, 2, 5, 3).reshape(len(codes), -1)
