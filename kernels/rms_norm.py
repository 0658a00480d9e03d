"""Root-mean-square normalisation, with the residual addition that precedes it.

    s = x + residual
    y = s / sqrt(mean(s²) + eps) · weight

The normalisation runs in fp32; its result is rounded to the dtype of x before the multiplication with the weight,
as Llama implementations do, so that bf16 logits stay comparable. Source: https://arxiv.org/abs/1910.07467.

Legend: T tokens, D hidden size.
"""

from typing import overload

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` without residual in its plainest form."""
    x32 = x.float() if x.dtype.itemsize < 4 else x
    normalised = x32 / torch.sqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight.to(x.dtype)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise x [..., D]; with a residual [..., D] return (normalised, x + residual).

    The normalised tensor has the dtype of x; the sum has the wider dtype of x and residual. Differentiable.
    """
    if residual is None:
        return rms_norm_reference(x, weight, eps)
    summed = x + residual
    return rms_norm_reference(summed, weight, eps).to(x.dtype), summed
