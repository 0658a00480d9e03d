"""Matrix product of tokens with a weight: y = x Wᵀ + b.

Legend: T tokens, K input features, N output features.
"""

import torch.nn.functional as F
from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` in its plainest form."""
    product = x @ weight.t()
    return product if bias is None else product + bias


PreparedWeight = Tensor


def prepare_linear_weight(weight: Tensor) -> PreparedWeight:
    """Return `weight` [N, K] in the form that `linear` multiplies with fastest; for inference only."""
    return weight.contiguous()


def linear(x: Tensor, weight: Tensor | PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b of shape [T, N] for x [T, K], weight [N, K] and bias [N]; differentiable."""
    return F.linear(x, weight, bias)
