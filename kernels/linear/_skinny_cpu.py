"""Products of a few rows with a weight, and its rows expanded, where C compiles that suits the processor.

    bf16 rows    `_skinny.c`          AVX-512 BF16 and VBMI     quantized weights
                 `_skinny_pairs.c`    AVX-512 BF16              turned weights (`_turned_cpu`), any number of rows
    fp32 rows    `_skinny_wide.c`     AVX2, FMA, F16C; or NEON  quantized weights, or numbers in bf16
                 `_skinny_outputs.c`  AVX-512 (F, BW, VL)       all of these but FP8

With AMX `_skinny_pairs.c` multiplies all but the fewest rows by tiles, and `_tiles_cpu` weights in NF4 and FP8.

A weight that is not turned is read as it is stored, so preparing it copies nothing. W is `dequantize` in the dtype of x
to the bit; of turned weights, beside up to 32 rows in bf16, in fp32.

Legend: T tokens, K input features, N output features.
"""

import ctypes
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kernels.common.compiled_by_one_cpu import compiled_by_one
from kernels.common.cpu_graph import call
from kernels.common.floats_cpu import AVX2, NEEDS
from kernels.common.processor import Needs, processor_features
from kernels.linear import _turned_cpu
from kernels.linear._turned_cpu import TurnedWeight, turned
from kernels.linear.c_product import ANY_ROWS, CProduct
from kernels.linear.quantization import (
    NF4_BLOCK,
    Fp8Weight,
    Int4Weight,
    Int6Weight,
    Int8Weight,
    IntegerWeight,
    NF4Weight,
    QuantizedWeight,
)

_FORMATS = (NF4Weight, Int4Weight, Int6Weight, Int8Weight, Fp8Weight, Tensor)
_INT4_FROM_MINIMA = len(_FORMATS)
Held = TypeVar("Held", bound=QuantizedWeight | TurnedWeight | Tensor)
_MOST_ROWS, _MOST_ROWS_BY_OUTPUTS = 32, 128
"""Measured with `python -m bench.kernels.decode`: with more rows `linear_in_blocks` costs less."""
BLOCK_ELEMENTS_IN_C = 1 << 21
"""Of a weight, expanded at a time for `linear_in_blocks`."""
_STEP = 32
"""So many weights are decoded at once."""


class WeightAddress(ctypes.Structure):
    """`Weight` of weights.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("format", "n", "k", "group", "is_half", "is_turned", "keeps_sums")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "minima")),
    )


_WEIGHT = ctypes.POINTER(WeightAddress)


@dataclass(frozen=True, slots=True)
class SkinnyWeight(Generic[Held]):
    """A weight that the functions below take, in its own memory."""

    held: Held
    at: WeightAddress
    """Where C finds it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "SkinnyWeight[Held]":
        held = deepcopy(self.held, memo)
        return SkinnyWeight(held, _address(held))

    def found_again(self) -> "SkinnyWeight[Held]":
        """The same where its tensors lie now."""
        return SkinnyWeight(self.held, _address(self.held))


@dataclass(frozen=True)
class _Source:
    """One C source, and what it needs."""

    name: str
    needs: Needs


NEEDS_BF16 = frozenset({"avx512_bf16", "avx512vbmi"})
_SOURCES = {torch.bfloat16: _Source("_skinny.c", (NEEDS_BF16,)), torch.float32: _Source("_skinny_wide.c", NEEDS)}
NEEDS_OUTPUTS = AVX2 | {"avx512f", "avx512bw", "avx512vl"}
_OUTPUTS = _Source("_skinny_outputs.c", (NEEDS_OUTPUTS,))
"""Where it runs it is faster for fp32 rows, but not for weights in FP8."""
_PAIRS = _Source("_skinny_pairs.c", (AVX2 | _turned_cpu.NEEDS,))


def multiplies(dtype: torch.dtype) -> bool:
    """Whether rows in this dtype can be multiplied here."""
    return dtype in _SOURCES and _library(dtype) is not None


