"""Keys and values in 8 bits, with one scale for each token and head.

    scale = max(max |x|, tiny) / limit,    stored = round(x / scale),    x ≈ stored · scale

x is one key or value of d numbers; limit is 127 for int8 and 448 for fp8 (e4m3: 4 bits of exponent, 3 of mantissa).
Instead of its own, each row may have a scale that was calibrated for all tokens; then it is cut off at ± limit · scale.
Halves are rounded to even. The PyTorch form and the Triton form divide and round as IEEE 754 asks, so both store the
same bits. A scale per token, unlike one per tensor, is final once its token is written.

Legend: R rows (tokens, heads or both), d head dim, D d rounded up to a power of two.
"""

import torch
from torch import Tensor

from kernels.common.triton import tl, triton

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude that each 8-bit format stores."""

# Keeps the scale of a row of zeros, and all that is computed from it, a normal number.
_SMALLEST = 1e-20
_TINY = tl.constexpr(_SMALLEST)


def quantize_rows_reference(x: Tensor, dtype: torch.dtype, fixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x [..., d] in 8 bits, [..., d] of `dtype` (a key of LIMITS), and its scales, [...] fp32.

    `fixed` [Hkv] fp32: the scales of x [..., Hkv, d].
    """
    limit = LIMITS[dtype]
    if fixed is None:
        size = x.float().abs().amax(-1).clamp_min(_SMALLEST)
        scales = size / torch.full_like(size, limit)  # torch turns a division by a number into a product on CUDA
    else:
        scales = fixed.expand(x.shape[:-1])
    values = (x.float() / scales[..., None]).clamp(-limit, limit)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scales


def dequantize_rows(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return values [..., d] times scales [...], computed in `dtype`; without scales only converted."""
    return values.to(dtype) if scales is None else values.to(dtype) * scales[..., None].to(dtype)


@triton.jit
def row_scales(b_x, LIMIT: tl.constexpr):
    """Return the scales [R] of b_x [R, D] fp32, whose columns past d hold 0."""
    return tl.div_rn(tl.maximum(tl.max(tl.abs(b_x), axis=1), _TINY), LIMIT)


@triton.jit
def quantize_rows(b_x, b_scales, LIMIT: tl.constexpr):
    """Return the values [R, D] fp32 of b_x [R, D] fp32 with scales [R].

    LIMIT: a value of LIMITS, which names the format. Converting the values to their 8-bit type rounds nothing more.
    """
    b_values = tl.div_rn(b_x, b_scales[:, None])
    if LIMIT == 127.0:
        # Numbers of this size have no fraction bits: adding it rounds, half to even.
        b_values = (b_values + 12582912.0) - 12582912.0
    else:
        # The same, with a size that leaves the three mantissa bits of e4m3, whose smallest exponent is −6.
        b_bits = b_values.to(tl.int32, bitcast=True)
        b_exponent = tl.maximum((b_bits >> 23) & 255, 127 - 6)
        b_rounder = ((b_exponent + 20) << 23).to(tl.float32, bitcast=True)
        b_size = (tl.abs(b_values) + b_rounder) - b_rounder
        b_sign = b_bits & -2147483648  # kept on its own: what rounds to 0 from below is −0
        b_values = (b_size.to(tl.int32, bitcast=True) | b_sign).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(b_values, -LIMIT), LIMIT)
