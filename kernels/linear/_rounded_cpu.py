"""Products of rows in 8 bits with integer weights on the CPU: the Python side of `_rounded.c`, `_rounded_lanes.c` and
`_rounded_rows.c`."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call
from kernels.common.floats_cpu import AVX2, DTYPES, NEEDS
from kernels.common.processor import Needs, processor_features, suits
from kernels.linear._skinny_cpu import SkinnyWeight, WeightAddress
from kernels.linear._turned_cpu import TurnedWeight
from kernels.linear.c_product import ANY_ROWS, CProduct
from kernels.linear.quantization import Int8Weight, IntegerWeight

_SOURCES: dict[str, Needs] = {
    "_rounded.c": (AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},),
    "_rounded_lanes.c": NEEDS,
}
_BLOCK, _SPAN = 32, 64
"""Inputs whose products are summed in integers, and that are multiplied at once."""

MOST_BESIDE_TILES = 8
"""Rows that are multiplied here where AMX multiplies more of them faster."""


def takes(weight: SkinnyWeight | None, group: int) -> bool:
    """Whether rows of which `group` neighbours share a scale are multiplied here as integers."""
    held = None if weight is None else weight.held
    held = held.rest if isinstance(held, TurnedWeight) else held
    if not isinstance(held, IntegerWeight) or (isinstance(held, Int8Weight) and held.minima is not None):
        return False
    fits = held.group == _BLOCK or not held.group % _SPAN
    return fits and not held.shape[1] % _SPAN and not group % _BLOCK and _library() is not None


def rounded_product(x: Tensor, weight: SkinnyWeight, group: int) -> Tensor:
    """x Wᵀ, [T, N], of x [T, K], of which `group` neighbours (a multiple of 32 that divides K) share a scale.

    In the dtype of x, but in fp32 where that is neither fp32 nor bf16.
    """
    x = x if x.dtype in DTYPES else x.float()
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(x.shape[0], weight.at.n)
    where = DTYPES[x.dtype], x.data_ptr(), x.stride(0), group, out.data_ptr()
    call(_library().rounded_product, weight.at, *where, x.shape[0], torch.get_num_threads())
    return out


def rounded_c_product(weight: SkinnyWeight, group: int, tiles: CProduct | None) -> CProduct:
    """What `rounded_product` calls; more rows are rounded for those of `tiles`, if there are any."""
    shape, functions = (weight.at.n, weight.at.k), {"rounded": _library().rounded_product, "group": group}
    if tiles is None:
        return CProduct(weight.at, shape, None, None, ANY_ROWS, most_rounded=ANY_ROWS, **functions)
    return tiles._replace(most_rounded=MOST_BESIDE_TILES, round=_library_of_rows().rounded_rows, **functions)


def rounded_rows(x: Tensor, group: int) -> Tensor:
    """The numbers that such rows stand for, in bf16 as x is."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    place = x.data_ptr(), x.stride(0), x.shape[1], group
    call(_library_of_rows().rounded_rows, *place, out.data_ptr(), x.shape[0], torch.get_num_threads())
    return out


def source_for(features: frozenset[str]) -> str:
    """The C form for a processor with these features."""
    return "_rounded.c" if has_vnni(features) else "_rounded_lanes.c"


def has_vnni(features: frozenset[str]) -> bool:
    return suits(features, _SOURCES["_rounded.c"])


@cache
def _library() -> Any:
    return library_of(source_for(processor_features()))


def library_of(source: str) -> Any:
    """One of both C forms; None where it does not compile."""
    library = compiled(Path(__file__).with_name(source), needs=_SOURCES[source])
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        product = library.rounded_product
        weight, kind = ctypes.POINTER(WeightAddress), ctypes.c_int
        product.argtypes = (weight, kind, pointer, number, number, pointer, number, kind)
        product.restype = kind
    return library


@cache
def _library_of_rows() -> Any:
    library: Any = compiled(Path(__file__).with_name("_rounded_rows.c"), needs=NEEDS)
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.rounded_rows.argtypes = (pointer, number, number, number, pointer, number, ctypes.c_int)
    library.rounded_rows.restype = None
    return library
