"""Grids of integers for groups of a weight, and rounding to them.

    w ≈ (level − zero) · scale        level in 0 … 2^bits − 1; zero = 2^(bits−1) everywhere if symmetric

`min_max` covers what a group holds, with the constants of compressed-tensors. `searched` finds the scale, and zero, for
which rounding costs least in the product with typical inputs x:

    error of a group = Σ_ij Δ_i H_ij Δ_j,   Δ = w − ŵ,   H = Σ x xᵀ over calibration tokens

H is taken as diagonal (`importance [K]`, the second moment of each input, llama.cpp's "imatrix"), or within a group as
it is (`blocks [G, g, g]`). From each of a few shrunken ranges the levels are found, then the scale that suits
these best, q the levels less their zero: scale = qᵀHw / qᵀHq.

Legend: N output features, K input features, G groups of a row, g elements of a group, R rows of a piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_PIECE_ELEMENTS = 1 << 20
_SHRINKS = tuple(1 - step / 16 for step in range(8))
_ZERO_SHIFTS = (0, -1, 1)


class Scheme(Protocol):
    """How fine a grid is: what an integer format says of itself."""

    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int | None:
        """Neighbours of a row that share a scale; None: the whole row."""
        ...

    @property
    def symmetric(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Grid:
    """What levels of a matrix [N, K] stand for."""

    scales: Tensor
    """fp32 [N, G]; [1, 1] of a matrix with one scale."""
    zeros: Tensor | None
    """u8 [N, G]; None: num_levels // 2."""
    num_levels: int
    group: int
    """The last group of a row may be shorter."""

    @property
    def highest(self) -> int:
        return self.num_levels - 1

    def columns(self, columns: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Scale and zero, fp32 [N, columns] each, of some columns."""
        index = torch.arange(self.scales.shape[1] * self.group, device=self.scales.device)[columns] // self.group
        scales = self.scales[:, index]
        if self.zeros is None:
            return scales, torch.full_like(scales, self.num_levels // 2)
        return scales, self.zeros[:, index].float()

    def levels(self, weight: Tensor) -> Tensor:
        """The nearest level of each element, u8 [N, K]."""
        scales, zeros = self.columns(slice(weight.shape[1]))
        return nearest(weight.float(), scales, zeros, self.highest).to(torch.uint8)

    def values(self, levels: Tensor) -> Tensor:
        """What levels stand for, fp32 [N, K]."""
        scales, zeros = self.columns(slice(levels.shape[1]))
        return (levels.float() - zeros) * scales


def nearest(weight: Tensor, scales: Tensor, zeros: Tensor, highest: int) -> Tensor:
    """Levels as floats; what lies halfway goes to the even multiple of the scale."""
    return ((weight / scales).round() + zeros).clamp(0, highest)


def group_size(scheme: Scheme, columns: int) -> int:
    """Elements of a group in a row of `columns`."""
    return columns if scheme.group is None else scheme.group


def min_max(weight: Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Grid:
    """The grid that covers the largest of each group of `weight` [N, K]; scales are numbers of `dtype`."""
    groups = _in_groups(weight, group_size(scheme, weight.shape[1]))
    scales, zeros = _covering(groups, scheme)
    return _grid(_numbers_of(dtype, scales), zeros, scheme, groups.shape[-1])


def covered(weight: Tensor, scheme: Scheme) -> Tensor:
    """What rounding to `min_max` makes of `weight`, fp32 [N, K]."""
    groups = _in_groups(weight, group_size(scheme, weight.shape[1]))
    scales, zeros = _covering(groups, scheme)
    return (_steps(groups, scales, zeros, scheme) * scales[..., None]).flatten(1)[:, : weight.shape[1]]


def searched(weight: Tensor, scheme: Scheme, moments: Tensor, dtype: torch.dtype = torch.float32) -> Grid:
    """The grid of `weight` [N, K] that costs least in products; scales are numbers of `dtype`.

    `moments`: of the inputs, fp32: the importance [K], or the blocks [G, g, g] of H that `diagonal_blocks` returns.
    """
    size = group_size(scheme, weight.shape[1])
    if moments.ndim == 1:
        moments = F.pad(moments, (0, -len(moments) % size)).view(-1, size)
    rows = max(1, _PIECE_ELEMENTS // weight.shape[1])
    found = [_search(_in_groups(piece, size), scheme, moments, dtype) for piece in weight.split(rows)]
    scales, zeros = (torch.cat(parts) for parts in zip(*found, strict=True))
    return _grid(scales, zeros, scheme, size)


def diagonal_blocks(hessian: Tensor, size: int) -> Tensor:
    """The blocks [G, g, g] of H [K, K] that belong to groups of `size` columns; zeros fill up the last one."""
    padded = F.pad(hessian, (0, -len(hessian) % size) * 2)
    blocks = padded.view(len(padded) // size, size, -1, size)
    return torch.stack([blocks[number, :, number] for number in range(len(blocks))])


def _in_groups(weight: Tensor, size: int) -> Tensor:
    """[N, K] as fp32 [N, G, g], filled up with zeros."""
    return F.pad(weight.float(), (0, -weight.shape[1] % size)).view(len(weight), -1, size)


def _grid(scales: Tensor, zeros: Tensor, scheme: Scheme, size: int) -> Grid:
    return Grid(scales, None if scheme.symmetric else zeros.to(torch.uint8), 1 << scheme.bits, size)


def _covering(groups: Tensor, scheme: Scheme, shrink: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scales and zeros [R, G] of the range that groups [R, G, g] take, or of a part of it."""
    highest = 2**scheme.bits - 1
    if scheme.symmetric:
        scales = _nonzero(shrink * groups.abs().amax(-1) / (highest / 2))
        return scales, torch.full_like(scales, 2 ** (scheme.bits - 1))
    low, high = shrink * groups.amin(-1).clamp(max=0), shrink * groups.amax(-1).clamp(min=0)
    scales = _nonzero((high - low) / highest)
    return scales, (-low / scales).round().clamp(0, highest)


def _search(groups: Tensor, scheme: Scheme, moments: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The best scales and zeros [R, G] of groups [R, G, g]; what covers them is the first candidate."""
    best_scales, best_zeros = _covering(groups, scheme)
    best_scales = _numbers_of(dtype, best_scales)
    least = _error(groups, best_scales, best_zeros, scheme, moments)
    for scales, zeros in _candidates(groups, scheme):
        scales = _numbers_of(dtype, _refitted(groups, scales, zeros, scheme, moments))
        error = _error(groups, scales, zeros, scheme, moments)
        better = error < least
        least = torch.where(better, error, least)
        best_scales, best_zeros = torch.where(better, scales, best_scales), torch.where(better, zeros, best_zeros)
    return best_scales, best_zeros


def _candidates(groups: Tensor, scheme: Scheme) -> Iterator[tuple[Tensor, Tensor]]:
    highest = 2**scheme.bits - 1
    for shrink in _SHRINKS:
        scales, zeros = _covering(groups, scheme, shrink)
        for shift in (0,) if scheme.symmetric else _ZERO_SHIFTS:
            yield scales, (zeros + shift).clamp(0, highest)


def _refitted(groups: Tensor, scales: Tensor, zeros: Tensor, scheme: Scheme, moments: Tensor) -> Tensor:
    """The scales that suit best the levels which these scales give."""
    steps = _steps(groups, scales, zeros, scheme)
    weighted = _times(moments, steps)
    squares = (weighted * steps).sum(-1)
    refitted = (weighted * groups).sum(-1) / squares
    return torch.where((squares > 0) & (refitted > 0), refitted, scales)


def _error(groups: Tensor, scales: Tensor, zeros: Tensor, scheme: Scheme, moments: Tensor) -> Tensor:
    difference = groups - _steps(groups, scales, zeros, scheme) * scales[..., None]
    return (_times(moments, difference) * difference).sum(-1)


def _steps(groups: Tensor, scales: Tensor, zeros: Tensor, scheme: Scheme) -> Tensor:
    """Nearest levels less their zero, [R, G, g]."""
    zeros = zeros[..., None]
    return nearest(groups, scales[..., None], zeros, 2**scheme.bits - 1) - zeros


def _times(moments: Tensor, groups: Tensor) -> Tensor:
    """H times each group: moments [G, g] or [G, g, g], groups [R, G, g]."""
    if moments.ndim == 2:
        return moments * groups
    return torch.einsum("gij,rgj->rgi", moments, groups)


def _numbers_of(dtype: torch.dtype, scales: Tensor) -> Tensor:
    return scales.to(dtype).float()


def _nonzero(scales: Tensor) -> Tensor:
    """A group of zeros gets the scale 1."""
    return torch.where(scales == 0, 1.0, scales)
