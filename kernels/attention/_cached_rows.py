"""Keys or values that lie in slots, as attention on the CPU reads them: as they are, or decoded from 8 bits.

Legend: Hkv key/value heads, d head dim, P pages in the pool.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention._kv_quantization import dequantize_rows


class CachedRows(NamedTuple):
    """The keys, or the values, of every slot."""

    rows: Tensor
    """[slots, Hkv, d]."""
    scales: Tensor | None
    """[slots, Hkv] fp32 of rows in 8 bits; None: the rows are as they are read."""

    @classmethod
    def of_pages(cls, pages: Tensor, scales: Tensor | None) -> "CachedRows":
        """Of pages [P, page, Hkv, d], and scales [P, page, Hkv]."""
        return cls(pages.flatten(0, 1), None if scales is None else scales.flatten(0, 1))

    def take(self, where: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows in `dtype`, which those without scales have already."""
        if self.scales is None:
            return take(self.rows, where)
        # Not every torch copies rows of fp8, but all copy bytes.
        codes, scales = take(self.rows.view(torch.uint8), where), take(self.scales, where)
        if self.rows.dtype == torch.int8:
            return dequantize_rows(codes.view(torch.int8), scales, torch.float32).to(dtype)
        values = values_of_codes(self.rows.dtype).index_select(0, codes.flatten().int()).view(codes.shape)
        return dequantize_rows(values, scales, torch.float32).to(dtype)


@cache
def values_of_codes(dtype: torch.dtype) -> Tensor:
    """Return what each of the 256 codes of an 8-bit format stands for: torch converts fp8 five times as slowly."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def take(rows: Tensor, where: slice | Tensor) -> Tensor:
    """Return a range of rows as a view, or some rows by their numbers."""
    # Unlike indexing, index_select copies whole rows.
    return rows[where] if isinstance(where, slice) else rows.index_select(0, where)
