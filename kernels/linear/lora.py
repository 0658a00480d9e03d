"""Low-rank adapters (LoRA) beside a linear layer, several in one batch.

    y'[t] = y[t] + scale_s · B_s (A_s x[t]),   s = slots[t], the adapter of row t; y'[t] = y[t] where slots[t] = −1

Source: https://arxiv.org/abs/2106.09685; several adapters at once: https://arxiv.org/abs/2310.18547.

On CUDA two kernels: one sums z = A_s x over parts of K, the other adds B_s z to y. A program takes a tile of rows and
walks over the adapters that these use, which it finds on the device: rows may lie in any order, and grids follow from
shapes. In an adapter's turn the other rows of the tile are zeros, so no row changes the bits of another. z stays in
fp32. On the CPU a few bf16 rows are one call of `_lora.c`; others are grouped by adapter, and z is rounded to the dtype
of x.

Legend: T tokens, K input features, N output features, S adapters, R rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.ragged_tiles import dot
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, is_interpreted, num_processors, runs_triton
from kernels.linear import _lora_cpu

# Up to this many rows tiles have the fewest rows that tensor cores take, and K is split by its size alone.
_MOST_SKINNY_ROWS = 64
_INPUTS_PER_SPLIT, _MOST_SPLITS = 512, 8
# Adapters of one tile that different programs take where rows are few.
_MOST_PARTS = 16


Slots = Tensor | None
"""The adapter of each row, [T] integers, -1 for none; None: every row has the first."""
AdapterOperands = tuple[tuple[Tensor | None, ...], tuple[int, int], dict[str, Any]]
"""What `lora_tile` takes: tensors, numbers of adapters and ranks, constants."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """S adapters of one linear layer, each padded with zeros to the largest rank R. ValueError if shapes do not fit."""

    a: Tensor
    """[S, R, K], contiguous, of the dtype of the rows."""
    b: Tensor
    """[S, N, R], likewise."""
    scales: Tensor
    """fp32 [S]: usually alpha / rank."""

    def __post_init__(self) -> None:
        a, b = self.a, self.b
        if a.ndim != 3 or b.ndim != 3 or len(a) != len(b) or a.shape[1] != b.shape[2] or 0 in a.shape[:2]:
            raise ValueError(
                f"adapters must be a [S, R, K] and b [S, N, R] with S and R of at least 1, not {list(a.shape)} and "
                f"{list(b.shape)}"
            )
        if a.dtype != b.dtype or not a.is_contiguous() or not b.is_contiguous():
            raise ValueError(f"adapters a ({a.dtype}) and b ({b.dtype}) must have one dtype and be contiguous")
        if self.scales.shape != (len(a),) or self.scales.dtype != torch.float32:
            shape = list(self.scales.shape)
            raise ValueError(f"scales of adapters must be float32 [{len(a)}], not {self.scales.dtype} {shape}")


def lora_reference(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor | None) -> Tensor:
    """`lora_add` in its plainest form: one row at a time."""
    adapters = [0] * len(x) if slots is None else slots.tolist()
    rows = list(y.unbind())
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            change = weights.b[adapter] @ (weights.a[adapter] @ x[row])
            rows[row] = y[row] + weights.scales[adapter].to(y.dtype) * change
    return torch.stack(rows) if rows else y.clone()


@triton.jit
def adapters_of_rows(p_slots, o_t, m_t, num_adapters):
    """The adapter of each row; −1 for rows without one."""
    b_slots = tl.where(m_t, 0, -1) if p_slots is None else tl.load(p_slots + o_t, mask=m_t, other=-1)
    return tl.where(b_slots < num_adapters, b_slots, -1)


@triton.jit
def next_adapter(b_slots, after, num_adapters):
    """The first adapter above `after` that a row uses; `num_adapters` if there is none."""
    return tl.min(tl.where(b_slots > after, b_slots, num_adapters), axis=0)


@triton.jit
def _low_rank_product(b_z, b_b, b_sum, INTERPRETED: tl.constexpr):
    """b_sum + z B of z [T, R] in fp32 and B [R, N] in any dtype, as exactly as in fp32."""
    SHORT: tl.constexpr = b_b.dtype.primitive_bitwidth < 32
    b_b = b_b.to(tl.float32)
    if b_z.shape[0] == 1:
        b_sum += tl.sum(tl.trans(b_z) * b_b, axis=0)[None, :]
    elif INTERPRETED or not SHORT:
        b_sum = tl.dot(b_z, b_b, b_sum, input_precision="ieee")
    else:
        # TF32 holds B exactly. z is cut into its first 11 bits, which TF32 holds too, and a rest of 13.
        b_first = (b_z.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_sum = tl.dot(b_first, b_b, b_sum, input_precision="tf32")
        b_sum = tl.dot(b_z - b_first, b_b, b_sum, input_precision="tf32")
    return b_sum


@triton.jit
def lora_tile(
    p_z, p_b, p_scales, b_slots, o_t, o_n, m_n, num_rows, num_outputs, num_adapters, rank,
    Z_SPLITS: tl.constexpr, RANKS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """What the adapters add to rows o_t and outputs o_n, fp32 [T, N]; z [Z_SPLITS, T, R] in parts."""
    b_sum = tl.zeros([o_t.shape[0], o_n.shape[0]], dtype=tl.float32)
    adapter = next_adapter(b_slots, -1, num_adapters)
    while adapter < num_adapters:
        m_mine = b_slots == adapter
        p_rows = p_b + (tl.cast(adapter, tl.int64) * num_outputs + o_n) * rank
        b_part = tl.zeros([o_t.shape[0], o_n.shape[0]], dtype=tl.float32)
        # Fetching ahead would take shared memory for each part of z, and few adapters have a second round.
        for start in tl.range(0, rank, RANKS, num_stages=1):
            o_r = start + tl.arange(0, RANKS)
            m_r = o_r < rank
            b_z = tl.zeros([o_t.shape[0], RANKS], dtype=tl.float32)
            for split in tl.static_range(Z_SPLITS):
                o_z = (tl.cast(split, tl.int64) * num_rows + o_t)[:, None] * rank + o_r[None, :]
                b_z += tl.load(p_z + o_z, mask=m_mine[:, None] & m_r[None, :], other=0.0)
            b_b = tl.load(p_rows[None, :] + o_r[:, None], mask=m_r[:, None] & m_n[None, :], other=0.0)
            b_part = _low_rank_product(b_z, b_b, b_part, INTERPRETED)
        b_sum = tl.where(m_mine[:, None], b_part * tl.load(p_scales + adapter), b_sum)
        adapter = next_adapter(b_slots, adapter, num_adapters)
    return b_sum


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    p_x, p_a, p_slots, p_z, num_rows, num_inputs, rank, num_adapters, inputs_each, stride_x,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """This split's sums of z [SPLITS, T, R], for the adapters that leave the rest `part` when divided by PARTS."""
    o_t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    o_r = tl.program_id(1) // PARTS * RANKS + tl.arange(0, RANKS)
    part, split = tl.program_id(1) % PARTS, tl.program_id(2)
    m_t, m_r = o_t < num_rows, o_r < rank
    b_slots = adapters_of_rows(p_slots, o_t, m_t, num_adapters)
    b_slots = tl.where(b_slots % PARTS == part, b_slots, -1)
    p_rows = p_x + o_t.to(tl.int64)[:, None] * stride_x
    last = tl.minimum((split + 1) * inputs_each, num_inputs)
    adapter = next_adapter(b_slots, -1, num_adapters)
    while adapter < num_adapters:
        m_mine = b_slots == adapter
        p_ranks = p_a + (tl.cast(adapter, tl.int64) * rank + o_r) * num_inputs
        b_z = tl.zeros([TOKENS, RANKS], dtype=tl.float32)
        for start in range(split * inputs_each, last, INPUTS):
            o_k = start + tl.arange(0, INPUTS)
            m_k = o_k < last
            b_x = tl.load(p_rows + o_k[None, :], mask=m_mine[:, None] & m_k[None, :], other=0.0)
            b_a = tl.load(p_ranks[None, :] + o_k[:, None], mask=m_r[None, :] & m_k[:, None], other=0.0)
            b_z = dot(b_x, b_a, b_z, INTERPRETED)
        o_z = (tl.cast(split, tl.int64) * num_rows + o_t)[:, None] * rank + o_r[None, :]
        tl.store(p_z + o_z, b_z, mask=m_mine[:, None] & m_r[None, :])
        adapter = next_adapter(b_slots, adapter, num_adapters)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    p_y, p_z, p_b, p_scales, p_slots, p_out, num_rows, num_outputs, num_adapters, rank, stride_y,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, Z_SPLITS: tl.constexpr, RANKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of y' [T, N]: the rows whose adapter leaves the rest `part`; part 0 copies those without an adapter."""
    o_t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    o_n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    m_t, m_n = o_t < num_rows, o_n < num_outputs
    b_slots = adapters_of_rows(p_slots, o_t, m_t, num_adapters)
    m_mine = m_t & tl.where(b_slots < 0, part == 0, b_slots % PARTS == part)
    mask = m_mine[:, None] & m_n[None, :]
    b_slots = tl.where(m_mine, b_slots, -1)
    b_change = lora_tile(
        p_z, p_b, p_scales, b_slots, o_t, o_n, m_n, num_rows, num_outputs, num_adapters, rank, Z_SPLITS, RANKS,
        INTERPRETED,
    )  # fmt: skip
    b_y = tl.load(p_y + o_t.to(tl.int64)[:, None] * stride_y + o_n[None, :], mask=mask, other=0.0)
    b_sum = (b_y.to(tl.float32) + b_change).to(p_out.dtype.element_ty)
    b_y = tl.where(b_slots[:, None] < 0, b_y, b_sum)
    tl.store(p_out + o_t.to(tl.int64)[:, None] * num_outputs + o_n[None, :], b_y, mask=mask)


