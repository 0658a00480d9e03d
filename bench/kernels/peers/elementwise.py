"""The small kernels around attention, and the rows that a router selects."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Inputs, Outputs, Run, compiled, needs
from bench.kernels.inputs.elementwise import EPS


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = x + residual
    wide = summed.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return normalized.to(x.dtype) * weight, summed


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """For the tables of `rotary_tables`, whose sines are negative in the first half."""
    half = q.shape[-1] // 2
    return (q * cos + q.roll(half, dims=-1) * sin).to(q.dtype), (k * cos + k.roll(half, dims=-1) * sin).to(k.dtype)


def compiled_norm(inputs: Inputs) -> Callable[..., Outputs]:
    return compiled(plain_norm, inputs.x.device)


def compiled_swiglu(inputs: Inputs) -> Callable[..., Tensor]:
    return compiled(plain_swiglu, inputs.gate.device)


def compiled_rotary(inputs: Inputs) -> Run:
    rotate = compiled(plain_rotary, inputs.q.device)
    return lambda: rotate(inputs.q, inputs.k, inputs.cos, inputs.sin)


def compiled_rotary_write(inputs: Inputs) -> Run:
    write = compiled(_plain_rotary_write, inputs.q.device)
    return lambda: write(
        *(getattr(inputs, name) for name in ("q", "k", "v", "cos", "sin", "k_pages", "v_pages", "slots"))
    )


def _plain_rotary_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Outputs:
    q, k = plain_rotary(q, k, cos, sin)
    k_pages.flatten(0, 1).index_copy_(0, slots, k)
    v_pages.flatten(0, 1).index_copy_(0, slots, v)
    return q, k_pages, v_pages


@needs("liger_kernel.ops")
def liger_rotary(liger: Any, inputs: Inputs) -> Run:
    """Liger's rotation, which overwrites q and k."""
    q, k = inputs.q.transpose(0, 1)[None], inputs.k.transpose(0, 1)[None]
    # Liger reads the first half of each row and subtracts by itself: the second half of ours has the plain sines.
    half = inputs.sin.shape[-1] // 2
    cos, sin = inputs.cos[None, :, 0], inputs.sin[:, 0, half:].repeat(1, 2)[None]

    def run() -> Outputs:
        q_rotated, k_rotated = liger.LigerRopeFunction.apply(q, k, cos, sin)
        return q_rotated[0].transpose(0, 1), k_rotated[0].transpose(0, 1)

    return run


def liger_rotary_write(inputs: Inputs) -> Run | None:
    """Liger's rotation and two index copies."""
    rotate = liger_rotary(inputs)
    if rotate is None:
        return None
    k_slots, v_slots = inputs.k_pages.flatten(0, 1), inputs.v_pages.flatten(0, 1)

    def run() -> Outputs:
        q, k = rotate()
        k_slots.index_copy_(0, inputs.slots, k)
        v_slots.index_copy_(0, inputs.slots, inputs.v)
        return q, inputs.k_pages, inputs.v_pages

    return run


@needs("liger_kernel.ops")
def liger_norm(liger: Any, inputs: Inputs) -> Callable[..., Outputs]:
    """Liger's fused addition and normalisation."""
    function = liger.LigerFusedAddRMSNormFunction
    return lambda x, residual, weight: function.apply(x, residual, weight, EPS, 0.0, "llama", False)


@needs("flashinfer")
def flashinfer_norm(flashinfer: Any, inputs: Inputs) -> Run:
    """FlashInfer's fused addition and normalisation, which overwrites both of its inputs."""

    def run() -> Outputs:
        flashinfer.fused_add_rmsnorm(inputs.x, inputs.residual, inputs.weight, EPS)
        return inputs.x, inputs.residual

    return run


@needs("liger_kernel.ops")
def liger_swiglu(liger: Any, inputs: Inputs) -> Callable[..., Tensor]:
    return liger.LigerSiLUMulFunction.apply


def torch_select(inputs: Inputs) -> Run:
    """By a stable sort: the tokens set first, in order."""
    capacity, tokens = len(inputs.index), len(inputs.mask)
    rows = torch.arange(capacity, device=inputs.mask.device)

    def run() -> Outputs:
        used = inputs.mask.sum().clamp(max=capacity)
        index = torch.argsort(inputs.mask.byte(), descending=True, stable=True)[:capacity]
        return index.masked_fill(rows >= used, tokens), used

    return run


def torch_gather(inputs: Inputs) -> Run:
    return lambda: (inputs.x.index_select(0, inputs.index),)


def torch_add(inputs: Inputs) -> Run:
    return lambda: (inputs.x.index_add_(0, inputs.index, inputs.gate[:, None] * inputs.delta),)
