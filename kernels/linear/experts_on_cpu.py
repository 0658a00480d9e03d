"""The MLPs of a mixture's experts on the CPU, of all that were chosen in one call: the Python side of `_experts.c`.

    y[t, c] = down(act(gate(x[t])) · up(x[t]))      by the expert chosen[t, c]

Few tokens choose some dozen experts of a layer, of which each multiplies a row or two: from Python that costs as much
as the products, and a captured pass (`kernels.common.cpu_graph`) could not be replayed, since which experts they are is
known only then. C looks at what was chosen. Its functions are those that multiply with one expert, and so are the bits.

Legend: T tokens, k experts of a token, E experts, D hidden size, I neurons of an expert.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels._rows_cpu import gate_function
from kernels.common.compiled import compiled
from kernels.common.cpu_graph import call
from kernels.common.floats_cpu import DTYPES
from kernels.linear.c_product import CProduct


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("one", "more", "weight", "rounded", "round")),
        *((name, ctypes.c_int64) for name in ("most_rounded", "group")),
    )


class _Expert(ctypes.Structure):
    _fields_ = tuple((name, _Product) for name in ("gate", "up", "down"))


class _Mixture(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("experts", "gate")),
        *((name, ctypes.c_int64) for name in ("count", "chosen", "hidden", "neurons", "dtype", "bytes")),
    )


class ExpertsOnCpu:
    """All experts of a layer."""

    def __init__(self, experts: Sequence[Sequence[CProduct]], dtype: torch.dtype, *, uses_gelu: bool) -> None:
        """`experts`: of each the products for gate and up [I, D], or for both as one [2·I, D], and for down [D, I]."""
        self._dtype, self._gate = dtype, _address(gate_function(uses_gelu=uses_gelu))
        self._hidden, self._neurons = experts[0][-1].shape
        self._most_rows = min(product.most_rows for products in experts for product in products)
        self._held = experts
        """C has their addresses."""
        self._at = (_Expert * len(experts))(*map(_expert, experts))

    def takes(self, x: Tensor) -> bool:
        """Whether so many rows x [T, D] in this dtype are multiplied fastest here."""
        return x.dtype == self._dtype and 0 < x.shape[0] <= self._most_rows

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """y [T, k, D] of x [T, D] that it `takes` and chosen [T, k], int64 below E."""
        x, chosen = x if x.stride(1) == 1 else x.contiguous(), chosen.contiguous()
        rows, per_token = chosen.shape
        y = x.new_empty(rows, per_token, self._hidden)
        order, work = torch.empty_like(chosen), x.new_empty(rows, 3 * self._hidden + 4 * self._neurons)
        sizes = len(self._at), per_token, self._hidden, self._neurons
        mixture = _Mixture(ctypes.addressof(self._at), self._gate, *sizes, DTYPES[x.dtype], x.itemsize)
        inputs = x.data_ptr(), x.stride(0), chosen.data_ptr(), rows
        room = order.data_ptr(), work.data_ptr(), y.data_ptr()
        call(_library().mixture, mixture, *inputs, *room, torch.get_num_threads())
        return y


def can_pass_experts() -> bool:
    """Whether C sources compile, as those of products do."""
    return _library() is not None and gate_function(uses_gelu=False) is not None


def _expert(products: Sequence[CProduct]) -> _Expert:
    gate, *up, down = map(_product, products)
    return _Expert(gate, up[0] if up else _Product(), down)


def _product(product: CProduct) -> _Product:
    one, more, rounded, round_rows = map(_address, (product.one, product.more, product.rounded, product.round))
    weight = ctypes.addressof(product.at)
    return _Product(one, more, weight, rounded, round_rows, product.most_rounded, product.group)


def _address(function: Any) -> int | None:
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


@cache
def _library() -> Any:
    library = compiled(Path(__file__).with_name("_experts.c"), needs=(frozenset(),))
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        kinds = (pointer, number, pointer, number, pointer, pointer, pointer, ctypes.c_int)
        library.mixture.argtypes, library.mixture.restype = (ctypes.POINTER(_Mixture), *kinds), ctypes.c_int
    return library
