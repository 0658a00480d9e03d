"""Cosine and sine of positions as rotations read them, on the CPU, by `_rotary.c` if it compiles.

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
    """Whether `make_tables` takes these."""
    return positions.is_cpu and inv_freq.dtype == torch.float32 and _library() is not None


def make_tables(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_tables` of what `makes_tables` accepts: positions [T], inv_freq [d/2] fp32.

    Angles, cosine and sine are torch's, whose last bits trainers, servers and other libraries share.
    """
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    (tokens, half), tables = angles.shape, [angles.new_empty(len(positions), 1, 2 * len(inv_freq)) for _ in range(2)]
    pointers = (table.data_ptr() for table in tables)
    call(_library().rotary_tables, cos.data_ptr(), sin.data_ptr(), tokens, half, *pointers, torch.get_num_threads())
    return tables[0], tables[1]


@cache
def _library() -> Any:
    library = compiled(Path(__file__).with_name("_rotary.c"), needs=(frozenset(),))
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.rotary_tables.argtypes = (pointer, pointer, number, number, pointer, pointer, ctypes.c_int)
        library.rotary_tables.restype = None
    return library
