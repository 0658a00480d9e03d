"""SmoothQuant: what is hard to round in activations is moved into weights, for products of 8 by 8 bits.

    s_j = max|x_j|^α / max|W_:j|^(1−α)        over all weights that read x

folded into the norm before (scaling.py). A few features of hidden states are a hundred times larger than the others and
would take the whole range of a token's 8 bits; weights have no such columns.

Source: https://arxiv.org/abs/2211.10438.

Legend: N output features, K input features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STRENGTH = 0.5
_SMALLEST = 1e-5


@torch.no_grad()
def smoothing_scales(weights: Sequence[Tensor], largest: Tensor, strength: float = STRENGTH) -> Tensor:
    """s, fp32 [K], of weights [N, K] that read one input; `largest` [K]: its features' magnitudes, `strength`: α."""
    columns = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0).clamp(min=_SMALLEST)
    scales = largest.clamp(min=_SMALLEST).pow(strength) / columns.pow(1 - strength)
    return scales.clamp(min=_SMALLEST)
