"""Products of activations that are rounded to 8 bits, a scale for each token, as W8A8 models are served elsewhere.

    INT8    s[t] = max |x[t]| / 127.5,   q = clamp(round(x / s), −128, 127)      narrow: / 127, no −128
    FP8     s[t] = max |x[t]| / 448,     q = the nearest e4m3 to x / s
    y[t, n] = s[t] · Σ_k q[t, k] · W[n, k] + b[n]

q is computed in fp32. Its values are numbers of bf16, fp16 and fp32, so `quantized_linear` multiplies with it exactly
as with any x: there is no integer or FP8 product yet, and speed is that of W8A16. In bf16 and fp16 the sum is rounded
once before s multiplies it. The gradient of x passes the rounding as if it were none (straight-through).

Source: vllm-project/compressed-tensors, dynamic per-token quantization; narrow: https://arxiv.org/abs/2402.17764.

Legend: T tokens, K input features, N output features.
"""

import torch
from torch import Tensor

from kernels.linear.quantized import PreparedQuantizedWeight, quantized_linear

_RANGES = {torch.int8: (-128.0, 127.0), torch.float8_e4m3fn: (-448.0, 448.0)}
_TINIEST = 1e-30


def round_activations(x: Tensor, dtype: torch.dtype, *, narrow: bool = False) -> tuple[Tensor, Tensor]:
    """q [T, K] in the dtype of x and s [T, 1] in fp32, of x [T, K]; `dtype` is torch.int8 or torch.float8_e4m3fn."""
    lowest, highest = _RANGES[dtype]
    lowest = -highest if narrow else lowest
    wide = x.float()
    scales = (wide.detach().abs().amax(-1, keepdim=True) / ((highest - lowest) / 2)).clamp(min=_TINIEST)
    scaled = wide / scales
    with torch.no_grad():
        rounded = scaled.clamp(lowest, highest)
        rounded = rounded.round() if dtype == torch.int8 else rounded.to(dtype).float()
    return (scaled + (rounded - scaled.detach())).to(x.dtype) if scaled.requires_grad else rounded.to(x.dtype), scales


def rounded_linear(x: Tensor, weight: PreparedQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return y [T, N] of x [T, K], a prepared weight [N, K] and bias [N] or None; `dtype` as in `round_activations`."""
    q, scales = round_activations(x, dtype)
    y = (quantized_linear(q, weight).float() * scales).to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)
