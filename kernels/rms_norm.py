"""Root-mean-square normalisation, with the residual addition that precedes it.

    s = x + residual,   n = s / sqrt(mean(s²) + eps),   y = n · weight
    dweight = Σ_rows dy · n,   ds = (dy · weight − n · mean(dy · n · weight)) / sqrt(mean(s²) + eps)

n is computed in fp32 and rounded to the dtype of y before the product with the weight, as Llama implementations do.
Source: https://arxiv.org/abs/1910.07467.

Legend: T tokens, D size of the normalised dimension.
"""

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this many rows a call costs more than its arithmetic.
_FEW_ROWS = 16


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` without residual in its plainest form."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalized.to(x.dtype) * weight.to(x.dtype)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise x [T, ..., D] over its last dimension; with a residual of its shape return (y, x + residual).

    y has the dtype of x; the sum has the wider dtype of x and residual. Differentiable.
    """
    summed = x if residual is None else x + residual
    if torch.is_grad_enabled() and (summed.requires_grad or weight.requires_grad):
        y = _RMSNorm.apply(summed, weight, eps, x.dtype)
    else:
        y = _scaled(_normalize(summed, eps), weight, x.dtype)
    return y if residual is None else (y, summed)


def _scaled(normalized: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return normalized.to(dtype) * weight.to(dtype)


def _normalize(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) in the dtype of x or fp32."""
    size = x.shape[-1]
    if x.numel() <= _FEW_ROWS * size:
        # One fused kernel instead of five: (x, −x) has the mean 0 and the variance mean(x²).
        return F.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), eps=eps)[..., :size]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * _inverse_rms(wide, eps)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """Keeps s and one number a row for the backward pass, instead of every intermediate result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse_rms = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return _scaled(wide * inverse_rms, weight, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        normalized = x * inverse_rms
        weight_wide = weight.to(normalized.dtype)
        product = normalized * grad_y
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = torch.matmul(product, weight_wide).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(grad_y, weight_wide, out=product).addcmul_(normalized, mean, value=-1).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None, None