def lora_add(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor | None) -> Tensor:
    """Return y [T, N] plus what the adapters make of x [T, K], a new tensor of the dtype of y.

    slots [T] int32: the adapter of each row, below S; a row with −1 keeps its bits. None: all rows use adapter 0, and
    if S = 1 the result is differentiable in y, x, a and b. All have one dtype, on CUDA fp32, bf16 or fp16. On CUDA
    sums are fp32, rounded once, and up to 64 rows the bits of a row depend on nothing but itself; a slot of S or more,
    refused on the CPU, counts as −1. Raises ValueError for what does not fit, and for gradients with several adapters.
    """
    check_adapters(x, weights, slots, y.shape[-1])
    if y.shape[:-1] != x.shape[:1] or y.dtype != x.dtype:
        raise ValueError(f"y must be {x.dtype} [{len(x)}, {y.shape[-1]}] as x is, not {y.dtype} {list(y.shape)}")
    if runs_triton(x):
        check_rows(x=x, y=y)
    if wants_gradients(y, x, weights.a, weights.b):
        if slots is not None or len(weights.a) > 1:
            raise ValueError("only one adapter can be trained: gradients need S = 1 and slots=None")
        result: Tensor = _LoraAdd.apply(y, x, weights.a, weights.b, weights.scales)
        return result
    return _forward(y, x, weights, slots)


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def check_adapters(x: Tensor, weights: LoraWeights, slots: Tensor | None, num_outputs: int) -> None:
    """Raise ValueError unless adapters fit rows x [T, K] and `num_outputs` outputs of a layer, and slots these rows."""
    k, n = weights.a.shape[2], weights.b.shape[1]
    if x.ndim != 2 or x.shape[1] != k or num_outputs != n or x.dtype != weights.a.dtype:
        layer = f"{x.dtype} rows {list(x.shape)} and {num_outputs} outputs"
        raise ValueError(f"adapters in {weights.a.dtype} of {k} inputs and {n} outputs do not fit {layer}")
    if slots is not None and (slots.dtype != torch.int32 or slots.shape != x.shape[:1]):
        raise ValueError(f"slots must be int32 [{len(x)}], not {slots.dtype} {list(slots.shape)}")


