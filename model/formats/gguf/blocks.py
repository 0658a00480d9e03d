"""ggml's quantized blocks, in which GGUF files store matrices, and llama.cpp's rules of rounding to them.

Blocks run along a row; scales are fp16, little-endian. Source: ggml's ggml-common.h and ggml-quants.c.

    type   bytes / weights   in this order                          weight
    Q8_0   34 / 32           d, signed q[32]                        d q
    Q4_0   18 / 32           d, q[16]                               d (q - 8)
    Q4_1   20 / 32           d, m, q[16]                            d q + m
    Q5_0   22 / 32           d, fifth bits[4], q[16]                d (q - 16)
    Q5_1   24 / 32           d, m, fifth bits[4], q[16]             d q + m
    Q4_K   144 / 256         d, dmin, s and t[12], q[128]           d s q - dmin t, s and t of 32 weights in 6 bits
    Q6_K   210 / 256         low bits[128], high[64], s[16], d      d s (q - 32), signed s of 16 weights

In memory all of them are unsigned levels on grids: w = (level - zero) · scale + minimum.
Legend: N rows, K columns, n blocks, G groups of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.files.safe_io import CheckpointError

SMALL_BLOCK, LARGE_BLOCK = 32, 256
MAX_SIX_BITS = 63


@dataclass(frozen=True)
class Levels:
    """A quantized matrix, to the bit as it is stored."""

    levels: Tensor
    """u8 [N, K], from 0."""
    scales: Tensor
    """fp32 [N, G], each of K / G neighbours in a row; a scale may be negative."""
    minima: Tensor | None
    """fp32 [N, G], what the level `zero` stands for; None for 0."""
    zero: int

    def dequantize(self) -> Tensor:
        """The matrix, fp32 [N, K], to the bit as ggml computes it."""
        rows, groups = self.scales.shape
        weights = (self.levels.float() - self.zero).view(rows, groups, -1) * self.scales[..., None]
        if self.minima is not None:
            weights += self.minima[..., None]
        return weights.view(rows, -1)


class BlockType(ABC):
    """One of ggml's types; `name` is ggml's."""

    name: str
    num_weights: int
    """Of a block."""
    num_bytes: int
    """Of a block."""
    bits: int
    """Of a level."""
    group: int
    """Weights that share a scale."""
    has_minimum: bool

    @property
    def zero(self) -> int:
        """The level of the weight 0, or of the minimum."""
        return 0 if self.has_minimum else 1 << self.bits - 1

    def quantize(self, dense: Tensor) -> Tensor:
        """u8 [N, bytes of a row] of a matrix of floats [N, K], by llama.cpp's rule; K must be divisible into blocks."""
        blocks = dense.float().reshape(-1, self.num_weights)
        return self._quantize_blocks(blocks).view(dense.shape[0], -1)

    def unpack(self, stored: Tensor) -> Levels:
        """Of u8 [N, bytes of a row]."""
        found = self._unpack_blocks(stored.contiguous().view(-1, self.num_bytes))
        rows = stored.shape[0]
        minima = None if found.minima is None else found.minima.view(rows, -1)
        return Levels(found.levels.view(rows, -1), found.scales.view(rows, -1), minima, found.zero)

    def repack(self, found: Levels) -> Tensor:
        """u8 [N, bytes of a row], `unpack` undone: to the bit what llama.cpp wrote.

        Other programs may have split a scale into another unit and multiples: then the weights are the same. Raises
        CheckpointError for scales that have no such parts.
        """
        groups = self.num_weights // self.group
        minima = None if found.minima is None else found.minima.reshape(-1, groups)
        levels, scales = found.levels.reshape(-1, self.num_weights), found.scales.reshape(-1, groups)
        return self._pack_blocks(levels, scales, minima).view(len(found.levels), -1)

    @abstractmethod
    def _quantize_blocks(self, x: Tensor) -> Tensor:
        """u8 [n, bytes] of fp32 [n, weights]."""

    @abstractmethod
    def _pack_blocks(self, levels: Tensor, scales: Tensor, minima: Tensor | None) -> Tensor:
        """u8 [n, bytes] of levels u8 [n, weights], and scales and minima fp32 [n, groups]."""

    @abstractmethod
    def _unpack_blocks(self, stored: Tensor) -> Levels:
        """Of u8 [n, bytes], with a block where the result has a row."""


