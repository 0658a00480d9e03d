"""The gate of Gemma's feed-forward layer: GeGLU(gate, up) = gelu(gate) · up, with the approximation by tanh.

    gelu(z) = z/2 · (1 + tanh(√(2/π) · (z + 0.044715 z³)))

Source: https://arxiv.org/abs/2002.05202. PyTorch computes it on every device; each step rounds to the dtype.
Legend: T tokens, I intermediate size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`geglu` in its plainest form."""
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + torch.tanh(inner)) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """`gate`, `up [T, I] -> [T, I]`; differentiable."""
    return F.gelu(gate, approximate="tanh") * up
