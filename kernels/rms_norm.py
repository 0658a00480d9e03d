"""Root-mean-square normalisation, with the residual addition that precedes it.

    s = x + residual,   n = s / sqrt(mean(s²) + eps),   y = n · weight
    dweight = Σ_rows dy · n,   ds = (dy · weight − n · mean(dy · n · weight)) / sqrt(mean(s²) + eps)

n is computed in fp32 and rounded to the dtype of y before the product with the weight, as Llama implementations do.
Source: https://arxiv.org/abs/1910.07467.

The Triton kernels read and write each element once: a program holds a long row, or several short ones, in registers.
In the backward pass a program takes many tiles of rows and adds up its share of dweight; torch adds the shares in a
fixed order, so that dweight has the same bits in every run.

Legend: T tokens, H heads a token (1 where rows are not heads), D size of the normalised dimension.
"""

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._rows_cpu import norm_rows, normalizes
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, in_fp32, num_processors, runs_triton

# Up to this many rows a call costs more than its arithmetic.
_MOST_SMALL_ROWS = 16
_MAX_SIZE = 16_384


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` without residual in its plainest form."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalized.to(x.dtype) * weight.to(x.dtype)


@triton.jit
def inverse_rms(b_x, eps, SIZE: tl.constexpr):
    """1 / rms of each row of b_x, fp32 [R, BLOCK] → [R]; columns from SIZE on are zero."""
    return tl.rsqrt(tl.sum(b_x * b_x, axis=1) / SIZE + in_fp32(eps))


@triton.jit
def apply_weight(b_normalized, b_weight, DTYPE: tl.constexpr):
    """normalized · weight, both and the product rounded to DTYPE. Products of bf16 are formed in fp32: exactly."""
    return (b_normalized.to(DTYPE).to(tl.float32) * b_weight.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def _offsets(rows, columns, token_stride, head_stride, HEADS: tl.constexpr):
    """Where the elements of rows numbered over tokens and heads lie."""
    tokens, heads = (rows // HEADS).to(tl.int64), (rows % HEADS).to(tl.int64)
    return (tokens * token_stride + heads * head_stride)[:, None] + columns[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    p_x, p_residual, p_weight, p_y, p_sum, p_inverse_rms,
    num_rows, x_token, x_head, residual_token, residual_head, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of y, and of the sum if there is a residual, which are contiguous."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    m_rows, m_columns = rows < num_rows, columns < SIZE
    mask = m_rows[:, None] & m_columns[None, :]
    o_out = _offsets(rows, columns, SIZE, 0, 1)
    o_x = _offsets(rows, columns, x_token, x_head, HEADS)
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    if p_residual is not None:
        o_residual = _offsets(rows, columns, residual_token, residual_head, HEADS)
        b_residual = tl.load(p_residual + o_residual, mask=mask, other=0.0).to(tl.float32)
        b_sum = (b_x + b_residual).to(p_sum.dtype.element_ty)
        tl.store(p_sum + o_out, b_sum, mask=mask)
        b_x = b_sum.to(tl.float32)
    b_inverse = inverse_rms(b_x, eps, SIZE)
    if p_inverse_rms is not None:
        tl.store(p_inverse_rms + rows, b_inverse, mask=m_rows)
    b_weight = tl.load(p_weight + columns, mask=m_columns, other=0.0)
    b_y = apply_weight(b_x * b_inverse[:, None], b_weight[None, :], p_y.dtype.element_ty)
    tl.store(p_y + o_out, b_y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    p_grad_y, p_grad_sum, p_sum, p_weight, p_inverse_rms, p_grad_x, p_grad_residual, p_shares,
    num_rows, sum_token, sum_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every n-th tile of ROWS rows of the gradients, n programs in all, and this program's share of dweight.

    All but the sum is contiguous. p_grad_sum is None if no gradient reaches the sum from elsewhere, p_grad_residual
    if the gradients of x and residual have one dtype, p_shares if the weight needs no gradient.
    """
    columns = tl.arange(0, BLOCK)
    m_columns = columns < SIZE
    b_weight = tl.load(p_weight + columns, mask=m_columns, other=0.0).to(tl.float32)[None, :]
    b_share = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        m_rows = rows < num_rows
        mask = m_rows[:, None] & m_columns[None, :]
        o_row = _offsets(rows, columns, SIZE, 0, 1)
        o_sum = _offsets(rows, columns, sum_token, sum_head, HEADS)
        b_inverse = tl.load(p_inverse_rms + rows, mask=m_rows, other=0.0)[:, None]
        b_normalized = tl.load(p_sum + o_sum, mask=mask, other=0.0).to(tl.float32) * b_inverse
        b_grad_y = tl.load(p_grad_y + o_row, mask=mask, other=0.0).to(tl.float32)
        b_product = b_normalized * b_grad_y
        b_share += b_product
        b_mean = tl.sum(b_product * b_weight, axis=1)[:, None] / SIZE
        b_grad = (b_grad_y * b_weight - b_normalized * b_mean) * b_inverse
        if p_grad_sum is not None:
            b_grad += tl.load(p_grad_sum + o_row, mask=mask, other=0.0).to(tl.float32)
        tl.store(p_grad_x + o_row, b_grad.to(p_grad_x.dtype.element_ty), mask=mask)
        if p_grad_residual is not None:
            tl.store(p_grad_residual + o_row, b_grad.to(p_grad_residual.dtype.element_ty), mask=mask)
    if p_shares is not None:
        tl.store(p_shares + tl.program_id(0) * SIZE + columns, tl.sum(b_share, axis=0), mask=m_columns)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise x [T, ..., D] over its last dimension; with a residual of its shape return (y, x + residual).

    y has the dtype of x; the sum has the wider dtype of x and residual. Differentiable. On CUDA the inputs are fp32,
    bf16 or fp16, contiguous in the last dimension, and D is at most 16384; otherwise this raises ValueError.
    """
    if runs_triton(x):
        return _rms_norm_triton(x, weight, eps, residual)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, residual))
    if not learns and normalizes(x, weight, residual):
        normed = norm_rows(x, weight, eps, residual)
        return normed[0] if residual is None else normed
    summed = x if residual is None else x + residual
    y = _RMSNorm.apply(summed, weight, eps, x.dtype) if learns else _scaled(_normalize(summed, eps), weight, x.dtype)
    return y if residual is None else (y, summed)


def _rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    check_rows(x=x, weight=weight)
    if weight.shape != x.shape[-1:] or x.shape[-1] > _MAX_SIZE:
        raise ValueError(f"rms_norm takes rows of at most {_MAX_SIZE} and as many weights: {x.shape}, {weight.shape}")
    if residual is not None:
        check_rows(residual=residual)
        if residual.shape != x.shape:
            raise ValueError(f"rms_norm takes a residual of the shape of x, {x.shape}, not {residual.shape}")
    inputs = (x, weight) if residual is None else (x, weight, residual)
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _FusedRMSNorm.apply(x, weight, eps, residual)
    y, summed, _ = _forward(x, weight, eps, residual, keep=False)
    return y if residual is None else (y, summed)


def _tile(size: int) -> tuple[int, int, int]:
    """Return (rows of a program, power of two of at least `size`, warps): 16 elements a thread, 32 in the longest."""
    block = triton.next_power_of_2(size)
    rows = max(1, 2048 // block)
    return rows, block, min(rows * block // 512, 16)


def _as_heads(x: Tensor) -> Tensor:
    """Return x as [T, H, D]: rows of two strides, so that a head of a fused projection needs no copy."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(0, -3)


def _forward(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, the sum (x itself without a residual) and, to `keep` for the backward pass, 1 / rms of each row."""
    heads, size = _as_heads(x), x.shape[-1]
    residual_heads = heads if residual is None else _as_heads(residual)
    num_rows, num_heads = heads.shape[0] * heads.shape[1], heads.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = x
    if residual is not None:
        summed = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    inverse = torch.empty(num_rows, dtype=torch.float32, device=x.device) if keep else None
    rows, block, warps = _tile(size)
    _forward_kernel[(triton.cdiv(num_rows, rows),)](
        heads, None if residual is None else residual_heads, weight, y, None if residual is None else summed, inverse,
        num_rows, heads.stride(0), heads.stride(1), residual_heads.stride(0), residual_heads.stride(1), eps,
        HEADS=num_heads, SIZE=size, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, summed, inverse


class _FusedRMSNorm(torch.autograd.Function):
    """Keeps s and one number a row. The gradient that reaches s by the residual stream is added in the same pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, summed, inverse = _forward(x, weight, eps, residual, keep=True)
        ctx.save_for_backward(summed, weight, inverse)
        ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, summed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_sum: Tensor | None = None) -> tuple[Tensor | None, ...]:
        summed, weight, inverse = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        if grad_y is None:
            grad_y = torch.zeros(summed.shape, dtype=x_dtype, device=summed.device)
        grad_x = torch.empty(summed.shape, dtype=x_dtype, device=summed.device)
        grad_residual = grad_x if residual_dtype == x_dtype else torch.empty_like(grad_x, dtype=residual_dtype)
        heads, size = _as_heads(summed), summed.shape[-1]
        rows, block, warps = _tile(size)
        # Sixteen warps a processor keep the memory busy and leave each thread registers for its share.
        programs = min(triton.cdiv(len(inverse), rows), num_processors(summed.device) * (16 // warps))
        shares = None
        if ctx.needs_input_grad[1]:
            shares = torch.empty(programs, size, dtype=torch.float32, device=summed.device)
        _backward_kernel[(programs,)](
            grad_y.contiguous(), None if grad_sum is None else grad_sum.contiguous(), heads, weight, inverse,
            grad_x, None if grad_residual is grad_x else grad_residual, shares,
            len(inverse), heads.stride(0), heads.stride(1),
            HEADS=heads.shape[1], SIZE=size, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        grad_weight = None if shares is None else shares.sum(0).to(weight.dtype)
        return grad_x, grad_weight, None, grad_residual if ctx.needs_input_grad[3] else None


def _scaled(normalized: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return normalized.to(dtype) * weight.to(dtype)


def _normalize(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) in the dtype of x or fp32."""
    size = x.shape[-1]
    if x.numel() <= _MOST_SMALL_ROWS * size:
        # One fused kernel instead of five: (x, −x) has the mean 0 and the variance mean(x²).
        return F.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), eps=eps)[..., :size]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * _inverse_rms(wide, eps)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """Keeps s and one number a row for the backward pass, instead of every intermediate result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse_rms = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        if dtype == x.dtype and normalizes(x, weight, None):  # the bits that inference computes
            return norm_rows(x, weight, eps, None)[0]
        return _scaled(wide * inverse_rms, weight, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        normalized = x * inverse_rms
        weight_wide = weight.to(normalized.dtype)
        product = normalized * grad_y
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = torch.matmul(product, weight_wide).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(grad_y, weight_wide, out=product).addcmul_(normalized, mean, value=-1).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None, None
