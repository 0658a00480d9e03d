"""Cosine and sine of positions' angles on the CPU, by `_rotary.c` if it compiles: one call.

Legend: T tokens, d head dim.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call


def makes_tables(positions: Tensor, inv_freq: Tensor) -> bool:
    """Whether `make_tables` takes these, positions int64.

    Not in training: there cosines are torch's own, as those of the libraries are that its gradients are compared with.
    """
    return (
        torch.is_inference_mode_enabled()
        and positions.is_cpu
        and inv_freq.dtype == torch.float32
        and inv_freq.is_contiguous()
        and _library() is not None
    )


def make_tables(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_tables` of what `makes_tables` accepts: positions [T], inv_freq [d/2] fp32."""
    positions, half = positions.contiguous(), len(inv_freq)
    cos, sin = (inv_freq.new_empty(len(positions), 1, 2 * half) for _ in range(2))
    given = positions.data_ptr(), len(positions), inv_freq.data_ptr(), half
    call(_library().rotary_tables, *given, cos.data_ptr(), sin.data_ptr(), torch.get_num_threads())
    return cos, sin


@cache
def _library() -> Any:
    library = compiled(Path(__file__).with_name("_rotary.c"), needs=(frozenset(),))
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.rotary_tables.argtypes = (pointer, number, pointer, number, pointer, pointer, ctypes.c_int)
        library.rotary_tables.restype = None
    return library
