"""The gate of Llama's feed-forward layer: SwiGLU(gate, up) = silu(gate) · up, silu(z) = z · σ(z).

    dup = dy · silu(gate),   dgate = dy · up · σ(gate) · (1 + gate · (1 − σ(gate)))

Source: https://arxiv.org/abs/2002.05202. The Triton kernels compute in fp32 and round once. Legend: T tokens,
I intermediate size, σ the logistic function.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._rows_cpu import gate_halves, gate_rows, gates, gates_halves
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, runs_triton


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in its plainest form."""
    return gate * torch.sigmoid(gate) * up


@triton.jit
def _tile(num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's rows [ROWS, 1] int64, columns [1, BLOCK] and which of its elements exist."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    return rows.to(tl.int64)[:, None], columns[None, :], mask


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    p_gate, p_up, p_y, num_rows, gate_row, up_row, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One tile of y, which is contiguous."""
    rows, columns, mask = _tile(num_rows, SIZE, ROWS, BLOCK)
    b_gate = tl.load(p_gate + rows * gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + rows * up_row + columns, mask=mask, other=0.0).to(tl.float32)
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_y + rows * SIZE + columns, b_y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    p_grad, p_gate, p_up, p_grad_gate, p_grad_up, num_rows, gate_row, up_row,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of both gradients, which are contiguous as dy is."""
    rows, columns, mask = _tile(num_rows, SIZE, ROWS, BLOCK)
    o_row = rows * SIZE + columns
    b_grad = tl.load(p_grad + o_row, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + rows * gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + rows * up_row + columns, mask=mask, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_grad_up = b_grad * b_gate * b_sigmoid
    b_grad_gate = b_grad * b_up * b_sigmoid * (1 + b_gate * (1 - b_sigmoid))
    tl.store(p_grad_gate + o_row, b_grad_gate.to(p_grad_gate.dtype.element_ty), mask=mask)
    tl.store(p_grad_up + o_row, b_grad_up.to(p_grad_up.dtype.element_ty), mask=mask)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up of shape [T, I] for gate and up [T, I]; differentiable.

    On CUDA both have one dtype, fp32, bf16 or fp16, and are contiguous in the last dimension; else ValueError.
    """
    if runs_triton(gate):
        check_rows(gate=gate, up=up)
        if gate.dim() != 2 or gate.shape != up.shape or gate.dtype != up.dtype:
            both = f"{gate.shape} {gate.dtype}, {up.shape} {up.dtype}"
            raise ValueError(f"swiglu takes two matrices of one shape and dtype, not {both}")
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _SwiGLU.apply(gate, up)
    return _forward(gate, up)


def swiglu_of_halves(x: Tensor) -> Tensor:
    """`swiglu` of the halves [gate, up] of x [T, 2·I]."""
    if not (x.requires_grad and torch.is_grad_enabled()) and not runs_triton(x) and gates_halves(x):
        return gate_halves(x)
    return swiglu(*x.chunk(2, dim=1))


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    if not runs_triton(gate):
        return gate_rows(gate, up) if gates(gate, up) else F.silu(gate).mul_(up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid, tile = _grid(gate)
    _forward_kernel[grid](gate, up, y, len(gate), gate.stride(0), up.stride(0), **tile)
    return y


def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if not runs_triton(gate):
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
    grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    grid, tile = _grid(gate)
    strides = gate.stride(0), up.stride(0)
    _backward_kernel[grid](grad.contiguous(), gate, up, grad_gate, grad_up, len(gate), *strides, **tile)
    return grad_gate, grad_up


def _grid(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return how many programs share x [T, I], and the tile of each: 8 elements a thread, one 16-byte load of bf16."""
    num_rows, size = x.shape
    block = min(triton.next_power_of_2(size), 1024)
    rows = 1024 // block
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(size, block))
    return grid, {"SIZE": size, "ROWS": rows, "BLOCK": block, "num_warps": 4}


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up for the backward pass, but not silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(grad, *ctx.saved_tensors)