def prepare_skinny(weight: QuantizedWeight) -> SkinnyWeight[QuantizedWeight | TurnedWeight] | None:
    """None where the weight's shape or the machine does not fit. NF4 must not be doubly quantized."""
    k = weight.shape[1]
    step = NF4_BLOCK if isinstance(weight, NF4Weight) else _STEP
    if k % step or (isinstance(weight, IntegerWeight) and not _fits(weight)) or not any(map(multiplies, _SOURCES)):
        return None
    if _scales(weight).dtype != torch.float32 and not isinstance(weight, IntegerWeight):
        return None
    fields = {name: getattr(weight, name) for name in type(weight).__dataclass_fields__}
    whole: dict[str, Any] = {name: field.contiguous() for name, field in fields.items() if isinstance(field, Tensor)}
    held: QuantizedWeight | TurnedWeight = replace(weight, **whole)
    if isinstance(held, IntegerWeight) and _library_of_pairs() is not None:
        held = turned(held)
    return SkinnyWeight(held, _address(held))


def prepare_skinny_numbers(weight: Tensor) -> SkinnyWeight[Tensor] | None:
    """Of a weight [N, K] in bf16, for products of fp32 rows; None where its shape or the machine does not fit."""
    if weight.shape[1] % _STEP or not multiplies(torch.float32):
        return None
    held = weight.contiguous()
    return SkinnyWeight(held, _address(held))


