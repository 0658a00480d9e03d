"""Products of rows in bf16 with a weight in NF4 or FP8 by AMX, the matrix registers of some CPUs (`_tiles.c`)."""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.compiled import compiled
from kernels.common.processor import processor_features
from kernels.linear._skinny_cpu import SkinnyWeight, WeightAddress, product_in_c
from kernels.linear._turned_cpu import TurnedWeight
from kernels.linear.c_product import ANY_ROWS, CProduct

NEEDS = frozenset({"amx_bf16", "avx512_bf16", "avx512vbmi"})
_FEWEST_ROWS = 2
"""Measured with `python -m bench.kernels.decode`: a single row costs less without these registers."""
log = logging.getLogger(__name__)


def takes_tiles(x: Tensor, weight: SkinnyWeight) -> bool:
    """Whether rows x [T, K] are best multiplied with this weight here: one that is not turned."""
    return not isinstance(weight.held, TurnedWeight) and has_tiles(x)


def has_tiles(x: Tensor) -> bool:
    """Whether so many rows in this dtype are, whatever else is asked of the weight."""
    return x.shape[0] >= _FEWEST_ROWS and has_tiles_for(x.dtype)


def has_tiles_for(dtype: torch.dtype) -> bool:
    """Whether several rows in this dtype are."""
    return dtype == torch.bfloat16 and _library() is not None


def with_tiles(few: CProduct, weight: SkinnyWeight, dtype: torch.dtype) -> CProduct:
    """The products of few rows, where `takes_tiles` has a say in them."""
    if isinstance(weight.held, TurnedWeight) or not has_tiles_for(dtype):
        return few
    return few._replace(more=_library().tiled_product, most_rows=ANY_ROWS)


def tiled_product(x: Tensor, weight: SkinnyWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x Wᵀ, [T, N], of x [T, K] in bf16; in bf16 too, or in fp32 if that is asked for."""
    return product_in_c(_library().tiled_product, x, weight, out_dtype)


@cache
def _library() -> Any:
    if not processor_features() >= NEEDS:  # other forms are meant for it, so nothing need be said
        return None
    library = compiled(Path(__file__).with_name("_tiles.c"), needs=(NEEDS,))
    if library is None:
        return None
    if library.permit_tiles():
        log.info("products by AMX run without it: the system does not permit its registers")
        return None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.tiled_product.argtypes = (ctypes.POINTER(WeightAddress), pointer, number, pointer, number, ctypes.c_int)
    library.tiled_product.restype = ctypes.c_int
    return library
