"""Matrix product of tokens with a weight: y = x Wᵀ + b.

Legend: T tokens, K input features, N output features.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PreparedWeight:
    """A weight `[N, K]` in the form that inference multiplies fastest with."""

    weight: Tensor


def prepare_linear_weight(weight: Tensor) -> PreparedWeight:
    """Prepare a weight `[N, K]` once, at load time, for many calls of `linear`."""
    return PreparedWeight(weight.contiguous())


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` in its plainest form."""
    product = x @ weight.t()
    return product if bias is None else product + bias


def linear(x: Tensor, weight: Tensor | PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b of shape [T, N] for x [T, K], weight [N, K] and bias [N]; differentiable for a plain weight."""
    if isinstance(weight, PreparedWeight):
        weight = weight.weight
    return F.linear(x, weight, bias)