def _forward(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor | None) -> Tensor:
    if not runs_triton(x):
        return _forward_on_cpu(y, x, weights, slots)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows, n = out.shape
    if not out.numel():
        return out
    skinny = rows <= _MOST_SKINNY_ROWS
    tokens, outputs = (16, 64) if skinny else (64, 128)
    operands, numbers, constants = expand_operands(x, weights, slots)
    parts = min(numbers[0], _MOST_PARTS) if skinny else 1
    _expand_kernel[(triton.cdiv(rows, tokens), triton.cdiv(n, outputs), parts)](
        y, *operands, out, rows, n, *numbers, y.stride(0),
        PARTS=parts, TOKENS=tokens, OUTPUTS=outputs, **constants, INTERPRETED=is_interpreted(x), num_warps=4,
    )  # fmt: skip
    return out


def expand_operands(x: Tensor, weights: LoraWeights | None, slots: Tensor | None) -> AdapterOperands:
    """Shrink rows x [T, K] and return what `lora_tile` takes.

    The tensors are z, b, scales and slots, all None without adapters.
    """
    if weights is None:
        return (None,) * 4, (0, 0), {"Z_SPLITS": 0, "RANKS": 0}
    rank = weights.a.shape[1]
    num_adapters = 1 if slots is None else len(weights.a)
    z = _shrink(x, weights, slots, num_adapters)
    constants = {"Z_SPLITS": len(z), "RANKS": _ranks(rank)}
    return (z, weights.b, weights.scales, slots), (num_adapters, rank), constants


