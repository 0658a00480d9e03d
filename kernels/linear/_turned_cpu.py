"""Integer weights that are turned once, at load: for C products in which a lane is an output, and a tile of AMX has
pairs of inputs by outputs, on CPUs with AVX-512 BF16.

Rows of codes, scales, zeros and minima are turned each time they are read. Turned ones lie in memory instead of them,
and become rows again for whoever asks.

Legend: T tokens, K input features, N output features, G groups of a row, P panels of 16 outputs.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.large_pages_cpu import in_large_pages
from kernels.linear.quantization import Int8Weight, IntegerWeight

NEEDS = frozenset({"avx512_bf16", "avx512f", "avx512bw", "avx512vl"})
"""Of what multiplies rows in bf16 with such weights, `_skinny_pairs.c`."""
_OUTPUTS = 16
"""Of a panel, as `TURNED` in `weights.h`."""


@dataclass(frozen=True, slots=True)
class TurnedWeight:
    """A weight [N, K] as `turned` returns it."""

    panels: Tensor
    """int32 [P, W, 16]: of 16 outputs the first words of their W, then the second; beyond N zeros."""
    rest: IntegerWeight
    """The weight without its codes; scales, and zeros or minima, are [P, G, 16]."""
    shape: tuple[int, int]

    @property
    def codes(self) -> Tensor:
        """As files hold them, a copy."""
        return self._codes(torch.arange(self.shape[0]))

    def stored(self) -> IntegerWeight:
        """The weight as files hold it, a copy."""
        return self._of_rows(torch.arange(self.shape[0]))

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | Tensor = slice(None)) -> Tensor:
        """The matrix, or `rows` of it: a slice, or their numbers."""
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.shape[0]))
        return self._of_rows(rows).dequantize(dtype)

    def _of_rows(self, rows: Tensor) -> IntegerWeight:
        parts: dict[str, Any] = {name: _rows_of(panels, rows) for name, panels in _beside_codes(self.rest).items()}
        weight = replace(self.rest, codes=self._codes(rows), **parts)
        return weight if isinstance(weight, Int8Weight) else replace(weight, shape=(len(rows), self.shape[1]))

    def _codes(self, rows: Tensor) -> Tensor:
        return _rows_of(self.panels, rows).view(self.rest.codes.dtype)


def turned(weight: IntegerWeight) -> TurnedWeight:
    """Of a weight whose rows of codes are whole words."""
    beside: dict[str, Any] = {name: _panels_of(tensor) for name, tensor in _beside_codes(weight).items()}
    rest = replace(weight, codes=weight.codes.new_empty(0, weight.codes.shape[1]), **beside)
    return TurnedWeight(_panels_of(weight.codes.contiguous().view(torch.int32)), rest, weight.shape)


def _panels_of(rows: Tensor) -> Tensor:
    """[N, W] as [P, W, 16]; beyond N zeros."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _OUTPUTS))
    return in_large_pages(padded.view(-1, _OUTPUTS, rows.shape[1]).transpose(1, 2))


def _rows_of(panels: Tensor, rows: Tensor) -> Tensor:
    """Those rows of what `_panels_of` returned, [T, W]."""
    return panels[rows // _OUTPUTS, :, rows % _OUTPUTS].contiguous()


def _beside_codes(weight: IntegerWeight) -> dict[str, Any]:
    """What groups have: scales, and zeros or minima, by name, where a weight has them."""
    named = ((name, getattr(weight, name, None)) for name in ("scales", "zeros", "minima"))
    return {name: tensor for name, tensor in named if tensor is not None}
