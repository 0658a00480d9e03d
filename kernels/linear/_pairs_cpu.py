"""Products of rows in bf16 with a bf16 weight by `_pairs.c`, on CPUs with AVX-512 BF16, by AMX where they have it.

Beside oneDNN, which multiplies where this does not: half the time of one to eight rows, three quarters of 32, the same
of hundreds; with AMX 0.7 of the time of one to 32 rows. The weight lies in memory once, in panels that only this file
reads, and that are tiles of AMX as they are.

Legend: T tokens, K input features, N output features, P panels.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.common.compiled_by_one_cpu import compiled_by_one
from kernels.common.cpu_graph import call
from kernels.common.large_pages_cpu import in_large_pages
from kernels.common.processor import processor_features
from kernels.linear.c_product import ANY_ROWS, CProduct

NEEDS = frozenset({"avx512_bf16", "avx512bw", "avx512vl"})
_OUTPUTS = 48
"""Of a panel, as in the C source."""


class _Weight(ctypes.Structure):
    _fields_ = (
        *(("n", ctypes.c_int64), ("k", ctypes.c_int64), ("panels", ctypes.c_void_p), ("bias", ctypes.c_void_p)),
        ("keeps_sums", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class PairedWeight:
    """A weight [N, K] as `prepare_pairs` returns it."""

    panels: Tensor
    """[P, K / 2, 48] int32: two neighbouring numbers of a row each; outputs beyond N are zero."""
    shape: tuple[int, int]

    def dense(self) -> Tensor:
        """The weight itself, a copy."""
        n, k = self.shape
        pairs = self.panels.transpose(1, 2).contiguous()
        return pairs.view(torch.bfloat16).view(-1, k)[:n]


def multiplies_pairs() -> bool:
    """Whether the machine fits."""
    return _library() is not None


def prepare_pairs(weight: Tensor) -> PairedWeight | None:
    """Of a weight [N, K] in bf16; None where its shape or the machine does not fit."""
    n, k = weight.shape
    if weight.dtype != torch.bfloat16 or k % 2 or not multiplies_pairs():
        return None
    panels = -(-n // _OUTPUTS)
    whole = torch.nn.functional.pad(weight, (0, 0, 0, panels * _OUTPUTS - n)).contiguous()
    pairs = whole.view(torch.int32).view(panels, _OUTPUTS, k // 2)
    return PairedWeight(in_large_pages(pairs.transpose(1, 2)), (n, k))


def paired_product(
    x: Tensor, weight: PairedWeight, bias: Tensor | None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x Wᵀ + b, [T, N], of x [T, K] and b [N] or None, all in bf16; in bf16 or fp32."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, (n, k) = x.shape[0], weight.shape
    out = torch.empty(rows, n, dtype=out_dtype)
    bias_at = None if bias is None else bias.data_ptr()
    at = _Weight(n, k, weight.panels.data_ptr(), bias_at, out_dtype == torch.float32)
    call(_library().pairs_product, at, x.data_ptr(), x.stride(0), out.data_ptr(), rows, torch.get_num_threads())
    return out


def paired_c_product(weight: PairedWeight) -> CProduct:
    """What `paired_product` calls without a bias."""
    function = _library().pairs_product
    at = _Weight(*weight.shape, weight.panels.data_ptr(), None, False)
    return CProduct(at, weight.shape, function, function, ANY_ROWS)


@cache
def _library() -> Any:
    if not processor_features() >= NEEDS:  # oneDNN is meant for it, so nothing need be said
        return None
    library = compiled_by_one(Path(__file__).with_name("_pairs.c"), needs=(NEEDS,))
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        library.pairs_product.argtypes = (ctypes.POINTER(_Weight), pointer, number, pointer, number, ctypes.c_int)
        library.pairs_product.restype = ctypes.c_int
        library.permit_tiles()
    return library
