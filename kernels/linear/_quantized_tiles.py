"""Quantized weights as the Triton kernels read them: repacked once, at load.

A tile is TILE neighbours in K of every output; words[tile, r, n] is 32 bits: the codes of output n at
k = tile·TILE + j·ROWS + r, where j = 0 … PER−1 counts from the lowest bits. So

- neighbouring threads read neighbouring outputs, 16 bytes each;
- a block of words [ROWS, N], shifted by j, becomes values [PER, ROWS, N], and merging the first two dimensions gives
  [TILE, N] with k in order: no element changes its thread before the matrix product;
- TILE divides the group, so that one row of scales [N] serves a tile, and scales the sum instead of each weight.

Where no tile of 16 or more fits into a group (NF4 with odd K, small groups) every element has its own scale ("fine").

Legend: N output features, K input features, G groups of a row.
"""

from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.quantization import (
    NESTED_BLOCK,
    NF4_BLOCK,
    Fp8Weight,
    Int8Weight,
    IntegerWeight,
    NF4Weight,
    QuantizedWeight,
    dynamic_table,
    nf4_table,
)

_LONGEST_TILE, _SHORTEST_TILE, _USUAL_TILE = 128, 16, 64
_NESTED_BLOCK = tl.constexpr(NESTED_BLOCK)


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A quantized matrix [N, K] repacked for the kernels; see above."""

    format: str
    """"nf4", "int4", "int8" or "fp8"."""
    words: Tensor
    """int32 [tiles, ROWS, N]."""
    scales: Tensor
    """fp32 or fp16 [G, N], [tiles·TILE, N] where fine, [1, N] for a scale a row; u8 [G, N] if doubly quantized."""
    shape: tuple[int, int]
    tile: int
    group: int
    """Neighbours in a row that share a scale; 1 where fine, 0 for the whole row."""
    zeros: Tensor | None = None
    """u8, of the shape of the scales: INT4 without minima only."""
    minima: Tensor | None = None
    """As the scales: what code 0 stands for, of integers in groups."""
    nested_absmax: Tensor | None = None
    offset: Tensor | None = None
    """fp32, both [⌈B/256⌉], if doubly quantized."""

    @property
    def bits(self) -> int:
        return 4 if self.format in ("nf4", "int4") else 8


def tile_weight(weight: QuantizedWeight) -> TiledWeight:
    """Repack a weight on its own device."""
    if isinstance(weight, Fp8Weight):
        return _tiled_rows("fp8", weight.codes, weight.scales[None].contiguous())
    if isinstance(weight, Int8Weight) and weight.has_only_row_scales:
        return _tiled_rows("int8", weight.codes, weight.scales.t().contiguous())
    return _tiled_nf4(weight) if isinstance(weight, NF4Weight) else _tiled_integers(weight)


def _tiled_rows(format: str, codes: Tensor, scales: Tensor) -> TiledWeight:
    words = _words(codes.view(torch.uint8), 8, _USUAL_TILE)
    return TiledWeight(format, words, scales, (codes.shape[0], codes.shape[1]), _USUAL_TILE, 0)


def _tiled_integers(weight: IntegerWeight) -> TiledWeight:
    tile, fine = _tile_of(weight.group)
    zeros = None
    if isinstance(weight, Int8Weight):
        name, words = "int8", _words(weight.codes.view(torch.uint8), 8, tile)
    else:
        name, words = "int4", _words(weight.elements(), 4, tile)
        zeros = torch.full_like(weight.scales, 8, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    length = len(words) * tile

    def of_outputs(values: Tensor) -> Tensor:
        return _by_group(values, weight.group, length) if fine else values.t().contiguous()

    minima = None if weight.minima is None else of_outputs(weight.minima)
    zeros = None if zeros is None or minima is not None else of_outputs(zeros)
    group = 1 if fine else weight.group
    return TiledWeight(name, words, of_outputs(weight.scales), weight.shape, tile, group, zeros, minima)


def _tiled_nf4(weight: NF4Weight) -> TiledWeight:
    n, k = weight.shape
    group = gcd(k, NF4_BLOCK)
    tile, fine = _tile_of(group)
    words = _words(weight.elements(), 4, tile)
    if group == NF4_BLOCK and weight.nested_absmax is not None and weight.offset is not None:
        codes = weight.absmax.view(n, -1).t().contiguous()
        nested = {
            "nested_absmax": weight.nested_absmax,
            "offset": weight.offset.expand(len(weight.nested_absmax)).contiguous(),
        }
        return TiledWeight("nf4", words, codes, weight.shape, tile, group, **nested)
    starts = torch.arange(0, n * k, group, device=words.device)
    scales = weight.block_scales()[starts // NF4_BLOCK].view(n, -1)
    scales = _by_group(scales, group, len(words) * tile) if fine else scales.t().contiguous()
    return TiledWeight("nf4", words, scales, weight.shape, tile, 1 if fine else group)


def _tile_of(group: int) -> tuple[int, bool]:
    """The tile for groups of this size, and whether each element of it has its own scale."""
    tile = gcd(group, _LONGEST_TILE)
    return (_USUAL_TILE, True) if tile < _SHORTEST_TILE else (tile, False)


def _words(codes: Tensor, bits: int, tile: int) -> Tensor:
    """Pack u8 codes [N, K] as above."""
    per = 32 // bits
    parts = F.pad(codes, (0, -codes.shape[1] % tile)).view(len(codes), -1, per, tile // per).permute(2, 1, 3, 0)
    words = torch.zeros(parts.shape[1:], dtype=torch.int32, device=codes.device)
    for j, part in enumerate(parts):
        words |= part.to(torch.int32) << (bits * j)
    return words


def tile_codes(weight: TiledWeight) -> Tensor:
    """The codes of a tiled weight, u8 [N, K]: what `tile_weight` was given."""
    n, k = weight.shape
    mask = (1 << weight.bits) - 1
    parts = torch.stack([(weight.words >> shift & mask).to(torch.uint8) for shift in range(0, 32, weight.bits)])
    return parts.permute(3, 1, 0, 2).reshape(n, -1)[:, :k]


def _by_group(values: Tensor, group: int, length: int) -> Tensor:
    """Values [N, G] of groups to [length, N] of elements; zeros behind the last group."""
    each = values.repeat_interleave(group, 1)[:, :length]
    return F.pad(each, (0, length - each.shape[1])).t().contiguous()


def tables(weight: TiledWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The codebook of the weight in `dtype` (any tensor if it has none), and that of doubly quantized absmax."""
    table = nf4_table(weight.words.device).to(dtype) if weight.format == "nf4" else weight.scales
    return table, None if weight.nested_absmax is None else dynamic_table(weight.words.device)


