"""A step of AdamW with its moments in 8 bits: about 2 bytes a weight instead of 8.

    m ← m + (1 − β₁)(g − m),   v ← β₂ v + (1 − β₂) g²
    w ← w (1 − η λ) − η / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

m and v are kept as codes of the dynamic 8-bit types, signed and unsigned, times the absmax of their 256-block; a step
decodes them, works in fp32 and encodes them again. A code is the nearest one, with one exception: a positive v never
becomes 0, for m would then be divided by ε alone.

Source: https://arxiv.org/abs/2110.02861, and bitsandbytes for the types' values. Legend: N weights, B = ⌈N/256⌉ blocks,
g gradient, η learning rate, λ weight decay, t step.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.common.triton_support import runs_triton
from kernels.linear.quantization import dynamic_table
from kernels.losses._projection import slices

BLOCK = 256
# On the CPU: a chunk's few fp32 buffers stay in the cache.
_BLOCKS_PER_CHUNK = 256
_BLOCKS_PER_PROGRAM = 4
_TINIEST = 1e-38


class Moments(NamedTuple):
    """Both moments of N weights, changed in place by a step; what is behind the N-th code is 0."""

    exp_avg: Tensor
    """u8 [B, 256], signed codes."""
    exp_avg_absmax: Tensor
    """fp32 [B]."""
    exp_avg_sq: Tensor
    """u8 [B, 256], unsigned codes."""
    exp_avg_sq_absmax: Tensor
    """fp32 [B]."""

    @classmethod
    def empty(cls, count: int, *, device: torch.device) -> "Moments":
        """Memory for the moments of `count` weights."""
        blocks = -(-count // BLOCK)
        codes, absmax = ((blocks, BLOCK), torch.uint8), ((blocks,), torch.float32)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in (codes, absmax) * 2))

    @classmethod
    def zeros(cls, count: int, *, device: torch.device) -> "Moments":
        """The moments of `count` weights before the first step."""
        moments = cls.empty(count, device=device)
        moments.reset()
        return moments

    def reset(self) -> None:
        """Back to before the first step."""
        for codes, absmax, signed in ((self[0], self[1], True), (self[2], self[3], False)):
            codes.fill_(int((dynamic_table(codes.device, signed) == 0).nonzero()))
            absmax.zero_()


@cache
def _bounds(device: torch.device, signed: bool) -> Tensor:
    """fp32 [255]: a value's code is how many of these lie below it."""
    table = dynamic_table(device, signed)
    bounds = (table[:-1] + table[1:]) / 2
    if not signed:
        bounds[0] = 0
    return bounds


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes [B, 256] and absmax [B] of fp32 values [B, 256]."""
    absmax = values.abs().amax(-1)
    scaled = values * (1 / absmax.clamp(min=_TINIEST))[:, None]
    return torch.bucketize(scaled, _bounds(values.device, signed)).to(torch.uint8), absmax


def decode(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """fp32 values [B, 256]."""
    return dynamic_table(codes.device, signed)[codes.long()] * absmax[:, None]


def adamw_8bit_reference(
    weight: Tensor, grad: Tensor, moments: Moments, *,
    learning_rate: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
) -> tuple[Tensor, Moments]:  # fmt: skip
    """`adamw_8bit` in its plainest form; returns the new weight and moments and changes nothing."""
    padded = F.pad(grad.float().flatten(), (0, -grad.numel() % BLOCK)).view(-1, BLOCK)
    exp_avg = decode(moments.exp_avg, moments.exp_avg_absmax, True)
    exp_avg = exp_avg + (1 - beta1) * (padded - exp_avg)
    exp_avg_sq = beta2 * decode(moments.exp_avg_sq, moments.exp_avg_sq_absmax, False)
    exp_avg_sq = exp_avg_sq + (1 - beta2) * padded * padded
    update = exp_avg / (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + eps)
    update = update.flatten()[: weight.numel()].view(weight.shape)
    weight = weight * (1 - learning_rate * weight_decay) - learning_rate / (1 - beta1**step) * update
    return weight, Moments(*encode(exp_avg, True), *encode(exp_avg_sq, False))


@triton.jit
def _encode(b_values, p_codes, p_absmax, p_bounds, blocks, offsets, num_blocks, TINIEST: tl.constexpr):
    """Stores codes and absmax of fp32 values [blocks, 256]. The code is found by bisection."""
    b_absmax = tl.max(tl.abs(b_values), axis=1)
    b_scaled = b_values * (1.0 / tl.maximum(b_absmax, TINIEST))[:, None]
    b_codes = tl.zeros(b_values.shape, dtype=tl.int32)
    for bit in tl.static_range(8):
        b_next = b_codes + (128 >> bit)
        b_codes = tl.where(b_scaled > tl.load(p_bounds + b_next - 1), b_next, b_codes)
    tl.store(p_codes + offsets, b_codes.to(tl.uint8), mask=(blocks < num_blocks)[:, None])
    tl.store(p_absmax + blocks, b_absmax, mask=blocks < num_blocks)


@triton.jit(do_not_specialize=["num_blocks"])
def _update_kernel(
    p_weight, p_grad, p_exp_avg, p_exp_avg_absmax, p_exp_avg_sq, p_exp_avg_sq_absmax,
    p_signed, p_unsigned, p_signed_bounds, p_unsigned_bounds, num_weights, num_blocks,
    kept, step_size, one_minus_beta1, beta2, one_minus_beta2, inverse_correction, eps,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TINIEST: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of weights and of both moments, in place."""
    blocks = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    m_blocks, m_weights = blocks < num_blocks, offsets < num_weights
    b_grad = tl.load(p_grad + offsets, mask=m_weights, other=0.0).to(tl.float32)
    b_code = tl.load(p_exp_avg + offsets, mask=m_blocks[:, None], other=0).to(tl.int32)
    b_mean = tl.load(p_signed + b_code) * tl.load(p_exp_avg_absmax + blocks, mask=m_blocks, other=0.0)[:, None]
    b_mean += one_minus_beta1 * (b_grad - b_mean)
    b_code = tl.load(p_exp_avg_sq + offsets, mask=m_blocks[:, None], other=0).to(tl.int32)
    b_square = tl.load(p_unsigned + b_code) * tl.load(p_exp_avg_sq_absmax + blocks, mask=m_blocks, other=0.0)[:, None]
    b_square = beta2 * b_square + one_minus_beta2 * b_grad * b_grad
    b_weight = tl.load(p_weight + offsets, mask=m_weights, other=0.0).to(tl.float32)
    b_weight = b_weight * kept - step_size * (b_mean / (tl.sqrt(b_square) * inverse_correction + eps))
    tl.store(p_weight + offsets, b_weight.to(p_weight.dtype.element_ty), mask=m_weights)
    _encode(b_mean, p_exp_avg, p_exp_avg_absmax, p_signed_bounds, blocks, offsets, num_blocks, TINIEST)
    _encode(b_square, p_exp_avg_sq, p_exp_avg_sq_absmax, p_unsigned_bounds, blocks, offsets, num_blocks, TINIEST)


