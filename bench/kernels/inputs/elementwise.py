"""Norm, gate, rotation and write into pages; the rows that a router selects.

Legend: T tokens, C rows of a routed block, D hidden size, I intermediate size, H heads, d head dim, P pages.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kernels.case import BF16, Inputs, Outputs, Shape, in_fp64, normal
from bench.kernels.inputs.attention import PAGE
from kernels.attention.rotary import apply_rotary_reference, rope_frequencies, rotary_tables
from kernels.rms_norm import rms_norm_reference
from kernels.swiglu import swiglu_reference
from kernels.token_routing import select_tokens_reference

EPS = 1e-5


def norm(tokens: int, size: int, backward: bool = False) -> Shape:
    """x and residual [T, D], weight [D]; the gradients of the results, y and the sum."""
    num_bytes = 2 * tokens * size * (4 + backward * 4) + 2 * size * (1 + backward * 2)
    leaves, grads = ("x", "residual", "weight"), ("grad_y", "grad_sum")
    return _rows("rms_norm", tokens, size, backward, num_bytes, _add_and_norm, leaves, grads)


def gate(tokens: int, size: int, backward: bool = False) -> Shape:
    """gate and up [T, I]; the gradient of the result."""
    num_bytes = 2 * tokens * size * (3 + backward * 5)
    return _rows("swiglu", tokens, size, backward, num_bytes, swiglu_reference, ("gate", "up"), ("grad",))


def _add_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    return rms_norm_reference(x + residual, weight, EPS), x + residual


def _rows(
    kernel: str, tokens: int, size: int, backward: bool, num_bytes: float,
    function: Callable[..., Any], leaves: tuple[str, ...], grads: tuple[str, ...],
) -> Shape:  # fmt: skip
    def make(device: torch.device) -> dict[str, Any]:
        names = (*leaves, *(grads if backward else ()))
        return {name: normal(*(size,) if name == "weight" else (tokens, size), device=device) for name in names}

    return Shape(
        name=f"{kernel} {tokens}x{size}{' forward+backward' if backward else ''}",
        fields={"tokens": tokens, "size": size, "backward": backward}, make=make, reference=in_fp64(function),
        num_bytes=num_bytes, leaves=leaves, grads=grads, mode="forward+backward" if backward else "forward",
    )  # fmt: skip


def rotary(tokens: int, query_heads: int = 32, kv_heads: int = 8, head_dim: int = 128, write: bool = False) -> Shape:
    """New queries, keys and values [T, H, d], T a multiple of the page, their angles, and slots that fill the pages."""

    def make(device: torch.device) -> dict[str, Any]:
        positions = torch.randint(0, 32_768, (tokens,), device=device)
        cos, sin = rotary_tables(positions, rope_frequencies(head_dim, 500_000.0).to(device))
        pages = (math.ceil(tokens / PAGE), PAGE, kv_heads, head_dim)
        q, k, v = (normal(tokens, heads, head_dim, device=device) for heads in (query_heads, kv_heads, kv_heads))
        k_pages, v_pages = (torch.full(pages, torch.nan, dtype=BF16, device=device) for _ in range(2))
        slots = torch.randperm(pages[0] * PAGE, device=device)[:tokens]
        return {
            "q": q, "k": k, "v": v, "cos": cos, "sin": sin, "k_pages": k_pages, "v_pages": v_pages, "slots": slots,
        }  # fmt: skip

    # For writing q, k and v are read and written.
    written = 2 * (2 * query_heads + 4 * kv_heads) * head_dim + 4 * head_dim + 8
    return Shape(
        name=f"rotary{'+write' if write else ''} {tokens}",
        fields={"tokens": tokens, "query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim}, make=make,
        reference=_written if write else _rotated,
        num_bytes=tokens * (written if write else 4 * head_dim * (query_heads + kv_heads + 1)),
    )  # fmt: skip


def _rotated(inputs: Inputs) -> Outputs:
    return apply_rotary_reference(inputs.q.double(), inputs.k.double(), inputs.cos.double(), inputs.sin.double())


def _written(inputs: Inputs) -> Outputs:
    """The rotated queries, and the pages with the rotated keys and the values in their slots."""
    q, k = _rotated(inputs)
    k_pages, v_pages = inputs.k_pages.double(), inputs.v_pages.double()
    k_pages.flatten(0, 1)[inputs.slots] = k
    v_pages.flatten(0, 1)[inputs.slots] = inputs.v.double()
    return q, k_pages, v_pages


def routed(verb: str, tokens: int, capacity: int, size: int) -> Shape:
    """mask [T] bool, of which C are set; index [C] of these; x [T, D]; delta [C, D] and gate [C] to add."""

    def make(device: torch.device) -> dict[str, Any]:
        index = torch.randperm(tokens, device=device)[:capacity].sort().values
        x, delta = (normal(rows, size, device=device) for rows in (tokens, capacity))
        mask = torch.zeros(tokens, dtype=torch.bool, device=device).index_fill_(0, index, True)
        gate = torch.rand(capacity, device=device).bfloat16()
        return {"index": index, "mask": mask, "x": x, "delta": delta, "gate": gate}

    sizes = {"select": tokens + 8 * capacity, "gather": capacity * (4 * size + 8), "add": capacity * (6 * size + 10)}
    return Shape(
        name=f"{verb} {capacity} of {tokens}", fields={"tokens": tokens, "capacity": capacity, "size": size}, make=make,
        reference={"select": _selected, "gather": _gathered, "add": _added}[verb], num_bytes=sizes[verb],
    )  # fmt: skip


def _selected(inputs: Inputs) -> Outputs:
    """The index, and how many of its rows are used."""
    index, used = select_tokens_reference(inputs.mask.tolist(), len(inputs.index))
    return torch.tensor(index, device=inputs.mask.device), torch.tensor(used, device=inputs.mask.device)


def _gathered(inputs: Inputs) -> Outputs:
    return (inputs.x.double()[inputs.index],)


def _added(inputs: Inputs) -> Outputs:
    """x with gate · delta added."""
    added = inputs.gate.double()[:, None] * inputs.delta.double()
    return (inputs.x.double().index_add_(0, inputs.index, added),)
