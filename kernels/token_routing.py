"""The tokens that a router selects: gathered into a block of fixed size, worked on, and added back.

    index = positions of the selected tokens, in order;   y = x;   y[index] = x[index] + gate · delta

The block has `capacity` rows whatever the router decides, so one CUDA graph serves every decision: rows beyond the
number of selected tokens hold T, gather zeros and add nothing. Rows that are not selected keep their bits. Nothing is
added by atomics, so that results are the same in every run.

Source: https://arxiv.org/abs/2404.02258 (mixture of depths). Legend: T tokens, C capacity, D numbers a token.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, runs_triton

_SELECT_BLOCK = 1024
_ROW_BLOCK = 4096
_MOST_UNCOUNTED = 256


def select_tokens_reference(mask: list[bool], capacity: int) -> tuple[list[int], int]:
    """`select_tokens` in its plainest form."""
    rows = [row for row, is_selected in enumerate(mask) if is_selected][:capacity]
    return rows + [len(mask)] * (capacity - len(rows)), len(rows)


@triton.jit
def _select_kernel(p_mask, p_index, p_count, num_tokens, capacity, BLOCK: tl.constexpr):
    """One block of tokens; the count of all before it is taken anew, from bytes that lie in the cache."""
    first = tl.program_id(0) * BLOCK
    lanes = tl.arange(0, BLOCK)
    b_before = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, first, BLOCK):
        b_before += tl.load(p_mask + start + lanes).to(tl.int32)
    before = tl.sum(b_before, axis=0)
    tokens = first + lanes
    b_selected = tl.load(p_mask + tokens, mask=tokens < num_tokens, other=0).to(tl.int32)
    b_row = before + tl.cumsum(b_selected, axis=0) - 1
    tl.store(p_index + b_row, tokens.to(tl.int64), mask=(b_selected > 0) & (b_row < capacity))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        total = tl.minimum(before + tl.sum(b_selected, axis=0), capacity)
        tl.store(p_count, total)
        for start in range(0, capacity, BLOCK):
            o_index = start + lanes
            b_nobody = tl.zeros([BLOCK], dtype=tl.int64) + num_tokens
            tl.store(p_index + o_index, b_nobody, mask=(o_index >= total) & (o_index < capacity))


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(p_x, p_index, p_out, num_tokens, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block): part of a gathered row, zeros where the row is unused."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(p_index + row)
    mask = (columns < SIZE) & (token >= 0) & (token < num_tokens)
    b_x = tl.load(p_x + token * x_stride + columns, mask=mask, other=0.0)
    tl.store(p_out + row * SIZE + columns, b_x, mask=columns < SIZE)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_kernel(
    p_x, p_index, p_delta, p_gate, num_tokens, x_stride, delta_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, block): x[index] += gate · delta, the product and the sum in fp32."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(p_index + row)
    mask = (columns < SIZE) & (token >= 0) & (token < num_tokens)
    b_delta = tl.load(p_delta + row * delta_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if p_gate is not None:
        b_delta *= tl.load(p_gate + row).to(tl.float32)
    p_row = p_x + token * x_stride + columns
    b_x = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_row, (b_x + b_delta).to(p_x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_backward_kernel(
    p_grad, p_index, p_delta, p_gate, p_grad_delta, p_grad_gate, num_tokens, grad_stride, delta_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: dΔ = gate · dy[index], dgate = Σ dy[index] · Δ; zeros where the row is unused."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(p_index + row)
    is_token = (token >= 0) & (token < num_tokens)
    gate = tl.load(p_gate + row).to(tl.float32)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, SIZE, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = (columns < SIZE) & is_token
        b_grad = tl.load(p_grad + token * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
        b_delta = tl.load(p_delta + row * delta_stride + columns, mask=mask, other=0.0).to(tl.float32)
        b_sum += b_grad * b_delta
        b_out = (b_grad * gate).to(p_grad_delta.dtype.element_ty)
        tl.store(p_grad_delta + row * SIZE + columns, b_out, mask=columns < SIZE)
    tl.store(p_grad_gate + row, tl.sum(b_sum, axis=0).to(p_grad_gate.dtype.element_ty))


def select_tokens(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return (index [C] int64, number of rows used, int32 of no dimension) for mask [T] bool.

    The first `capacity` selected tokens, in order; unused rows hold T.
    """
    if mask.dim() != 1 or mask.dtype != torch.bool or capacity < 0:
        raise ValueError(f"select_tokens takes one bool a token and a capacity ≥ 0: {mask.dtype}, {capacity}")
    tokens = len(mask)
    if runs_triton(mask) and tokens and capacity:
        index = torch.empty(capacity, dtype=torch.int64, device=mask.device)
        count = torch.empty((), dtype=torch.int32, device=mask.device)
        _select_kernel[(triton.cdiv(tokens, _SELECT_BLOCK),)](
            mask.contiguous().view(torch.uint8), index, count, tokens, capacity, BLOCK=_SELECT_BLOCK
        )
        return index, count
    rows = mask.cumsum(0) - 1
    rows = torch.where(mask & (rows < capacity), rows, capacity)
    index = torch.full((capacity + 1,), tokens, device=mask.device)
    index.scatter_(0, rows, torch.arange(tokens, device=mask.device))
    return index[:capacity], mask.sum().clamp(max=capacity).int()


