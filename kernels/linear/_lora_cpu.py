"""Adapters of a few bf16 rows on the CPU, by `_lora.c` where that compiles: all of it in one call, and z in fp32.

Legend: T tokens, K input features, N output features, R rank.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call

# Measured with `python -m bench.kernels.decode`: with more rows torch's matrix products cost less.
_MOST_ROWS = 32
_LANES = 16


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("t", "n", "k", "rank", "x_stride", "y_stride")),
        *((name, ctypes.c_void_p) for name in ("x", "y", "a", "b", "scales", "slots", "z", "out")),
    )


def takes(x: Tensor) -> bool:
    """Whether `add_adapters` does these rows, [T, K]."""
    return x.dtype == torch.bfloat16 and len(x) <= _MOST_ROWS and _library() is not None


def add_adapters(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor | None) -> Tensor:
    """`kernels.linear.lora.lora_add` of rows that `takes` accepts; every slot must be below S."""
    x, y = _neighbours(x), _neighbours(y)
    (rows, n), k, rank = y.shape, x.shape[1], a.shape[1]
    z, out = x.new_zeros(rows, -(-rank // _LANES) * _LANES, dtype=torch.float32), y.new_empty(rows, n)
    if slots is not None:
        slots = slots.contiguous()
    tensors = (x, y, a, b, scales.contiguous(), slots, z, out)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    at = _Rows(rows, n, k, rank, x.stride(0), y.stride(0), *pointers)
    call(_library().add_adapters, at, torch.get_num_threads())
    return out


def _neighbours(x: Tensor) -> Tensor:
    """The rows with their elements side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


@cache
def _library() -> Any:
    library = compiled(Path(__file__).with_name("_lora.c"), needs=(frozenset({"avx512_bf16"}),))
    if library is not None:
        library.add_adapters.argtypes = (ctypes.POINTER(_Rows), ctypes.c_int)
        library.add_adapters.restype = None
    return library
