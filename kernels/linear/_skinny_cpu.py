"""Products of a few rows with a quantized weight, and its rows expanded, where C compiles that suits the processor.

    bf16 rows    `_skinny.c`        AVX-512 BF16 and VBMI
    fp32 rows    `_skinny_wide.c`   AVX2, FMA and F16C

The weight is read as it is stored, so preparing it copies nothing, and W is `dequantize` in the dtype of x to the bit.

Legend: T tokens, K input features, N output features.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.linear.quantization import (
    NF4_BLOCK,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    IntegerWeight,
    NF4Weight,
    QuantizedWeight,
)

_FORMATS = (NF4Weight, Int4Weight, Int8Weight, Fp8Weight)
_INT4_FROM_MINIMA = len(_FORMATS)
_STEP = 32
"""So many weights are decoded at once."""


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("format", "n", "k", "group", "is_half")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "minima")),
    )


@dataclass(frozen=True)
class _Source:
    """One C source: what it needs, and the numbers of rows that its tiles have."""

    name: str
    needs: frozenset[str]
    tiles: tuple[int, ...]


_SOURCES = {
    torch.bfloat16: _Source("_skinny.c", frozenset({"avx512_bf16", "avx512vbmi"}), (1, 4, 8)),
    torch.float32: _Source("_skinny_wide.c", frozenset({"avx2", "fma", "f16c"}), (1, 4)),
}


def multiplies(dtype: torch.dtype) -> bool:
    """Whether rows in this dtype can be multiplied here."""
    return dtype in _SOURCES and _library(dtype) is not None


def prepare_skinny(weight: QuantizedWeight) -> QuantizedWeight | None:
    """The weight as the functions below take it, in its own memory; None where its shape or the machine does not fit.

    NF4 must not be doubly quantized.
    """
    k = weight.shape[1]
    step = NF4_BLOCK if isinstance(weight, NF4Weight) else _STEP
    if k % step or (isinstance(weight, IntegerWeight) and not _fits(weight)) or not any(map(multiplies, _SOURCES)):
        return None
    if _scales(weight).dtype != torch.float32 and not isinstance(weight, IntegerWeight):
        return None
    fields = {name: getattr(weight, name) for name in type(weight).__dataclass_fields__}
    whole: dict[str, Any] = {name: field.contiguous() for name, field in fields.items() if isinstance(field, Tensor)}
    return replace(weight, **whole)


def skinny_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x Wᵀ, [T, N], of x [T, K] in a dtype that `multiplies`."""
    rows, k = x.shape
    tiles = _SOURCES[x.dtype].tiles
    tile = next((tile for tile in tiles if tile >= rows), tiles[-1])
    # The same 32 elements of a tile's rows become neighbours: rows 8 KiB apart would fight for lines of the cache.
    whole = F.pad(x, (0, 0, 0, -rows % tile)) if rows % tile else x.contiguous()
    tiled = whole.view(-1, tile, k // _STEP, _STEP).transpose(1, 2).contiguous()
    out = x.new_empty(rows, weight.shape[0])
    pointers, threads = _pointers(weight), torch.get_num_threads()
    _library(x.dtype).skinny_product(pointers, tiled.data_ptr(), out.data_ptr(), rows, tile, threads)
    return out


def expanded_rows(weight: QuantizedWeight, dtype: torch.dtype, rows: slice) -> Tensor:
    """`weight.dequantize(dtype, rows)` in bf16 or fp32, faster."""
    if not multiplies(dtype):
        return expanded_rows(weight, torch.float32, rows).to(dtype)
    out = torch.empty(rows.stop - rows.start, weight.shape[1], dtype=dtype)
    _library(dtype).expand_rows(_pointers(weight), rows.start, rows.stop, out.data_ptr(), torch.get_num_threads())
    return out


@cache
def _library(dtype: torch.dtype) -> Any:
    source = _SOURCES[dtype]
    library = compiled(Path(__file__).with_name(source.name), needs=source.needs)
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.skinny_product.argtypes = (ctypes.POINTER(_Weight), pointer, pointer, number, number, ctypes.c_int)
        library.expand_rows.argtypes = (ctypes.POINTER(_Weight), number, number, pointer, ctypes.c_int)
        library.skinny_product.restype = library.expand_rows.restype = None
    return library


def _fits(weight: IntegerWeight) -> bool:
    if weight.scales.dtype not in (torch.float32, torch.float16):
        return False
    if weight.minima is not None and (isinstance(weight, Int8Weight) or weight.minima.dtype != weight.scales.dtype):
        return False
    return not weight.group % _STEP


def _scales(weight: QuantizedWeight) -> Tensor:
    return weight.absmax if isinstance(weight, NF4Weight) else weight.scales


def _pointers(weight: QuantizedWeight) -> _Weight:
    n, k = weight.shape
    group = NF4_BLOCK if isinstance(weight, NF4Weight) else getattr(weight, "group", k)
    scales, zeros, minima = _scales(weight), getattr(weight, "zeros", None), getattr(weight, "minima", None)
    format = _FORMATS.index(type(weight)) if minima is None else _INT4_FROM_MINIMA
    at = (None if tensor is None else tensor.data_ptr() for tensor in (weight.codes, scales, zeros, minima))
    return _Weight(format, n, k, group, scales.dtype == torch.float16, *at)
