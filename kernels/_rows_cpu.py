"""RMSNorm, SwiGLU and GeGLU on the CPU, by `_rows.c` where that compiles: each in one pass and one call.

Legend: T tokens, H heads a token (1 where rows are not heads), D size of the last dimension.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call
from kernels.common.floats_cpu import DTYPES, NEEDS, is_plain


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dtype", "rows", "size", "heads")),
        *((name, ctypes.c_int64) for name in ("x_token", "x_head", "residual_token", "residual_head")),
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "y", "sum")),
        ("eps", ctypes.c_float),
    )


def normalizes(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether `norm_rows` takes these: of one dtype, x [T, D] or [T, H, D]."""
    return (
        2 <= x.dim() <= 3
        and is_plain(x)
        and weight.dtype == x.dtype
        and weight.shape == x.shape[-1:]
        and (residual is None or _is_like(residual, x))
        and _library() is not None
    )


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride(-1) == 1


def norm_rows(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum; x itself without a residual. `normalizes` must accept them."""
    shape, strides = x.shape, x.stride()
    heads = shape[1] if len(shape) == 3 else 1
    y, summed, added = x.new_empty(shape), x, strides
    if residual is not None:
        summed, added = x.new_empty(shape), residual.stride()
    norm = _Norm(
        DTYPES[x.dtype], shape[0] * heads, shape[-1], heads, strides[0], strides[1], added[0], added[1],
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), y.data_ptr(),
        summed.data_ptr(), eps,
    )  # fmt: skip
    call(_library().rms_norm, norm, torch.get_num_threads())
    return y, summed


def gates(gate: Tensor, up: Tensor) -> bool:
    """Whether `gate_rows` and `gelu_rows` take these: [T, D] of one dtype."""
    return gate.dim() == 2 and is_plain(gate) and _is_like(up, gate) and _library() is not None


def gate_rows(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, rounded once. `gates` must accept them."""
    return _gate(_library().swiglu, gate, up)


def gelu_rows(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up with GELU by tanh, rounded once. `gates` must accept them."""
    return _gate(_library().geglu, gate, up)


def _gate(function: Any, gate: Tensor, up: Tensor) -> Tensor:
    y = gate.new_empty(gate.shape)
    _call_gate(function, gate, (gate.data_ptr(), up.data_ptr()), up.stride(0), y)
    return y


def gates_halves(x: Tensor) -> bool:
    """Whether `gate_halves` takes x [T, 2·D]."""
    return x.dim() == 2 and is_plain(x) and _library() is not None


def gate_halves(x: Tensor) -> Tensor:
    """silu(first half of the columns) · second half, without views of them. `gates_halves` must accept x."""
    rows, both = x.shape
    y, start = x.new_empty(rows, both // 2), x.data_ptr()
    _call_gate(_library().swiglu, x, (start, start + both // 2 * x.itemsize), x.stride(0), y)
    return y


def gate_function(*, uses_gelu: bool) -> Any:
    """What C calls for silu(gate) · up, or with GELU; None without C."""
    library = _library()
    return library and (library.geglu if uses_gelu else library.swiglu)


def _call_gate(function: Any, gate: Tensor, at: tuple[int, int], up_row: int, y: Tensor) -> None:
    strides = gate.stride(0), up_row
    call(function, DTYPES[gate.dtype], *at, y.data_ptr(), *y.shape, *strides, torch.get_num_threads())


@cache
def _library() -> Any:
    library = compiled(Path(__file__).with_name("_rows.c"), needs=NEEDS)
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.rms_norm.argtypes = (ctypes.POINTER(_Norm), ctypes.c_int)
        for gate in (library.swiglu, library.geglu):
            gate.argtypes, gate.restype = (ctypes.c_int, *(pointer,) * 3, *(number,) * 4, ctypes.c_int), None
        library.rms_norm.restype = None
    return library
