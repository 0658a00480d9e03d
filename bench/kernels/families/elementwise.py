"""Norm, gate, rotation and write into pages; the rows that a router selects.

Legend: T tokens, C rows of a routed block, D hidden size, I intermediate size, H heads, d head dim, P pages.
"""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import BF16, Call, Inputs, Outputs, Shape, by_name, in_fp64, needs, normal
from bench.kernels.families.attention import PAGE
from kernels.attention.rotary import apply_rotary_reference, rope_frequencies, rotary_tables
from kernels.rms_norm import rms_norm_reference
from kernels.swiglu import swiglu_reference
from kernels.token_routing import select_tokens_reference

EPS = 1e-5


def norm(tokens: int, size: int, backward: bool = False) -> Shape:
    """x and residual [T, D], weight [D]; the gradients of the results, y and the sum."""
    num_bytes = 2 * tokens * size * (4 + backward * 4) + 2 * size * (1 + backward * 2)

    def add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        return rms_norm_reference(x + residual, weight, EPS), x + residual

    return _rows("rms_norm", tokens, size, backward, num_bytes, add_and_norm, ("grad_y", "grad_sum"))


def gate(tokens: int, size: int, backward: bool = False) -> Shape:
    """gate and up [T, I]; the gradient of the result."""
    return _rows("swiglu", tokens, size, backward, 2 * tokens * size * (3 + backward * 5), swiglu_reference, ("grad",))


def _rows(
    kernel: str, tokens: int, size: int, backward: bool, num_bytes: float,
    function: Callable[..., Any], grads: tuple[str, ...],
) -> Shape:  # fmt: skip
    leaves = tuple(signature(function).parameters)

    def make() -> dict[str, Any]:
        names = (*leaves, *(grads if backward else ()))
        return {name: normal(size) if name == "weight" else normal(tokens, size) for name in names}

    mode = "forward+backward" if backward else "forward"
    fields = {"tokens": tokens, "size": size, "backward": backward}
    name = f"{kernel} {tokens}x{size}{f' {mode}' if backward else ''}"
    return Shape(name, fields, make, in_fp64(function), num_bytes, leaves=leaves, grads=grads, mode=mode)


