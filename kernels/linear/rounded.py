"""Products of activations that are rounded to 8 bits: a scale for each token, as W8A8 models are served elsewhere, or
for each group of a token's neighbours, as llama.cpp does on CPUs.

    INT8    s = max |x| / 127.5,   q = clamp(round(x / s), −128, 127)      narrow: / 127, no −128
    FP8     s = max |x| / 448,     q = the nearest e4m3 to x / s
    y[t, n] = Σ_k s[t, k] · q[t, k] · W[n, k] + b[n]

q is computed in fp32. With AVX2 or NEON codes of integer weights are multiplied as integers (`_rounded.c`): exactly
within 32 or 64 neighbours, in fp32 between. More than a few rows in bf16, where there is AMX, are multiplied as s · q
in bf16 (`_skinny_pairs.c`). On CUDA many rows of one scale are multiplied with weights of one scale an output as the
codes they are (`_rounded_tiles`): INT8 with INT8, exactly, or FP8 with FP8. Elsewhere `quantized_linear` multiplies, at
its speed: with q, whose values are numbers of bf16, fp16 and fp32, and s after the sum, where a token has one scale;
else with s · q. The gradient of x passes the rounding as if it were none (straight-through).

Source: vllm-project/compressed-tensors, dynamic per-token and group quantization; narrow:
https://arxiv.org/abs/2402.17764.

Legend: T tokens, K input features, N output features, G groups of a token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.floats_cpu import DTYPES
from kernels.linear._quantized_cpu import CpuWeight, grad_input_on_cpu, linear_on_cpu, quantized_c_product
from kernels.linear._quantized_tiles import TiledWeight
from kernels.linear._rounded_cpu import MOST_BESIDE_TILES, rounded_c_product, rounded_product, rounded_rows, takes
from kernels.linear._rounded_tiles import multiplies, product_of_codes
from kernels.linear._tiles_cpu import has_tiles_for
from kernels.linear.c_product import CProduct
from kernels.linear.lora import wants_gradients
from kernels.linear.quantized import MOST_FUSED_ROWS, PreparedQuantizedWeight, grad_input, quantized_linear

_RANGES = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-448.0, 448.0)}
_TINIEST = 1e-30


class Rounding(NamedTuple):
    """How activations are rounded."""

    dtype: torch.dtype
    """torch.int8 or torch.float8_e4m3fn."""
    group: int | None = None
    """Neighbours of a token that share a scale, a multiple of 32 that divides K; None: all of them."""
    narrow: bool = False
    """INT8 without −128."""


def round_activations(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """q [T, K] in the dtype of x and s [T, G] in fp32, of x [T, K]."""
    lowest, highest = _RANGES[rounding.dtype]
    lowest = -highest if rounding.narrow else lowest
    wide = _grouped(x.float(), rounding)
    scales = (wide.detach().abs().amax(-1, keepdim=True) / ((highest - lowest) / 2)).clamp(min=_TINIEST)
    scaled = wide / scales
    with torch.no_grad():
        rounded = scaled.clamp(lowest, highest)
        rounded = rounded.round() if rounding.dtype == torch.int8 else rounded.to(rounding.dtype).float()
    q = scaled + (rounded - scaled.detach()) if scaled.requires_grad else rounded
    return q.view(x.shape).to(x.dtype), scales.squeeze(-1)


def rounded_linear(x: Tensor, weight: PreparedQuantizedWeight, bias: Tensor | None, rounding: Rounding) -> Tensor:
    """Return y [T, N] of x [T, K], a prepared weight [N, K] and bias [N] or None."""
    if isinstance(weight, CpuWeight) and _multiplies_integers(weight, rounding):
        product = _IntegerProduct.apply if wants_gradients(x) else _integer_product
        y = product(x, weight, rounding.group or x.shape[1])
    elif isinstance(weight, TiledWeight) and _multiplies_codes(x, weight, rounding):
        y = (_ProductOfCodes.apply if wants_gradients(x) else _product_of_codes)(x, weight, rounding)
    elif rounding.group is None:
        q, scales = round_activations(x, rounding)
        y = (quantized_linear(q, weight).float() * scales).to(x.dtype)
    else:
        q, scales = round_activations(x, rounding)
        y = quantized_linear((_grouped(q, rounding) * scales[..., None]).view(x.shape).to(x.dtype), weight)
    return y if bias is None else y + bias.to(x.dtype)


def rounded_linear_c_product(weight: object, rounding: Rounding, dtype: torch.dtype) -> CProduct | None:
    """What `rounded_linear` calls for few rows in this dtype, without a bias; None where that is nothing in C."""
    if not isinstance(weight, CpuWeight) or dtype not in DTYPES or not _multiplies_integers(weight, rounding):
        return None
    tiles = quantized_c_product(weight, dtype) if has_tiles_for(dtype) else None
    return rounded_c_product(weight.skinny, rounding.group or weight.shape[1], tiles)  # type: ignore[arg-type]


def _multiplies_integers(weight: CpuWeight, rounding: Rounding) -> bool:
    is_usual = rounding.dtype == torch.int8 and not rounding.narrow
    return is_usual and takes(weight.skinny, rounding.group or weight.shape[1])


def _integer_product(x: Tensor, weight: CpuWeight, group: int) -> Tensor:
    if x.shape[0] > MOST_BESIDE_TILES and has_tiles_for(x.dtype):
        return linear_on_cpu(rounded_rows(x, group), weight, None)
    product: Tensor = rounded_product(x, weight.skinny, group)  # type: ignore[arg-type]
    return product.to(x.dtype)


def _multiplies_codes(x: Tensor, weight: TiledWeight, rounding: Rounding) -> bool:
    return len(x) > MOST_FUSED_ROWS and rounding.group is None and multiplies(weight, rounding.dtype)


def _product_of_codes(x: Tensor, weight: TiledWeight, rounding: Rounding) -> Tensor:
    q, scales = round_activations(x.detach(), rounding)
    return product_of_codes(q, scales.view(-1), weight)


class _ProductOfCodes(torch.autograd.Function):
    """`_product_of_codes` with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: TiledWeight, rounding: Rounding) -> Tensor:
        ctx.weight = weight
        return _product_of_codes(x, weight, rounding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grad_input(grads[0].contiguous(), ctx.weight), None, None


class _IntegerProduct(torch.autograd.Function):
    """`_integer_product` with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: CpuWeight, group: int) -> Tensor:
        ctx.weight = weight
        return _integer_product(x, weight, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grad_input_on_cpu(grads[0], ctx.weight), None, None


def _grouped(x: Tensor, rounding: Rounding) -> Tensor:
    """[T, G, K / G]."""
    return x.unflatten(-1, (-1, rounding.group or x.shape[-1]))
