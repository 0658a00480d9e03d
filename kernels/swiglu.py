"""The gate of Llama's feed-forward layer: SwiGLU(gate, up) = silu(gate) · up, silu(z) = z · sigmoid(z).

Source: https://arxiv.org/abs/2002.05202. Legend: T tokens, I intermediate size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in its plainest form."""
    return gate * torch.sigmoid(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up of shape [T, I] for gate and up [T, I]; differentiable."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SwiGLU.apply(gate, up)
    return F.silu(gate).mul_(up)


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up for the backward pass, but not silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