def rotary(tokens: int, query_heads: int = 32, kv_heads: int = 8, head_dim: int = 128, write: bool = False) -> Shape:
    """New queries, keys and values [T, H, d], T a multiple of the page, their angles, and slots that fill the pages."""

    def make() -> dict[str, Any]:
        positions = torch.randint(0, 32_768, (tokens,))
        cos, sin = rotary_tables(positions, rope_frequencies(head_dim, 500_000.0))
        pages = (math.ceil(tokens / PAGE), PAGE, kv_heads, head_dim)
        heads = {"q": query_heads, "k": kv_heads, "v": kv_heads}
        made = {name: normal(tokens, count, head_dim) for name, count in heads.items()}
        made |= {name: torch.full(pages, torch.nan, dtype=BF16) for name in ("k_pages", "v_pages")}
        return made | {"cos": cos, "sin": sin, "slots": torch.randperm(pages[0] * PAGE)[:tokens]}

    # For writing q, k and v are read and written.
    written = 2 * (2 * query_heads + 4 * kv_heads) * head_dim + 4 * head_dim + 8
    return Shape(
        name=f"rotary{'+write' if write else ''} {tokens}",
        fields={"tokens": tokens, "query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim}, make=make,
        reference=in_fp64(and_write(apply_rotary_reference) if write else apply_rotary_reference),
        num_bytes=tokens * (written if write else 4 * head_dim * (query_heads + kv_heads + 1)),
    )  # fmt: skip


def and_write(rotate: Callable[..., Outputs]) -> Call:
    """A rotation; then the rotated keys and the values are copied into their slots of the pages."""

    def write(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
    ) -> Outputs:
        q, k = rotate(q, k, cos, sin)
        k_pages.flatten(0, 1).index_copy_(0, slots, k)
        v_pages.flatten(0, 1).index_copy_(0, slots, v)
        return q, k_pages, v_pages

    return write


def routed(verb: str, tokens: int, capacity: int, size: int) -> Shape:
    """mask [T] bool, of which C are set; index [C] of these; x [T, D]; delta [C, D] and gate [C] to add."""

    def make() -> dict[str, Any]:
        index = torch.randperm(tokens)[:capacity].sort().values
        x, delta = normal(tokens, size), normal(capacity, size)
        mask = torch.zeros(tokens, dtype=torch.bool).index_fill_(0, index, True)
        gate = torch.rand(capacity).bfloat16()
        return {"index": index, "mask": mask, "x": x, "delta": delta, "gate": gate}

    num_bytes, reference = {
        "select": (tokens + 8 * capacity, _selected),
        "gather": (capacity * (4 * size + 8), in_fp64(torch_gather)),
        "add": (capacity * (6 * size + 10), in_fp64(torch_add)),
    }[verb]
    fields = {"tokens": tokens, "capacity": capacity, "size": size}
    return Shape(f"{verb} {capacity} of {tokens}", fields, make, reference, num_bytes)


def _selected(inputs: Inputs) -> Outputs:
    """The index, and how many of its rows are used."""
    found = select_tokens_reference(inputs.mask.tolist(), len(inputs.index))
    return tuple(torch.tensor(one, device=inputs.mask.device) for one in found)


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return F.rms_norm(summed, weight.shape, weight, EPS), summed


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """For the tables of `rotary_tables`, whose sines are negative in the first half."""
    half = q.shape[-1] // 2
    return (q * cos + q.roll(half, dims=-1) * sin).to(q.dtype), (k * cos + k.roll(half, dims=-1) * sin).to(k.dtype)


compiled_rotary_write = by_name(and_write(plain_rotary), compiles=True)


@needs("liger_kernel.ops")
def liger_rotary(liger: Any, inputs: Inputs) -> Call:
    """Liger's rotation, which overwrites q and k."""
    q, k = inputs.q.transpose(0, 1)[None], inputs.k.transpose(0, 1)[None]
    # Liger reads the first half of each row and subtracts by itself: the second half of ours has the plain sines.
    half = inputs.sin.shape[-1] // 2
    cos, sin = inputs.cos[None, :, 0], inputs.sin[:, 0, half:].repeat(1, 2)[None]

    def run() -> Outputs:
        q_rotated, k_rotated = liger.LigerRopeFunction.apply(q, k, cos, sin)
        return q_rotated[0].transpose(0, 1), k_rotated[0].transpose(0, 1)

    return run


def liger_rotary_write(inputs: Inputs) -> Call:
    """Liger's rotation and two index copies."""
    rotate = liger_rotary(inputs)
    return by_name(and_write(lambda *_: rotate()))(inputs)


@needs("liger_kernel.ops")
def liger_norm(liger: Any, inputs: Inputs) -> Call:
    """Liger's fused addition and normalisation."""
    function = liger.LigerFusedAddRMSNormFunction
    return lambda x, residual, weight: function.apply(x, residual, weight, EPS, 0.0, "llama", False)


@needs("flashinfer")
def flashinfer_norm(flashinfer: Any, inputs: Inputs) -> Call:
    """FlashInfer's fused addition and normalisation, which overwrites both of its inputs."""

    def add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        flashinfer.fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    return add_and_norm


@needs("liger_kernel.ops")
def liger_swiglu(liger: Any, inputs: Inputs) -> Call:
    return liger.LigerSiLUMulFunction.apply


def torch_select(inputs: Inputs) -> Call:
    """By a stable sort: the tokens set first, in order."""
    capacity, tokens = len(inputs.index), len(inputs.mask)
    rows = torch.arange(capacity, device=inputs.mask.device)

    def run() -> Outputs:
        used = inputs.mask.sum().clamp(max=capacity)
        index = torch.argsort(inputs.mask.byte(), descending=True, stable=True)[:capacity]
        return index.masked_fill(rows >= used, tokens), used

    return run


def torch_gather(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


def torch_add(x: Tensor, index: Tensor, gate: Tensor, delta: Tensor) -> Tensor:
    """x, overwritten, with gate · delta added."""
    return x.index_add_(0, index, gate[:, None] * delta)
