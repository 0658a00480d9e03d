"""Integer weights whose codes are turned once, at load: for C products in which a lane is an output, on CPUs with
AVX-512 BF16 and no AMX.

Codes in rows are turned each time they are read. Turned ones lie in memory instead, not beside, and become rows again
for whoever asks.

Legend: T tokens, K input features, N output features, P panels.
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
    """The weight without its codes."""
    shape: tuple[int, int]

    @property
    def codes(self) -> Tensor:
        """As files hold them, a copy."""
        return self._rows(self.panels.transpose(1, 2).reshape(-1, self.panels.shape[1])[: self.shape[0]])

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | Tensor = slice(None)) -> Tensor:
        """The matrix, or `rows` of it: a slice, or their numbers."""
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.shape[0]))
        codes = self._rows(self.panels[rows // _OUTPUTS, :, rows % _OUTPUTS])
        parts = {name: part[rows] for name, part in _beside_codes(self.rest).items()}
        weight = replace(self.rest, codes=codes, **parts)
        if not isinstance(weight, Int8Weight):
            weight = replace(weight, shape=(len(rows), self.shape[1]))
        return weight.dequantize(dtype)

    def _rows(self, words: Tensor) -> Tensor:
        """Words [T, W] as codes."""
        return words.contiguous().view(self.rest.codes.dtype)


def turned(weight: IntegerWeight) -> TurnedWeight:
    """Of a weight whose rows of codes are whole words."""
    n, _ = weight.shape
    rows = F.pad(weight.codes.contiguous(), (0, 0, 0, -n % _OUTPUTS)).view(torch.int32)
    panels = in_large_pages(rows.view(-1, _OUTPUTS, rows.shape[1]).transpose(1, 2))
    beside: dict[str, Any] = {name: in_large_pages(tensor) for name, tensor in _beside_codes(weight).items()}
    rest = replace(weight, codes=weight.codes.new_empty(0, weight.codes.shape[1]), **beside)
    return TurnedWeight(panels, rest, weight.shape)


def _beside_codes(weight: IntegerWeight) -> dict[str, Any]:
    """Scales of groups, and zeros or minima, by name, where a weight has them."""
    named = ((name, getattr(weight, name, None)) for name in ("scales", "zeros", "minima"))
    return {name: tensor for name, tensor in named if tensor is not None}
