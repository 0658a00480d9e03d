"""The gate of Llama's feed-forward layer: SwiGLU(gate, up) = silu(gate) · up, silu(z) = z · sigmoid(z).

Source: https://arxiv.org/abs/2002.05202. Legend: T tokens, I intermediate size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in its plainest form."""
    return gate * torch.sigmoid(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up of shape [T, I] for gate and up [T, I]; differentiable."""
    return F.silu(gate) * up