def selected_rows(mask: Tensor, *, may_wait: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the positions of the tokens that mask [T] bool selects, [C] int64, and how many lead that are in use.

    Both are those of `select_tokens`. On a GPU there are T rows, so that a step waits for nothing and stays one CUDA
    graph; for those who may wait for the device, and save the memory of unused rows, there are as many as selected
    tokens where these are many. On the CPU there always are. Then the number is None.
    """
    if not runs_triton(mask):
        return mask.nonzero()[:, 0], None
    if may_wait and len(mask) > _MOST_UNCOUNTED:
        return select_tokens(mask, int(torch.count_nonzero(mask)))[0], None
    return select_tokens(mask, len(mask))


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], [C, D], of x [T, D]; zeros where the index is not a token. Differentiable.

    index [C] int64 names no token twice.
    """
    _check(x, index)
    return _Gather.apply(x, index) if torch.is_grad_enabled() and x.requires_grad else _gather(x, index)


def scatter_add_rows(
    x: Tensor, index: Tensor, delta: Tensor, gate: Tensor | None = None, *, in_place: bool = False
) -> Tensor:
    """Return x [T, D] with gate · delta added to its rows `index`; delta [C, D], gate [C] (None: 1). Differentiable.

    index as in `gather_rows`. The result has the dtype of x; products and sums are in fp32. `in_place` changes x itself
    and returns it, so that the other rows need not be copied: for inference only.
    """
    _check(x, index)
    if delta.shape != (len(index), x.shape[1]) or (gate is not None and gate.shape != index.shape):
        raise ValueError(f"scatter_add_rows takes a row of delta and a gate of each index, {len(index)}: {delta.shape}")
    return _add(x, index, delta, gate) if in_place else _ScatterAdd.apply(x, index, delta, gate)


def _check(x: Tensor, index: Tensor) -> None:
    if x.dim() != 2 or index.dim() != 1 or index.dtype != torch.int64:
        raise ValueError(f"routing takes x [T, D] and an int64 index [C], not {x.shape}, {index.dtype} {index.shape}")


def _gather(x: Tensor, index: Tensor) -> Tensor:
    if not runs_triton(x):
        if _all_are_tokens(index, len(x)):
            return x.index_select(0, index)
        is_token, rows = _rows(x, index)
        return torch.where(is_token, x[rows], 0) if len(x) else x.new_zeros(len(index), x.shape[1])
    check_rows(x=x)
    out = torch.empty(len(index), x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        block, warps = _tile(x.shape[1])
        _gather_kernel[(len(index), triton.cdiv(x.shape[1], block))](
            x, index.contiguous(), out, len(x), x.stride(0), SIZE=x.shape[1], BLOCK=block, num_warps=warps
        )
    return out


def _add(x: Tensor, index: Tensor, delta: Tensor, gate: Tensor | None) -> Tensor:
    """Add in place."""
    if not runs_triton(x):
        wide = _wide(delta) if gate is None else _wide(delta) * _wide(gate)[:, None]
        if not _all_are_tokens(index, len(x)):
            keep = (index >= 0) & (index < len(x))
            index, wide = index[keep], wide[keep]
        return x.index_copy_(0, index, (_wide(x.index_select(0, index)) + wide).to(x.dtype))
    check_rows(x=x, delta=delta)
    if delta.numel():
        block, warps = _tile(x.shape[1])
        _add_kernel[(len(index), triton.cdiv(x.shape[1], block))](
            x, index.contiguous(), delta, None if gate is None else gate.contiguous(), len(x),
            x.stride(0), delta.stride(0), SIZE=x.shape[1], BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return x


def _add_backward(grad: Tensor, index: Tensor, delta: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of delta and gate."""
    if not runs_triton(grad):
        rows = _wide(_gather(grad, index))
        return (rows * _wide(gate)[:, None]).to(delta.dtype), (rows * _wide(delta)).sum(-1).to(gate.dtype)
    check_rows(grad=grad, delta=delta)
    grad_delta = torch.empty(delta.shape, dtype=delta.dtype, device=delta.device)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if delta.numel():
        block, warps = _tile(grad.shape[1])
        _add_backward_kernel[(len(index),)](
            grad, index.contiguous(), delta, gate.contiguous(), grad_delta, grad_gate, len(grad),
            grad.stride(0), delta.stride(0), SIZE=grad.shape[1], BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return grad_delta, grad_gate


def _all_are_tokens(index: Tensor, tokens: int) -> bool:
    """Return whether every row is in use; asks the device, which on the CPU costs less than masks."""
    if not len(index):
        return True
    low, high = index.aminmax()
    return low.item() >= 0 and high.item() < tokens


def _rows(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each row of the index is in use, [C, 1], and its token, [C]."""
    return ((index >= 0) & (index < len(x)))[:, None], index.clamp(0, max(len(x) - 1, 0))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tile(size: int) -> tuple[int, int]:
    """(Columns a block, warps) for rows of `size`."""
    block = min(_ROW_BLOCK, triton.next_power_of_2(size))
    return block, max(1, min(8, block // 512))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.tokens = len(x)
        return _gather(x, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad_x = torch.zeros(ctx.tokens, grad.shape[1], dtype=grad.dtype, device=grad.device)
        return _add(grad_x, index, grad.contiguous(), None), None


class _ScatterAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, delta: Tensor, gate: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, delta, gate)
        return _add(x.clone(memory_format=torch.contiguous_format), index, delta, gate)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, delta, gate = ctx.saved_tensors
        grad = grad.contiguous()
        if gate is None:
            return grad, None, _gather(grad, index).to(delta.dtype), None
        return grad, None, *_add_backward(grad, index, delta, gate)