def skinny_product(x: Tensor, weight: SkinnyWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x Wᵀ, [T, N], of x [T, K] in a dtype that `multiplies`; in that dtype, or in fp32 if that is asked for."""
    return product_in_c(product_library(x.dtype, weight).skinny_product, x, weight, out_dtype)


def product_in_c(multiply: Any, x: Tensor, weight: SkinnyWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x Wᵀ, [T, N], of x [T, K], by a function of a C source."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, at = x.shape[0], weight.at  # len(x) costs a microsecond
    out = torch.empty(rows, at.n, dtype=out_dtype or x.dtype)
    if out.dtype != x.dtype:
        at = WeightAddress.from_buffer_copy(at)
        at.keeps_sums = True
    call(multiply, at, x.data_ptr(), x.stride(0), out.data_ptr(), rows, torch.get_num_threads())
    return out


def expanded_rows(weight: SkinnyWeight, dtype: torch.dtype, rows: slice) -> Tensor:
    """Rows of W in bf16 or fp32."""
    if not multiplies(dtype):
        return expanded_rows(weight, torch.float32, rows).to(dtype)
    out = torch.empty(rows.stop - rows.start, weight.at.k, dtype=dtype)
    call(_library(dtype).expand_rows, weight.at, rows.start, rows.stop, out.data_ptr(), torch.get_num_threads())
    return out


def chosen_rows(weight: SkinnyWeight, dtype: torch.dtype, numbers: Tensor) -> Tensor:
    """Those rows of W in bf16 or fp32, [T, K], of numbers [T] int64; NaN where W has no such row."""
    if not multiplies(dtype):
        return chosen_rows(weight, torch.float32, numbers).to(dtype)
    numbers = numbers.contiguous()
    out = torch.empty(len(numbers), weight.at.k, dtype=dtype)
    where = numbers.data_ptr(), len(numbers), out.data_ptr()
    call(_library(dtype).expand_chosen, weight.at, *where, torch.get_num_threads())
    return out


def linear_in_blocks(
    x: Tensor, n: int, bias: Tensor | None, expanded: Callable[[slice], Tensor], block_elements: int
) -> Tensor:
    """x Wᵀ + b, [T, N], for many rows: `expanded` gives rows of W in the dtype of x, so many elements at a time."""
    out = x.new_empty(len(x), n)
    for rows in slices(n, max(1, block_elements // x.shape[1])):
        part, block = out[:, rows], expanded(rows).t()
        torch.mm(x, block, out=part) if bias is None else torch.addmm(bias[rows], x, block, out=part)
    return out


def slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def takes_rows(x: Tensor, weight: SkinnyWeight) -> bool:
    """Whether rows x [T, K] are few enough that `skinny_product` multiplies them fastest."""
    return multiplies(x.dtype) and x.shape[0] <= _most_rows(x.dtype, weight)


def _most_rows(dtype: torch.dtype, weight: SkinnyWeight) -> int:
    library = product_library(dtype, weight)
    if library is _library(dtype):
        return _MOST_ROWS
    return ANY_ROWS if library is _library_of_pairs() else _MOST_ROWS_BY_OUTPUTS


def skinny_c_product(weight: SkinnyWeight, dtype: torch.dtype) -> CProduct | None:
    """What `skinny_product` calls for rows in this dtype, if it takes any."""
    if not multiplies(dtype):
        return None
    function, shape = product_library(dtype, weight).skinny_product, (weight.at.n, weight.at.k)
    return CProduct(weight.at, shape, function, function, _most_rows(dtype, weight))


def product_library(dtype: torch.dtype, weight: SkinnyWeight) -> Any:
    """The C form that multiplies rows in this dtype with a weight fastest."""
    if dtype == torch.bfloat16:
        return _library_of_pairs() if isinstance(weight.held, TurnedWeight) else _library(dtype)
    return (not isinstance(weight.held, Fp8Weight) and _library_of_outputs()) or _library(dtype)


@cache
def _library(dtype: torch.dtype) -> Any:
    library = _library_with_products(_SOURCES[dtype])
    if library is not None:
        library.expand_rows.argtypes = (_WEIGHT, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        library.expand_chosen.argtypes = (_WEIGHT, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        library.expand_rows.restype = library.expand_chosen.restype = None
    return library


@cache
def _library_of_outputs() -> Any:
    return _library_with_products(_OUTPUTS) if processor_features() >= NEEDS_OUTPUTS else None


@cache
def _library_of_pairs() -> Any:
    """None where weights are not turned."""
    if not processor_features() >= _turned_cpu.NEEDS:
        return None
    library = _library_with_products(_PAIRS)
    if library is not None:
        library.permit_tiles()
    return library


def _library_with_products(source: _Source) -> Any:
    library = compiled_by_one(Path(__file__).with_name(source.name), needs=source.needs)
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.skinny_product.argtypes = (_WEIGHT, pointer, number, pointer, number, ctypes.c_int)
        library.skinny_product.restype = ctypes.c_int
    return library


def _fits(weight: IntegerWeight) -> bool:
    if weight.scales.dtype not in (torch.float32, torch.float16):
        return False
    minima = None if isinstance(weight, Int6Weight) else weight.minima
    if minima is not None and (isinstance(weight, Int8Weight) or minima.dtype != weight.scales.dtype):
        return False
    return not weight.group % _STEP or (isinstance(weight, Int8Weight) and 2 * weight.group == _STEP)


def _scales(weight: QuantizedWeight) -> Tensor:
    return weight.absmax if isinstance(weight, NF4Weight) else weight.scales


def _address(weight: QuantizedWeight | TurnedWeight | Tensor) -> WeightAddress:
    n, k = weight.shape
    if isinstance(weight, TurnedWeight):
        at = _address(weight.rest)
        at.n, at.is_turned, at.codes = n, True, weight.panels.data_ptr()
        return at
    if isinstance(weight, Tensor):
        return WeightAddress(_FORMATS.index(Tensor), n, k, k, False, False, False, weight.data_ptr())
    group = NF4_BLOCK if isinstance(weight, NF4Weight) else getattr(weight, "group", k)
    scales, zeros, minima = _scales(weight), getattr(weight, "zeros", None), getattr(weight, "minima", None)
    format = _FORMATS.index(type(weight)) if minima is None else _INT4_FROM_MINIMA
    places = (None if tensor is None else tensor.data_ptr() for tensor in (weight.codes, scales, zeros, minima))
    return WeightAddress(format, n, k, group, scales.dtype == torch.float16, False, False, *places)