class SmallBlocks(BlockType):
    """32 weights with one scale, and a minimum where the name ends with 1."""

    num_weights = group = SMALL_BLOCK

    def __init__(self, name: str, bits: int, *, has_minimum: bool) -> None:
        self.name, self.bits, self.has_minimum = name, bits, has_minimum
        self.num_bytes = 2 + 2 * has_minimum + SMALL_BLOCK * bits // 8

    def _pack_blocks(self, levels: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
        parts = [_half_bytes(scales)] if minima is None else [_half_bytes(scales), _half_bytes(minima)]
        if self.bits == 8:
            return torch.cat([*parts, levels ^ 128], dim=1)
        if self.bits == 5:
            parts.append(_pack_bits(levels >> 4))
        low, high = (levels & 15).chunk(2, dim=1)
        return torch.cat([*parts, low | high << 4], dim=1)

    def _unpack_blocks(self, stored: Tensor) -> Levels:
        scales, minima, codes = _halves(stored[:, :2]), None, stored[:, 2:]
        if self.has_minimum:
            minima, codes = _halves(codes[:, :2]), codes[:, 2:]
        if self.bits == 8:
            return Levels(codes ^ 128, scales, minima, self.zero)
        nibbles = codes[:, -16:]
        levels = torch.cat([nibbles & 15, nibbles >> 4], dim=1)
        if self.bits == 5:
            levels |= _unpack_bits(codes[:, :4]) << 4
        return Levels(levels, scales, minima, self.zero)

    def _quantize_blocks(self, x: Tensor) -> Tensor:
        if self.has_minimum:
            return self._pack_blocks(*self._between_extremes(x))
        return self._pack_blocks(*(self._around_zero(x) if self.bits == 8 else self._to_the_extreme(x)))

    def _between_extremes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top, (lowest, highest) = (1 << self.bits) - 1, torch.aminmax(x, dim=1, keepdim=True)
        scales = (highest - lowest) / top
        return _truncated((x - lowest) * _reciprocal(scales) + 0.5, top), scales, lowest

    def _to_the_extreme(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weight that is farthest from 0 is exact; where it is positive the scale is negative."""
        zero, extreme = 1 << self.bits - 1, _extreme(x)
        scales = extreme / -zero
        return _truncated(x * _reciprocal(scales) + (zero + 0.5), 2 * zero - 1), scales

    def _around_zero(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales = x.abs().amax(dim=1, keepdim=True) / 127
        signed = x * _reciprocal(scales)
        whole = signed.abs().floor()
        rounded = whole + (2 * (signed.abs() - whole)).floor()  # half away from 0, as C rounds
        return (rounded * signed.sign() + 128).to(torch.uint8), scales


class FourBitSuperBlocks(BlockType):
    """Q4_K: 8 groups of 32 weights; scales and minima of the groups are 6-bit multiples of the block's two."""

    name, num_weights, num_bytes = "Q4_K", LARGE_BLOCK, 144
    bits, group, has_minimum = 4, 32, True

    def pack(self, levels: Tensor, scale: Tensor, minimum: Tensor, multiples: tuple[Tensor, Tensor]) -> Tensor:
        """Of levels u8 [n, 256], d and dmin fp32 [n, 1], and s and t u8 [n, 8]."""
        s, t = multiples
        sixes = torch.cat([s[:, :4] | s[:, 4:] >> 4 << 6, t[:, :4] | t[:, 4:] >> 4 << 6], dim=1)
        sixes = torch.cat([sixes, s[:, 4:] & 15 | (t[:, 4:] & 15) << 4], dim=1)
        low, high = levels.view(-1, 4, 2, 32).unbind(2)
        return torch.cat([_half_bytes(scale), _half_bytes(minimum), sixes, (low | high << 4).flatten(1)], dim=1)

    def _unpack_blocks(self, stored: Tensor) -> Levels:
        scale, minimum = _halves(stored[:, :2]), _halves(stored[:, 2:4])
        first, second, third = stored[:, 4:16].view(-1, 3, 4).unbind(1)
        s = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
        t = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
        codes = stored[:, 16:].view(-1, 4, 1, 32)
        levels = torch.cat([codes & 15, codes >> 4], dim=2).flatten(1)
        return Levels(levels, scale * s, -(minimum * t), self.zero)

    def _pack_blocks(self, levels: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
        offsets = torch.zeros_like(scales) if minima is None else -minima
        (scale, s), (minimum, t) = (_unit_and_multiples(x, range(MAX_SIX_BITS, 0, -1)) for x in (scales, offsets))
        return self.pack(levels, scale, minimum, (s.to(torch.uint8), t.to(torch.uint8)))

    def _quantize_blocks(self, x: Tensor) -> Tensor:
        x = x.view(-1, 8, 32)
        scales, minima = (found[..., 0] for found in _fit_grids(x, 15))
        scale, s = _six_bits(scales)
        minimum, t = _six_bits(0 - minima)  # as in ggml, 0 has no sign
        step, offset = (_as_half(scale) * s)[..., None], (_as_half(minimum) * t)[..., None]
        levels = ((x + offset) / step).round().nan_to_num(0).clamp(0, 15).to(torch.uint8)
        return self.pack(levels.flatten(1), scale, minimum, (s, t))


class SixBitSuperBlocks(BlockType):
    """Q6_K: 16 groups of 16 weights; their scales are signed 8-bit multiples of the block's."""

    name, num_weights, num_bytes = "Q6_K", LARGE_BLOCK, 210
    bits, group, has_minimum = 6, 16, False

    def pack(self, levels: Tensor, scale: Tensor, multiples: Tensor) -> Tensor:
        """Of levels u8 [n, 256], d fp32 [n, 1] and s i8 [n, 16]."""
        quarters = levels.view(-1, 2, 4, 32)
        low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
        high = torch.zeros_like(quarters[:, :, 0])
        for quarter in range(4):
            high |= quarters[:, :, quarter] >> 4 << 2 * quarter
        return torch.cat([low.flatten(1), high.flatten(1), multiples.view(torch.uint8), _half_bytes(scale)], dim=1)

    def _unpack_blocks(self, stored: Tensor) -> Levels:
        low, high = stored[:, :128].view(-1, 2, 2, 32), stored[:, 128:192].view(-1, 2, 1, 32)
        quarters = torch.cat([low & 15, low >> 4], dim=2)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
        levels = (quarters | (high >> shifts & 3) << 4).flatten(1)
        multiples = stored[:, 192:208].contiguous().view(torch.int8)
        return Levels(levels, _halves(stored[:, 208:]) * multiples, None, self.zero)

    def _pack_blocks(self, levels: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
        scale, multiples = _unit_and_multiples(scales, range(-128, 0))
        return self.pack(levels, scale, multiples.to(torch.int8))

    def _quantize_blocks(self, x: Tensor) -> Tensor:
        x = x.view(-1, 16, 16)
        scales = _fit_scales(x, 32)[..., 0]
        scale = 0 - _extreme(scales) / 128
        multiples = (scales * _reciprocal(scale)).round().clamp(-128, 127).to(torch.int8)
        step = (_as_half(scale) * multiples)[..., None]
        levels = (x / step).round().nan_to_num(0).clamp(-32, 31) + 32
        return self.pack(levels.to(torch.uint8).flatten(1), scale, multiples)


BLOCK_TYPES: dict[str, BlockType] = {
    type.name: type
    for type in (
        SmallBlocks("Q8_0", 8, has_minimum=False),
        SmallBlocks("Q4_0", 4, has_minimum=False),
        SmallBlocks("Q4_1", 4, has_minimum=True),
        SmallBlocks("Q5_0", 5, has_minimum=False),
        SmallBlocks("Q5_1", 5, has_minimum=True),
        FourBitSuperBlocks(),
        SixBitSuperBlocks(),
    )
}


def _fit_grids(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scales, and minima of at most 0, for levels 0 … top of groups [..., size]; llama.cpp's make_qkx2_quants.

    Of 21 first grids each is fitted to its rounding by weighted least squares; the one with the least error is kept.
    """
    weights = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    minima, highest = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True)
    scales = (highest - minima) / top
    levels = ((x - minima) * _reciprocal(scales)).round().clamp(0, top)
    least = _weighted_error(x, weights, levels * scales + minima)
    for step in range(21):
        levels = ((x - minima) * _reciprocal(highest - minima) * (top - 1 + 0.1 * step)).round().clamp(0, top)
        new_scales, new_minima = _least_squares(x, weights, levels)
        error = _weighted_error(x, weights, levels * new_scales + new_minima)
        better = error < least  # never where the fit is not a number
        least = torch.where(better, error, least)
        scales, minima = torch.where(better, new_scales, scales), torch.where(better, new_minima, minima)
    return scales, minima


def _least_squares(x: Tensor, weights: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum of at most 0 with which the levels come closest to x."""
    w, wl, wx = weights.sum(-1, keepdim=True), (weights * levels).sum(-1, keepdim=True), (weights * x)
    wll, wxl = (weights * levels.square()).sum(-1, keepdim=True), (wx * levels).sum(-1, keepdim=True)
    wx = wx.sum(-1, keepdim=True)
    determinant = w * wll - wl.square()
    scales, minima = (w * wxl - wx * wl) / determinant, (wll * wx - wl * wxl) / determinant
    return torch.where(minima > 0, wxl / wll, scales), minima.clamp(max=0)


def _weighted_error(x: Tensor, weights: Tensor, approximation: Tensor) -> Tensor:
    return (weights * (approximation - x).square()).sum(-1, keepdim=True)


def _fit_scales(x: Tensor, zero: int) -> Tensor:
    """Scales for levels -zero … zero - 1 of groups [..., size], of 19 the best one; llama.cpp's make_qx_quants.

    Errors are weighted with the squares of the weights.
    """
    weights, reciprocal = x.square(), _reciprocal(_extreme(x))
    best, scales = torch.zeros_like(reciprocal), torch.zeros_like(reciprocal)
    for step in range(-9, 10):
        levels = (x * reciprocal * -(zero + 0.1 * step)).round().clamp(-zero, zero - 1)
        xl, ll = ((weights * factor * levels).sum(-1, keepdim=True) for factor in (x, levels))
        gain = xl.square() * _reciprocal(ll)
        better = gain > best
        best, scales = torch.where(better, gain, best), torch.where(better, xl * _reciprocal(ll), scales)
    return scales


def _six_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """A unit [n, 1] and multiples u8 [n, 8] of it, at most 63, for numbers from 0."""
    unit = numbers.amax(-1, keepdim=True).clamp(min=0) / MAX_SIX_BITS
    return unit, (numbers * _reciprocal(unit)).round().clamp(0, MAX_SIX_BITS).to(torch.uint8)


def _unit_and_multiples(numbers: Tensor, of_extreme: Iterable[int]) -> tuple[Tensor, Tensor]:
    """A unit [n, 1] that fp16 holds, and whole multiples of it that are `numbers` [n, groups], to the bit.

    Tried is which multiple the number farthest from 0 is, llama.cpp's first. CheckpointError where none is right.
    """
    extreme = _extreme(numbers)
    found, unit = extreme == 0, extreme
    for multiple in of_extreme:
        candidate = _as_half(extreme / multiple)
        exact = ((numbers * _reciprocal(candidate)).round() * candidate == numbers).all(1, keepdim=True)
        unit, found = torch.where(exact & ~found, candidate, unit), exact | found
        if found.all():
            return unit, (numbers * _reciprocal(unit)).round()
    raise CheckpointError("Scales of a block are not multiples of a number in fp16, as GGUF files store them.")


def _extreme(x: Tensor) -> Tensor:
    """The number farthest from 0, with its sign; of several the first."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def _reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 0 of 0."""
    return torch.where(x == 0, 0, 1 / x)


def _truncated(x: Tensor, top: int) -> Tensor:
    return x.trunc().clamp(0, top).to(torch.uint8)


def _as_half(x: Tensor) -> Tensor:
    return x.half().float()


def _half_bytes(x: Tensor) -> Tensor:
    """u8 [n, 2] of fp32 [n, 1]."""
    return x.half().contiguous().view(torch.uint8)


def _halves(stored: Tensor) -> Tensor:
    """fp32 [n, 1] of u8 [n, 2]."""
    return stored.contiguous().view(torch.float16).float()


def _pack_bits(bits: Tensor) -> Tensor:
    """u8 [n, 4] of bits u8 [n, 32], the first in the lowest bit."""
    return (bits.view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _unpack_bits(stored: Tensor) -> Tensor:
    return (stored[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)
