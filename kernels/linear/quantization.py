"""Weights in 4, 6 and 8 bits: how they are stored, made and read back. Plain PyTorch, exact to the bit.

    NF4    w = table[code] · absmax of its 64-block          blocks run through the flattened matrix, across its rows
    INT4   w = (code − zero) · scale of its row and group    zero = 8 everywhere if symmetric
    INT6   the same, zero = 32
    INT8   w = code · scale of its row and group
    FP8    w = code · scale of its row                       e4m3fn: largest 448, no infinity

Every product is formed in fp32 and rounded once to the dtype asked for. NF4's absmax may itself be quantized ("double
quantization"): absmax = dynamic[code] · nested absmax of its 256-block + offset. Groups of integers may have minima
instead of zeros, as in GGUF files: w = code · scale + minimum; scales are short there, and code · scale exact in fp32.

Sources: NF4 https://arxiv.org/abs/2305.14314, its bytes as in bitsandbytes; the dynamic codebook
https://arxiv.org/abs/1511.04561; ranges of integers as in compressed-tensors: scale = 2·absmax / (2^bits − 1).

Legend: N output features, K input features, G groups of a row, B blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NF4_BLOCK = 64
NESTED_BLOCK = 256
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP8_MAX = 448.0
_SYMMETRIC_ZERO = 8
SIXES = 32
"""Codes of 6 bits that lie together; and the zero of symmetric ones."""
_TINIEST = 1e-38


@cache
def nf4_table(device: torch.device) -> Tensor:
    """The 16 values of NF4, fp32, rising."""
    return torch.tensor(NF4_TABLE, dtype=torch.float32, device=device)


@cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """What each of the 256 bytes stands for: two fp32 in the 64 bits of an int64, to be looked up at once."""
    table = nf4_table(device)
    return torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=-1).view(torch.int64).view(256)


@cache
def dynamic_table(device: torch.device, signed: bool = True) -> Tensor:
    """The 256 values of the dynamic 8-bit code, fp32, rising: 7 decades, each finer than the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float32)
        middles = (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles + [-middle for middle in middles if signed]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class NF4Weight:
    """A matrix [N, K] in NF4; the tensors are those that bitsandbytes stores."""

    codes: Tensor
    """u8 [⌈N·K/2⌉]: two elements of the flattened matrix a byte, the even one in the high nibble."""
    absmax: Tensor
    """[B] of every 64-block of the flattened matrix: fp32, or u8 codes if doubly quantized."""
    shape: tuple[int, int]
    nested_absmax: Tensor | None = None
    """fp32 [⌈B/256⌉], if doubly quantized."""
    offset: Tensor | None = None
    """fp32 scalar, if doubly quantized: the mean of all absmax. Of stacked matrices [⌈B/256⌉]: that of each block."""

    def block_scales(self, start: int = 0, stop: int | None = None) -> Tensor:
        """absmax of the blocks from `start` to `stop`, fp32."""
        absmax = self.absmax[start:stop]
        if self.nested_absmax is None or self.offset is None:
            return absmax
        blocks = torch.arange(start, start + len(absmax), device=absmax.device) // NESTED_BLOCK
        offset = self.offset[blocks] if self.offset.ndim else self.offset
        return dynamic_table(absmax.device)[absmax.long()] * self.nested_absmax[blocks] + offset

    def elements(self) -> Tensor:
        """Codes 0..15, u8 [N, K]."""
        pairs = torch.stack((self.codes >> 4, self.codes & 15), dim=-1)
        return pairs.view(-1)[: self.shape[0] * self.shape[1]].view(self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice = slice(None)) -> Tensor:
        """The matrix, or `rows` of it."""
        start, stop, _ = rows.indices(self.shape[0])
        first, end = start * self.shape[1], max(start, stop) * self.shape[1]
        pairs = _nf4_pairs(self.codes.device)[self.codes[first // 2 : -(-end // 2)].long()]
        values = pairs.view(torch.float32)[first % 2 :][: end - first]
        scales = self.block_scales(first // NF4_BLOCK, -(-end // NF4_BLOCK))
        if first % NF4_BLOCK or end % NF4_BLOCK:
            values = values * scales.repeat_interleave(NF4_BLOCK)[first % NF4_BLOCK :][: end - first]
        else:
            values = values.view(-1, NF4_BLOCK) * scales[:, None]
        return values.view(-1, self.shape[1]).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix [N, K] in 4-bit integers with a scale for each group of neighbours in a row; the last may be shorter."""

    codes: Tensor
    """u8 [N, ⌈K/2⌉]: two elements a byte, the even one in the low nibble; 0..15."""
    scales: Tensor
    """fp32 or fp16 [N, G]."""
    shape: tuple[int, int]
    group: int
    zeros: Tensor | None = None
    """u8 [N, G] if asymmetric: the code that means 0. Else it is 8."""
    minima: Tensor | None = None
    """As the scales: what code 0 stands for; then there are no zeros."""

    def elements(self) -> Tensor:
        """Codes 0..15, u8 [N, K]."""
        return _low_nibble_first(self.codes, self.shape[1])

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | Tensor = slice(None)) -> Tensor:
        """The matrix, or `rows` of it: a slice, or their numbers."""
        codes = _low_nibble_first(self.codes[rows], self.shape[1]).float()
        if self.minima is None:
            codes -= _SYMMETRIC_ZERO if self.zeros is None else _of_columns(self, self.zeros[rows])
        return _on_grid(self, codes, rows).to(dtype)


@dataclass(frozen=True, slots=True)
class Int6Weight:
    """A matrix [N, K] in 6-bit integers with a scale for each group of neighbours in a row; the last may be shorter."""

    codes: Tensor
    """u8 [N, ⌈K/32⌉ · 24]: of each 32 elements 16 bytes of low four bits, byte i has those of element i and above
    them those of i + 16; then 8 bytes with the other two bits, byte i has those of i, i + 8, i + 16 and i + 24."""
    scales: Tensor
    """fp32 or fp16 [N, G]."""
    shape: tuple[int, int]
    group: int
    zeros: Tensor | None = None
    """u8 [N, G] if asymmetric: the code that means 0. Else it is 32."""

    def elements(self) -> Tensor:
        """Codes 0..63, u8 [N, K]."""
        return _sixes(self.codes, self.shape[1])

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | Tensor = slice(None)) -> Tensor:
        """The matrix, or `rows` of it: a slice, or their numbers."""
        codes = _sixes(self.codes[rows], self.shape[1]).float()
        codes -= SIXES if self.zeros is None else _of_columns(self, self.zeros[rows])
        return _on_grid(self, codes, rows).to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix [N, K] in 8-bit integers with a scale for each group of neighbours in a row; the last may be shorter."""

    codes: Tensor
    """i8 [N, K]."""
    scales: Tensor
    """fp32 or fp16 [N, G]."""
    group: int
    """K for a scale of each row."""
    minima: Tensor | None = None
    """As the scales: what code 0 stands for, if not 0."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def has_only_row_scales(self) -> bool:
        return self.scales.shape[1] == 1 and self.minima is None

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | Tensor = slice(None)) -> Tensor:
        """The matrix, or `rows` of it: a slice, or their numbers."""
        return _on_grid(self, self.codes[rows].float(), rows).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [N, K] in float8_e4m3fn with a scale for each row."""

    codes: Tensor
    """[N, K]."""
    scales: Tensor
    """fp32 [N]."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | Tensor = slice(None)) -> Tensor:
        """The matrix, or `rows` of it: a slice, or their numbers."""
        return (self.codes[rows].float() * self.scales[rows, None]).to(dtype)


IntegerWeight = Int4Weight | Int6Weight | Int8Weight
QuantizedWeight = NF4Weight | IntegerWeight | Fp8Weight


def quantize_nf4(weight: Tensor, *, double: bool = True) -> NF4Weight:
    """Quantize a matrix [N, K] of floats in 64-blocks of its flattened elements; `double`: their absmax too."""
    _check_matrix(weight)
    codes, absmax = _nearest_codes(weight.flatten().float(), nf4_table(weight.device), NF4_BLOCK)
    packed, shape = pack_nf4(codes), (weight.shape[0], weight.shape[1])
    if not double:
        return NF4Weight(packed, absmax, shape)
    offset = absmax.mean()
    absmax_codes, nested_absmax = _nearest_codes(absmax - offset, dynamic_table(weight.device), NESTED_BLOCK)
    return NF4Weight(packed, absmax_codes, shape, nested_absmax, offset)


def stack_nf4(weights: Sequence[NF4Weight]) -> NF4Weight | None:
    """Matrices of the same K below one another as one, to the bit; None where a block would hold parts of two."""
    shape = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    codes, absmax = torch.cat([weight.codes for weight in weights]), torch.cat([weight.absmax for weight in weights])
    sizes = [weight.shape[0] * weight.shape[1] for weight in weights[:-1]]
    if all(weight.nested_absmax is None for weight in weights):
        return None if any(size % NF4_BLOCK for size in sizes) else NF4Weight(codes, absmax, shape)
    nested, offsets = [], []
    for weight in weights:
        if weight.nested_absmax is None or weight.offset is None:
            return None
        nested.append(weight.nested_absmax)
        offsets.append(weight.offset.expand(len(weight.nested_absmax)))
    if any(size % (NF4_BLOCK * NESTED_BLOCK) for size in sizes):
        return None
    return NF4Weight(codes, absmax, shape, torch.cat(nested), torch.cat(offsets))


def pack_nf4(codes: Tensor) -> Tensor:
    """Codes 0..15, u8 [elements], two a byte, the even one in the high nibble."""
    codes = F.pad(codes, (0, len(codes) % 2), value=NF4_TABLE.index(0.0))
    return codes[::2] << 4 | codes[1::2]


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0..15, u8 [N, K], two a byte, the even one in the low nibble."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


def pack_int6(codes: Tensor) -> Tensor:
    """Codes 0..63, u8 [N, K], as `Int6Weight` holds them."""
    wide = F.pad(codes, (0, -codes.shape[1] % SIXES)).view(len(codes), -1, SIXES)
    low, (first, second, third, fourth) = wide & 15, (wide >> 4).view(*wide.shape[:2], 4, 8).unbind(2)
    fours, twos = low[..., :16] | low[..., 16:] << 4, first | second << 2 | third << 4 | fourth << 6
    return torch.cat((fours, twos), dim=-1).flatten(1)


def quantize_int4(weight: Tensor, *, group: int = 128, symmetric: bool = True) -> Int4Weight:
    """Quantize a matrix [N, K] of floats in groups of `group` neighbours of a row.

    Scales are numbers of its dtype, in which files keep them.
    """
    codes, scales, zeros = _nearest_levels(weight, 4, group, symmetric)
    return Int4Weight(pack_int4(codes), scales, (weight.shape[0], weight.shape[1]), group, zeros)


def quantize_int6(weight: Tensor, *, group: int = 64, symmetric: bool = True) -> Int6Weight:
    """As `quantize_int4`."""
    codes, scales, zeros = _nearest_levels(weight, 6, group, symmetric)
    return Int6Weight(pack_int6(codes), scales, (weight.shape[0], weight.shape[1]), group, zeros)


def _nearest_levels(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes u8 [N, K], scales and zeros of groups on grids that cover them."""
    _check_matrix(weight)
    if group < 1:
        raise ValueError(f"a group has at least one element, not {group}")
    (n, k), most, middle = weight.shape, (1 << bits) - 1, 1 << bits - 1
    wide = F.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    zeros = None
    if symmetric:
        scales = _stored_scales(wide.abs().amax(-1) / (most / 2), weight.dtype)
        codes = (wide / scales[..., None]).round().clamp(-middle, middle - 1) + middle
    else:
        lowest, highest = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
        scales = _stored_scales((highest - lowest) / most, weight.dtype)
        zero_codes = (-lowest / scales).round().clamp(0, most)
        codes = ((wide / scales[..., None]).round() + zero_codes[..., None]).clamp(0, most)
        zeros = zero_codes.to(torch.uint8)
    return codes.view(n, -1)[:, :k].to(torch.uint8), scales, zeros


def quantize_int8(weight: Tensor, *, group: int | None = None) -> Int8Weight:
    """Quantize a matrix [N, K] of floats in groups of `group` neighbours of a row; None: in whole rows.

    Scales are numbers of its dtype, in which files keep them.
    """
    _check_matrix(weight)
    n, k = weight.shape
    group = k if group is None else group
    wide = F.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    scales = _stored_scales(wide.abs().amax(-1) / 127.5, weight.dtype)
    codes = (wide / scales[..., None]).round().clamp(-128, 127).to(torch.int8)
    return Int8Weight(codes.view(n, -1)[:, :k].contiguous(), scales, group)


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """Quantize a matrix [N, K] of floats row by row. Scales are numbers of its dtype, in which files keep them."""
    _check_matrix(weight)
    wide = weight.float()
    scales = _stored_scales(wide.abs().amax(-1) / _FP8_MAX, weight.dtype)
    # Some versions of torch turn what is beyond the range into NaN: it is cut off before the cast.
    return Fp8Weight((wide / scales[:, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scales)


def quantize_integers(weight: Tensor, *, bits: int, group: int | None, symmetric: bool) -> IntegerWeight:
    """`quantize_int4`, `quantize_int6` or `quantize_int8`, by the number of bits; a group of None is the whole row."""
    if bits == 8:
        return quantize_int8(weight, group=group)
    quantize = quantize_int4 if bits == 4 else quantize_int6
    return quantize(weight, group=group or weight.shape[1], symmetric=symmetric)


def integer_weight(
    levels: Tensor, scales: Tensor, zeros: Tensor | None = None, *, bits: int, group: int
) -> IntegerWeight:
    """The weight (level − zero) · scale of levels u8 [N, K] below 2^bits, scales fp32 [N, G], zeros u8 [N, G].

    Without zeros the zero is 2^(bits − 1). ValueError for 8 bits with zeros.
    """
    n, k = levels.shape
    if bits == 4:
        return Int4Weight(pack_int4(levels), scales.float(), (n, k), group, zeros)
    if bits == 6:
        return Int6Weight(pack_int6(levels), scales.float(), (n, k), group, zeros)
    if bits != 8 or zeros is not None:
        raise ValueError(f"{bits} bits are multiplied symmetric alone")
    return Int8Weight((levels ^ 128).view(torch.int8), scales.float(), group)


def weight_of_codes(codes: Tensor, scales: Tensor, minima: Tensor | None, *, columns: int, group: int) -> IntegerWeight:
    """The weight [N, columns] of codes as it holds them: u8 for 4 bits, i8 for 8."""
    if codes.dtype == torch.int8:
        return Int8Weight(codes, scales, group, minima)
    return Int4Weight(codes, scales, (codes.shape[0], columns), group, minima=minima)


def integer_levels(weight: IntegerWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Levels, scales and zeros of which `integer_weight` makes the weight."""
    if not isinstance(weight, Int8Weight):
        return weight.elements(), weight.scales, weight.zeros
    return weight.codes.view(torch.uint8) ^ 128, weight.scales, None


def signed_levels(weight: IntegerWeight) -> Tensor:
    """Levels less their zeros, which fit into 8 bits: i8 [N, K], of a weight without minima."""
    levels, _, zeros = integer_levels(weight)
    middle = {Int4Weight: _SYMMETRIC_ZERO, Int6Weight: SIXES, Int8Weight: 128}[type(weight)]
    return (levels - (middle if zeros is None else _of_columns(weight, zeros))).to(torch.int8)


def stack_integers(weights: Sequence[IntegerWeight]) -> IntegerWeight | None:
    """Matrices of the same K below one another as one; None where they differ in more than numbers."""
    first, kinds = weights[0], {(type(weight), weight.group, *_dtypes_of_parts(weight)) for weight in weights}
    if len(kinds) > 1:
        return None
    parts: dict[str, Any] = {
        name: torch.cat([getattr(weight, name) for weight in weights]) for name, _ in _dtypes_of_parts(first)
    }
    if not isinstance(first, Int8Weight):
        parts["shape"] = sum(weight.shape[0] for weight in weights), first.shape[1]
    return replace(first, **parts)


def _dtypes_of_parts(weight: IntegerWeight) -> list[tuple[str, torch.dtype]]:
    parts = ((name, getattr(weight, name, None)) for name in ("codes", "scales", "zeros", "minima"))
    return [(name, part.dtype) for name, part in parts if part is not None]


def _on_grid(weight: IntegerWeight, codes: Tensor, rows: slice | Tensor) -> Tensor:
    """Codes, fp32, times the scales of their groups; plus the minima."""
    values = codes * _of_columns(weight, weight.scales[rows])
    minima = None if isinstance(weight, Int6Weight) else weight.minima
    return values if minima is None else values + _of_columns(weight, minima[rows])


def _of_columns(weight: IntegerWeight, values: Tensor) -> Tensor:
    """Values of groups [N, G], fp32 of each column [N, K]."""
    return values.float().repeat_interleave(weight.group, -1)[..., : weight.shape[1]]


def _check_matrix(weight: Tensor) -> None:
    if weight.ndim != 2 or not weight.is_floating_point() or not weight.numel():
        raise ValueError(f"only a matrix of floats can be quantized, not {weight.dtype} {tuple(weight.shape)}")


def _nearest_codes(values: Tensor, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes (u8) of fp32 values after division by the absmax of their block, and these absmax [⌈values/block⌉].

    A value halfway between two of the table gets the lower one. A full block is multiplied with the reciprocal, the
    last, shorter one divided, as bitsandbytes does: the results can differ in their last bit.
    """
    full = len(values) - len(values) % block
    blocks, rest = values[:full].view(-1, block), values[full:]
    absmax = blocks.abs().amax(-1)
    scaled = (blocks * (1 / absmax.clamp(min=_TINIEST))[:, None]).view(-1)
    if len(rest):
        last = rest.abs().amax().clamp(min=_TINIEST)
        absmax, scaled = torch.cat((absmax, last[None])), torch.cat((scaled, rest / last))
    midpoints = (table[:-1] + table[1:]) / 2
    return torch.bucketize(scaled.clamp(-1, 1), midpoints).to(torch.uint8), absmax


def _stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to `dtype`, fp32. A group of zeros gets the scale 1."""
    rounded = scales.to(dtype).float()
    return torch.where(rounded == 0, 1.0, rounded)


def _low_nibble_first(codes: Tensor, columns: int) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[:, :columns]


def _sixes(codes: Tensor, columns: int) -> Tensor:
    blocks = codes.unflatten(-1, (-1, SIXES * 6 // 8))
    fours, twos = blocks[..., :16], blocks[..., 16:]
    high = torch.cat([twos >> 2 * eighth & 3 for eighth in range(4)], dim=-1)
    return (torch.cat((fours & 15, fours >> 4), dim=-1) | high << 4).flatten(-2)[..., :columns]