def _shrink(x: Tensor, weights: LoraWeights, slots: Tensor | None, num_adapters: int) -> Tensor:
    """z [SPLITS, T, R] fp32: parts of A x in the order in which they are to be added; unset where rows have none."""
    (rows, k), rank = x.shape, weights.a.shape[1]
    skinny = rows <= _MOST_SKINNY_ROWS
    tokens, inputs, ranks = 16 if skinny else 64, 128 if x.dtype.itemsize == 2 else 64, _ranks(rank)
    parts = min(num_adapters, _MOST_PARTS) if skinny else 1
    blocks = triton.cdiv(rows, tokens), triton.cdiv(rank, ranks) * parts
    splits = min(_MOST_SPLITS, triton.cdiv(k, _INPUTS_PER_SPLIT))
    if not skinny:
        splits = min(splits, max(1, 2 * num_processors(x.device) // (blocks[0] * blocks[1])))
    inputs_each = triton.cdiv(triton.cdiv(k, splits), inputs) * inputs
    splits = triton.cdiv(k, inputs_each)
    z = torch.empty(splits, rows, rank, dtype=torch.float32, device=x.device)
    _shrink_kernel[(*blocks, splits)](
        x, weights.a, slots, z, rows, k, rank, num_adapters, inputs_each, x.stride(0),
        PARTS=parts, TOKENS=tokens, RANKS=ranks, INPUTS=inputs, INTERPRETED=is_interpreted(x),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return z


def _ranks(rank: int) -> int:
    """Ranks of one product: what tensor cores take, at most 64."""
    return min(64, max(16, triton.next_power_of_2(rank)))


def _forward_on_cpu(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor | None) -> Tensor:
    if slots is not None and len(slots) and (largest := int(slots.max())) >= len(weights.a):
        raise ValueError(f"slots name adapter {largest}; there are {len(weights.a)}, counted from 0")
    if _lora_cpu.takes(x):
        return _lora_cpu.add_adapters(y, x, weights.a, weights.b, weights.scales, slots)
    if slots is None:
        return _add_adapter(y, x, weights, 0)
    used = slots.unique().tolist()
    if len(used) == 1 and used[0] >= 0:
        return _add_adapter(y, x, weights, used[0])
    out = y.clone()
    for adapter in used:
        if adapter >= 0:
            rows = (slots == adapter).nonzero().squeeze(1)
            out[rows] = _add_adapter(y[rows], x[rows], weights, adapter)
    return out


def _add_adapter(y: Tensor, x: Tensor, weights: LoraWeights, adapter: int) -> Tensor:
    shrunk = x @ weights.a[adapter].t()
    return torch.addmm(y, shrunk, weights.b[adapter].t(), alpha=weights.scales[adapter].item())


class _LoraAdd(torch.autograd.Function):
    """Adapter 0 for all rows; A x is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b, scales)
        return _forward(y, x, LoraWeights(a, b, scales), None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, scales = ctx.saved_tensors
        a, b = a[0], b[0]
        needs_y, needs_x, needs_a, needs_b, _ = ctx.needs_input_grad
        scale = scales[0].to(grad.dtype)
        grad_x = grad_a = grad_b = None
        if needs_x or needs_a:
            grad_z = (grad @ b) * scale
            grad_x = grad_z @ a if needs_x else None
            grad_a = (grad_z.t() @ x)[None] if needs_a else None
        if needs_b:
            grad_b = (grad.t() @ ((x @ a.t()) * scale))[None]
        return grad if needs_y else None, grad_x, grad_a, grad_b, None
