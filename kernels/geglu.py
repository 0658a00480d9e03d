"""The gate of Gemma's feed-forward layer: GeGLU(gate, up) = gelu(gate) · up, with the approximation by tanh.

    gelu(z) = z/2 · (1 + tanh(√(2/π) · (z + 0.044715 z³))) = z · σ(2 √(2/π) · (z + 0.044715 z³))

Source: https://arxiv.org/abs/2002.05202. On the CPU it is computed in C where that compiles, in fp32, and rounded once;
else PyTorch computes it, and each step rounds to the dtype. Legend: T tokens, I intermediate size, σ the logistic
function.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._rows_cpu import gates, gelu_rows


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`geglu` in its plainest form."""
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + torch.tanh(inner)) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """`gate`, `up [T, I] -> [T, I]`; differentiable."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _GeGLU.apply(gate, up)
    return _forward(gate, up)


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    return gelu_rows(gate, up) if gates(gate, up) else F.gelu(gate, approximate="tanh").mul_(up)


class _GeGLU(torch.autograd.Function):
    """Keeps gate and up for the backward pass, but not gelu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return grad_gate, F.gelu(gate, approximate="tanh").mul_(grad)
