"""Quantized weights as the Triton kernels read them: repacked once, at load.

A tile is TILE neighbours in K of every output; words[tile, n] are the 32-bit words with the codes of output n. Tensor
cores want from a thread 2 neighbours in K, and the 2 that lie 8 further, of every 16, while 4 threads share an output.
So with LANES = 4 (fewer in a tile of 2 words) and M words a thread, code (i, b) of word (lane, m) is that of

    k = tile·TILE + ((m · PER/2 + i) · LANES + lane) · 2 + b        i = 0 … PER/2−1, b = 0, 1

- a thread reads neighbouring words, 16 bytes where there are 4, and they hold what it multiplies: from the copy of the
  words in shared memory to the matrix product no element changes its thread;
- where in a word a code lies is the format's choice: so that bit operations yield pairs b = 0, 1 (`_quantized_pairs`);
- INT6 has the low four bits as INT4 has its codes, and behind an output's words 16 bits for each of them, with the two
  bits above its codes in the same order;
- TILE divides the group, so that one row of scales [N] serves a tile, and scales the sum instead of each weight;
- doubly quantized absmax becomes fp32: its codes, and what they stand for, would be waited for in every tile.

Where no tile of 16 or more fits into a group (NF4 with odd K, small groups) every element has its own scale ("fine").

Legend: N output features, K input features, G groups of a row.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.linear._quantized_pairs import NF4_ORDER, decoded_pairs, nf4_bytes
from kernels.linear.quantization import (
    NF4_BLOCK,
    SIXES,
    Fp8Weight,
    Int6Weight,
    Int8Weight,
    IntegerWeight,
    NF4Weight,
    QuantizedWeight,
    nf4_table,
)

MOST_SPLIT_BLOCKS = 1024
_LONGEST_TILE, _SHORTEST_TILE, _USUAL_TILE = 128, 16, 64


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A quantized matrix [N, K] repacked for the kernels; see above."""

    format: str
    """"nf4", "int4", "int6", "int8" or "fp8"."""
    words: Tensor
    """int32 [tiles, N, TILE · bits / 32]."""
    scales: Tensor
    """fp32 or fp16 [G, N], [tiles, N, TILE] where fine, [1, N] for a scale a row."""
    shape: tuple[int, int]
    tile: int
    group: int
    """Neighbours in a row that share a scale; 1 where fine, 0 for the whole row."""
    zero: int = 0
    """The code of INT4 or INT6 that means 0, if it is the same everywhere: 8 or 32, or 0 where there are minima."""
    zeros: Tensor | None = None
    """u8, of the shape of the scales, if it is not."""
    minima: Tensor | None = None
    """As the scales: what code 0 stands for, of integers in groups."""
    arrived: Tensor | None = None
    """int32 [MOST_SPLIT_BLOCKS], zeros: how many splits of a block of the result are done (`arrives_last`)."""


def tile_weight(weight: QuantizedWeight) -> TiledWeight:
    """Repack a weight on its own device."""
    tiled = _tiled(weight)
    return replace(tiled, arrived=torch.zeros(MOST_SPLIT_BLOCKS, dtype=torch.int32, device=tiled.words.device))


def _tiled(weight: QuantizedWeight) -> TiledWeight:
    if isinstance(weight, Fp8Weight):
        return _tiled_rows("fp8", weight.codes, weight.scales[None].contiguous())
    if isinstance(weight, Int8Weight) and weight.has_only_row_scales:
        return _tiled_rows("int8", weight.codes, weight.scales.t().contiguous())
    return _tiled_nf4(weight) if isinstance(weight, NF4Weight) else _tiled_integers(weight)


def _tiled_rows(format: str, codes: Tensor, scales: Tensor) -> TiledWeight:
    words = _words(codes.view(torch.uint8), format, _USUAL_TILE)
    return TiledWeight(format, words, scales, (codes.shape[0], codes.shape[1]), _USUAL_TILE, 0)