@triton.jit
def tile_values(
    p_words, p_table, p_zeros, tile, o_n, m_n, num_outputs,
    FORMAT: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The codes' values before scaling, [PER, ROWS, N] in DTYPE; k = tile · PER · ROWS + j · ROWS + r."""
    o_words = (tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS))[:, None] * num_outputs + o_n[None, :]
    b_words = tl.load(p_words + o_words, mask=m_n[None, :], other=0, eviction_policy="evict_first")
    shifts = tl.arange(0, PER) * (32 // PER)
    b_codes = (b_words[None, :, :] >> shifts[:, None, None]) & ((1 << (32 // PER)) - 1)
    if FORMAT == "nf4":
        # The table stays in shared memory, its 16 values in 16 banks: no two look-ups of a warp are in conflict. Loads
        # from a table in memory would keep Triton from fetching the next words ahead.
        b_table = tl.load(p_table + tl.arange(0, 16))
        b_values = tl.reshape(tl.gather(b_table, tl.ravel(b_codes), 0), b_codes.shape)
    elif FORMAT == "int4":
        if p_zeros is None:
            b_zeros = tl.zeros([1, 1, 1], dtype=tl.int32)
        elif GROUP == 1:
            o_zeros = element_offsets(tile, o_n, num_outputs, PER, ROWS)
            b_zeros = tl.load(p_zeros + o_zeros, mask=m_n[None, None, :], other=0)
        else:
            o_zeros = tl.cast(tile * (PER * ROWS) // GROUP, tl.int64) * num_outputs + o_n
            b_zeros = tl.load(p_zeros + o_zeros, mask=m_n, other=0)[None, None, :]
        b_values = (b_codes - b_zeros.to(tl.int32)).to(tl.float32)
    elif FORMAT == "int8":
        b_values = ((b_codes ^ 128) - 128).to(tl.float32)
    else:
        # e4m3 placed into fp16 is the value / 256, below the smallest normal number too.
        b_bits = ((b_codes & 0x80) << 8) | ((b_codes & 0x7F) << 7)
        b_values = b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
    return b_values.to(DTYPE)


@triton.jit
def element_offsets(tile, o_n, num_outputs, PER: tl.constexpr, ROWS: tl.constexpr):
    """Where the elements of a tile lie in [K, N], as [PER, ROWS, N]."""
    o_k = tl.cast(tile, tl.int64) * (PER * ROWS) + tl.arange(0, PER)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    return o_k[:, :, None] * num_outputs + o_n[None, None, :]


@triton.jit
def group_scales(
    p_scales, p_dynamic, p_nested, p_offset, group, num_groups, o_n, m_n, num_outputs,
):  # fmt: skip
    """The scales of one group of each output, fp32 [N]."""
    b_scales = tl.load(p_scales + tl.cast(group, tl.int64) * num_outputs + o_n, mask=m_n, other=0)
    if p_nested is not None:
        block = o_n.to(tl.int64) * num_groups + group
        b_nested = tl.load(p_nested + block // _NESTED_BLOCK, mask=m_n, other=0.0)
        b_offset = tl.load(p_offset + block // _NESTED_BLOCK, mask=m_n, other=0.0)
        b_scales = tl.load(p_dynamic + b_scales.to(tl.int32)) * b_nested + b_offset
    return b_scales.to(tl.float32)


@triton.jit
def group_minima(p_minima, group, o_n, m_n, num_outputs):
    """The minima of one group of each output, fp32 [N]."""
    return tl.load(p_minima + tl.cast(group, tl.int64) * num_outputs + o_n, mask=m_n, other=0.0).to(tl.float32)


@triton.jit
def scaled_elements(
    b_values, p_scales, p_minima, tile, o_n, m_n, num_outputs, PER: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Values [PER, ROWS, N] of a tile where every element has its own scale, scaled, fp32."""
    o_scales = element_offsets(tile, o_n, num_outputs, PER, ROWS)
    b_values *= tl.load(p_scales + o_scales, mask=m_n[None, None, :], other=0.0).to(tl.float32)
    if p_minima is not None:
        b_values += tl.load(p_minima + o_scales, mask=m_n[None, None, :], other=0.0).to(tl.float32)
    return b_values


@triton.jit
def scaled_tile(
    p_words, p_table, p_zeros, p_scales, p_minima, p_dynamic, p_nested, p_offset, tile, o_n, m_n, num_groups,
    num_outputs, FORMAT: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The weights of a tile [TILE, N], scaled, fp32."""
    b_values = tile_values(p_words, p_table, p_zeros, tile, o_n, m_n, num_outputs, FORMAT, PER, ROWS, GROUP, tl.float32)
    if GROUP == 1:
        b_values = scaled_elements(b_values, p_scales, p_minima, tile, o_n, m_n, num_outputs, PER, ROWS)
    else:
        group = tile * (PER * ROWS) // GROUP if GROUP > 1 else 0
        b_values *= group_scales(p_scales, p_dynamic, p_nested, p_offset, group, num_groups, o_n, m_n, num_outputs)[
            None, None, :
        ]
        if p_minima is not None:
            b_values += group_minima(p_minima, group, o_n, m_n, num_outputs)[None, None, :]
    return tl.reshape(b_values, [PER * ROWS, o_n.shape[0]])