@torch.no_grad()
def adamw_8bit(
    weight: Tensor, grad: Tensor, moments: Moments, *,
    learning_rate: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    """Change `weight` (fp32, any shape, contiguous) and `moments` as step number `step` (1 is the first) does.

    grad: of the weight's shape, a float. Raises ValueError for anything else.
    """
    if weight.dtype != torch.float32 or not weight.is_contiguous() or grad.shape != weight.shape:
        raise ValueError(
            f"adamw_8bit takes a contiguous fp32 weight and a gradient of its shape, not {weight.dtype} "
            f"{tuple(weight.shape)} with strides {weight.stride()} and {tuple(grad.shape)}"
        )
    flat, flat_grad = weight.view(-1), grad.reshape(-1)
    scalars = {
        "kept": 1 - learning_rate * weight_decay,
        "step_size": learning_rate / (1 - beta1**step),
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "inverse_correction": 1 / math.sqrt(1 - beta2**step),
        "eps": eps,
    }
    if not runs_triton(weight):
        _update_cpu(flat, flat_grad, moments, **scalars)
        return
    num_blocks, device = len(moments.exp_avg), weight.device
    _update_kernel[(triton.cdiv(num_blocks, _BLOCKS_PER_PROGRAM),)](
        flat, flat_grad, *moments,
        dynamic_table(device, True), dynamic_table(device, False), _bounds(device, True), _bounds(device, False),
        len(flat), num_blocks, **scalars,
        BLOCK=BLOCK, BLOCKS=_BLOCKS_PER_PROGRAM, TINIEST=_TINIEST, num_warps=4,
    )  # fmt: skip


# --- without Triton ---------------------------------------------------------------------------------------------------


def _update_cpu(
    weight: Tensor, grad: Tensor, moments: Moments, *,
    kept: float, step_size: float, one_minus_beta1: float, beta2: float, one_minus_beta2: float,
    inverse_correction: float, eps: float,
) -> None:  # fmt: skip
    """Chunk by chunk in torch; `weight` and `grad` are [N]."""
    for blocks in slices(len(moments.exp_avg), _BLOCKS_PER_CHUNK):
        part = slice(blocks.start * BLOCK, min(blocks.stop * BLOCK, len(weight)))
        exp_avg, exp_avg_absmax, exp_avg_sq, exp_avg_sq_absmax = (state[blocks] for state in moments)
        gradient, count = grad[part].float(), part.stop - part.start
        means = _decode(exp_avg, exp_avg_absmax, True)
        squares = _decode(exp_avg_sq, exp_avg_sq_absmax, False)
        mean, square = means.view(-1)[:count], squares.view(-1)[:count]
        mean.lerp_(gradient, one_minus_beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=one_minus_beta2)
        divisor = square.sqrt().mul_(inverse_correction).add_(eps)
        weight[part].mul_(kept).addcdiv_(mean, divisor, value=-step_size)
        _store_codes(means, exp_avg, exp_avg_absmax, True)
        _store_codes(squares, exp_avg_sq, exp_avg_sq_absmax, False)


def _decode(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    values = dynamic_table(codes.device, signed).index_select(0, codes.view(-1).int())
    return values.view(codes.shape).mul_(absmax[:, None])


def _store_codes(values: Tensor, codes: Tensor, absmax: Tensor, signed: bool) -> None:
    """Codes and absmax of `values` [b, 256], which are lost.

    A value's upper 16 bits select the code of the least value that begins with them; no more than one bound lies
    between the two.
    """
    torch.amax(values.abs(), -1, out=absmax)
    values.mul_((1 / absmax.clamp(min=_TINIEST))[:, None])
    least, bounds = _least_codes(values.device, signed)
    found = least.index_select(0, (values.view(torch.int32).view(-1) >> 16).add_(1 << 15))
    codes.copy_((found + (values.view(-1) > bounds.index_select(0, found))).view(codes.shape))


@cache
def _least_codes(device: torch.device, signed: bool) -> tuple[Tensor, Tensor]:
    """Code of the least number of each 16 leading bits, int32 [65536] from the bits 0x8000 on; bounds, and infinity."""
    bounds = _bounds(device, signed)
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device)
    bits = (high << 16) | torch.where(high < 0, 0xFFFF, 0).int()
    least = bits.view(torch.float32).nan_to_num(0.0)
    return torch.bucketize(least, bounds, out_int32=True), F.pad(bounds, (0, 1), value=math.inf)