def _tiled_integers(weight: IntegerWeight) -> TiledWeight:
    tile, fine = _tile_of(weight.group)
    of_outputs = partial(_by_group, group=weight.group, tile=tile) if fine else _transposed
    scales, group = of_outputs(weight.scales), 1 if fine else weight.group
    if isinstance(weight, Int6Weight):
        words, zero = _words(weight.elements(), "int6", tile), SIXES if weight.zeros is None else 0
        zeros = None if weight.zeros is None else of_outputs(weight.zeros)
        return TiledWeight("int6", words, scales, weight.shape, tile, group, zero, zeros)
    minima = None if weight.minima is None else of_outputs(weight.minima)
    if isinstance(weight, Int8Weight):
        words = _words(weight.codes.view(torch.uint8), "int8", tile)
        return TiledWeight("int8", words, scales, weight.shape, tile, group, minima=minima)
    words = _words(weight.elements(), "int4", tile)
    zeros = None if weight.zeros is None or minima is not None else of_outputs(weight.zeros)
    zero = 8 if minima is None and zeros is None else 0
    return TiledWeight("int4", words, scales, weight.shape, tile, group, zero, zeros, minima)


def _tiled_nf4(weight: NF4Weight) -> TiledWeight:
    n, k = weight.shape
    group = gcd(k, NF4_BLOCK)
    tile, fine = _tile_of(group)
    words = _words(weight.elements(), "nf4", tile)
    starts = torch.arange(0, n * k, group, device=words.device)
    scales = weight.block_scales()[starts // NF4_BLOCK].view(n, -1)
    scales = _by_group(scales, group, tile) if fine else scales.t().contiguous()
    return TiledWeight("nf4", words, scales, weight.shape, tile, 1 if fine else group)


def _tile_of(group: int) -> tuple[int, bool]:
    """The tile for groups of this size, and whether each element of it has its own scale."""
    tile = gcd(group, _LONGEST_TILE)
    return (_USUAL_TILE, True) if tile < _SHORTEST_TILE else (tile, False)


def _words(codes: Tensor, format: str, tile: int) -> Tensor:
    """Pack u8 codes [N, K] as above."""
    if format == "int6":
        low, high = (_words(part, "int4", tile) for part in (codes & 15, codes >> 4))
        twos = torch.stack([(high >> 4 * code & 3) << 2 * code for code in range(8)]).sum(0, dtype=torch.int32)
        return torch.cat((low, twos.to(torch.int16).view(torch.int32)), dim=2)
    bits, shifts = _places(format)
    lanes = _lanes(tile * bits // 32)
    padded = F.pad(codes, (0, -codes.shape[1] % tile))
    parts = padded.view(len(codes), -1, tile * bits // 32 // lanes, 16 // bits, lanes, 2).permute(3, 5, 1, 0, 4, 2)
    words = torch.zeros(parts.shape[2:], dtype=torch.int32, device=codes.device)
    ours = torch.tensor(NF4_ORDER, device=codes.device).argsort().to(torch.int32)
    for i, b in product(range(16 // bits), range(2)):
        part = parts[i, b].to(torch.int32)
        words |= (ours[part] if format == "nf4" else part) << shifts[i][b]
    return words.flatten(2)


def tile_codes(weight: TiledWeight) -> Tensor:
    """The codes of a tiled weight, u8 [N, K]: what `tile_weight` was given."""
    n, k = weight.shape
    if weight.format == "int6":
        low, twos = weight.words.split([weight.tile // 8, weight.tile // 16], dim=2)
        wide = twos.contiguous().view(torch.int16).to(torch.int32)
        high = torch.stack([(wide >> 2 * code & 3) << 4 * code for code in range(8)]).sum(0, dtype=torch.int32)
        fours, twos = (tile_codes(replace(weight, format="int4", words=words)) for words in (low, high))
        return fours | twos << 4
    bits, shifts = _places(weight.format)
    words = weight.words.unflatten(2, (_lanes(weight.words.shape[2]), -1))
    codes = torch.tensor(
        NF4_ORDER if weight.format == "nf4" else range(1 << bits), dtype=torch.uint8, device=words.device
    )
    parts = [torch.stack([codes[words >> shift & (1 << bits) - 1] for shift in pair]) for pair in shifts]
    return torch.stack(parts).permute(3, 2, 5, 0, 4, 1).reshape(n, -1)[:, :k]


def _places(format: str) -> tuple[int, list[list[int]]]:
    """Bits of a code, and where the lowest of code (i, b) lies in a word."""
    if format == "nf4":
        return 4, [[8 * i, 8 * i + 4] for i in range(4)]
    bits = 4 if format == "int4" else 8
    return bits, [[bits * i, bits * i + 16] for i in range(16 // bits)]


def _lanes(words: int) -> int:
    """How many threads share the words of an output."""
    return min(4, words)


def _transposed(values: Tensor) -> Tensor:
    return values.t().contiguous()


def _by_group(values: Tensor, group: int, tile: int) -> Tensor:
    """Values [N, G] of groups to [tiles, N, TILE] of elements."""
    each = values.repeat_interleave(group, 1)
    return F.pad(each, (0, -each.shape[1] % tile)).view(len(each), -1, tile).transpose(0, 1).contiguous()


def codebook(weight: TiledWeight, dtype: torch.dtype | None) -> Tensor:
    """What `load_table` takes: values in `dtype`, or for None bytes; any tensor if the weight has none."""
    return _nf4_table(weight.words.device, dtype) if weight.format == "nf4" else weight.scales


@cache
def _nf4_table(device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """What our codes of NF4 stand for; or every second word of `nf4_bytes`, once for each of 4 threads."""
    if dtype is None:
        return torch.tensor(nf4_bytes()[::2], dtype=torch.int32, device=device).repeat_interleave(4)
    return nf4_table(device)[list(NF4_ORDER)].to(dtype)


@triton.jit
def load_table(p_table, FORMAT: tl.constexpr, WORDS: tl.constexpr):
    """The codebook as `tile_values` takes it, to be loaded once: 16 values, 4 words a lane, or nothing."""
    if FORMAT != "nf4":
        return 0
    elif p_table.dtype.element_ty == tl.int32:
        # Loaded, and by each thread its own: constants would be moved into registers again for every word.
        p_own = p_table + tl.arange(0, 4 if WORDS > 4 else WORDS)[None, :, None]
        return tl.load(p_own), tl.load(p_own + 4), tl.load(p_own + 8), tl.load(p_own + 12)
    else:
        return tl.load(p_table + tl.arange(0, 16))


@triton.jit
def tile_values(
    p_words, table, p_zeros, tile, o_n, m_n, num_outputs,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """The codes' values before scaling, [N, TILE] in DTYPE. IN_PAIRS: by `decoded_pairs`, which has bf16 alone."""
    LOW: tl.constexpr = WORDS // 3 * 2 if FORMAT == "int6" else WORDS
    LANES: tl.constexpr = 4 if LOW > 4 else LOW
    HALF: tl.constexpr = 2 if FORMAT == "int8" or FORMAT == "fp8" else 4
    TILE: tl.constexpr = 2 * HALF * LOW
    OUTPUTS: tl.constexpr = o_n.shape[0]
    p_tile = p_words + tl.cast(tile, tl.int64) * num_outputs * WORDS
    o_words = o_n[:, None] * WORDS + tl.arange(0, LOW)[None, :]
    b_words = tl.load(p_tile + o_words, mask=m_n[:, None], other=0, eviction_policy="evict_first")
    b_words = tl.reshape(b_words, [OUTPUTS, LANES, LOW // LANES])
    b_twos = b_words
    if FORMAT == "int6":
        o_twos = o_n[:, None] * (2 * WORDS) + tl.arange(0, LOW)[None, :]
        p_twos = (p_tile + LOW).to(tl.pointer_type(tl.int16)) + o_twos
        b_twos = tl.load(p_twos, mask=m_n[:, None], other=0, eviction_policy="evict_first").to(tl.int32)
        b_twos = tl.reshape(b_twos, [OUTPUTS, LANES, LOW // LANES])
    if p_zeros is None:
        b_zeros = tl.full([OUTPUTS, 1], ZERO, tl.int32)
    elif GROUP == 1:
        b_zeros = tl.load(p_zeros + element_offsets(tile, o_n, num_outputs, TILE), mask=m_n[:, None], other=0)
    else:
        p_group = p_zeros + tl.cast(tile * TILE // GROUP, tl.int64) * num_outputs
        b_zeros = tl.load(p_group + o_n, mask=m_n, other=0)[:, None]
    b_zeros = b_zeros.to(tl.int32)
    if IN_PAIRS:
        b_values = decoded_pairs(b_words, b_zeros, table, FORMAT)
    else:
        b_values = _values_one_by_one(b_words, b_twos, table, FORMAT, HALF)
    b_values = tl.reshape(tl.permute(b_values, (0, 2, 3, 1, 4)), [OUTPUTS, TILE])
    if (FORMAT == "int4" or FORMAT == "int6") and not IN_PAIRS:
        b_values -= b_zeros.to(tl.float32)
    return b_values.to(DTYPE)


@triton.jit
def _values_one_by_one(b_words, b_twos, table, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """What `decoded_pairs` returns, in any dtype but for INT4 and INT6 with zeros not yet subtracted."""
    o_i, o_b = tl.arange(0, HALF)[:, None], tl.arange(0, 2)[None, :]
    shifts = o_i * 8 + o_b * 4 if FORMAT == "nf4" else o_i * (16 // HALF) + o_b * 16
    b_codes = (b_words[:, :, :, None, None] >> shifts[None, None, None, :, :]) & ((1 << (16 // HALF)) - 1)
    if FORMAT == "nf4":
        # Its 16 values lie in 16 banks of shared memory: no two look-ups of a warp are in conflict.
        b_values = tl.reshape(tl.gather(table, tl.ravel(b_codes), 0), b_codes.shape)
    elif FORMAT == "int4":
        b_values = b_codes.to(tl.float32)
    elif FORMAT == "int6":
        o_twos = (o_i * 2 + o_b * 8)[None, None, None, :, :]
        b_values = (b_codes | ((b_twos[:, :, :, None, None] >> o_twos) & 3) << 4).to(tl.float32)
    elif FORMAT == "int8":
        b_values = ((b_codes ^ 128) - 128).to(tl.float32)
    else:
        # e4m3 placed into fp16 is the value / 256, below the smallest normal number too.
        b_bits = ((b_codes & 0x80) << 8) | ((b_codes & 0x7F) << 7)
        b_values = b_bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
    return b_values


@triton.jit
def element_offsets(tile, o_n, num_outputs, TILE: tl.constexpr):
    """Where the elements of a tile lie in [tiles, N, TILE], as [N, TILE]."""
    return (tl.cast(tile, tl.int64) * num_outputs + o_n)[:, None] * TILE + tl.arange(0, TILE)[None, :]


@triton.jit
def of_group(p_values, group, o_n, m_n, num_outputs):
    """The scales, or the minima, of one group of each output, fp32 [N]."""
    return tl.load(p_values + tl.cast(group, tl.int64) * num_outputs + o_n, mask=m_n, other=0.0).to(tl.float32)


@triton.jit
def scaled_tile(
    p_words, table, p_zeros, p_scales, p_minima, tile, o_n, m_n, num_outputs,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """The weights of a tile [N, TILE], scaled, fp32."""
    b_values = tile_values(
        p_words, table, p_zeros, tile, o_n, m_n, num_outputs, FORMAT, WORDS, GROUP, ZERO, tl.float32, False
    )
    TILE: tl.constexpr = b_values.shape[1]
    if GROUP == 1:
        o_scales = element_offsets(tile, o_n, num_outputs, TILE)
        b_values *= tl.load(p_scales + o_scales, mask=m_n[:, None], other=0.0).to(tl.float32)
        if p_minima is not None:
            b_values += tl.load(p_minima + o_scales, mask=m_n[:, None], other=0.0).to(tl.float32)
    else:
        group = tile * TILE // GROUP if GROUP > 1 else 0
        b_values *= of_group(p_scales, group, o_n, m_n, num_outputs)[:, None]
        if p_minima is not None:
            b_values += of_group(p_minima, group, o_n, m_n, num_outputs)[:, None]
    return b_values
