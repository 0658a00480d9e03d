"""Random numbers from a counter: Philox 4x32 with 10 rounds.

    words = philox(counter = (index // 4, position, choice, purpose), key = seed),   the number of index i: words[i % 4]

A draw depends on what it decides and on nothing else, so a request gets the same draws whatever the batch, and no
draw ever is in memory as a tensor: a kernel computes the four words that it needs where it needs them. Words are the
same on every device, exponentials up to the rounding of its logarithm.

    uniform      u = ⌊word / 2⁸⌋ / 2²⁴                 in [0, 1)
    exponential  e = −log(1 − (word + ½) / 2³²)       in [2⁻³³, 22.9]

Of the exponential the small draws decide, since a token of probability p wins when its e is about p. Hence all 32 bits:
with the 24 of a float's mantissa the draw would be a multiple of 6e-8, or 0. The logarithm of a number near 1 is a
series of its difference from 1, which loses no bits.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), https://doi.org/10.1145/2063384.2063405.
Legend: N rows, V numbers a row.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.common.triton_support import runs_triton
from kernels.sampling import _draws_cpu as in_c

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
# Words below this are draws below 2⁻⁴, for which six terms of the series are exact in fp32.
_SMALL_WORD = 1 << 28
_SMALL = tl.constexpr(_SMALL_WORD)
_BLOCK = 1024


class Purpose(IntEnum):
    """What a draw decides; draws of different purposes are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


class Stream(NamedTuple):
    """Whose draws they are, one row each, on the device that draws."""

    seeds: Tensor
    """[N] int64"""
    choices: Tensor
    """[N] int32: which of the choices that share a seed."""
    positions: Tensor
    """[N] int32: number of the output token."""


def philox_reference(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four words of 32 bits that belong to a counter under a key, by integers of any size."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        one, two = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = two >> 32 ^ c1 ^ k0, two & _WORD, one >> 32 ^ c3 ^ k1, one & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def words_reference(stream: Stream, count: int, purpose: int) -> Tensor:
    """The words 0 … count − 1 of each row, [N, count] int64, from `philox_reference`."""
    rows = []
    for seed, choice, position in zip(*(x.tolist() for x in stream), strict=True):
        key = seed & _WORD, seed >> 32 & _WORD
        blocks = [philox_reference((block, position, choice, purpose), key) for block in range(-(-count // 4))]
        rows.append([word for words in blocks for word in words][:count])
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), count)


@triton.jit
def philox_words(seed, choice, position, first, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """The words [BLOCK] uint32 of the indices first, first + 1, …; first is a multiple of 4."""
    o_block = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = o_block * 0
    b_0, b_1, b_2, b_3 = tl.philox(
        seed, o_block, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero + PURPOSE
    )
    return tl.interleave(tl.interleave(b_0, b_2), tl.interleave(b_1, b_3))


@triton.jit
def to_exponential(b_word):
    """Words of 32 bits → unit exponential draws, fp32, never 0 or infinite."""
    b_u = b_word.to(tl.float32) * 2.0**-32 + 2.0**-33
    b_rest = (b_word ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32 + 2.0**-33
    b_tail = 1.0 / 4 + b_u * (1.0 / 5 + b_u * (1.0 / 6))
    b_series = b_u * (1.0 + b_u * (1.0 / 2 + b_u * (1.0 / 3 + b_u * b_tail)))
    return tl.where(b_word < _SMALL, b_series, -tl.log(b_rest))


@triton.jit
def to_uniform(b_word):
    """Words of 32 bits → fp32 in [0, 1)."""
    return (b_word >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def draw_uniform(seed, choice, position, index, PURPOSE: tl.constexpr):
    """The uniform draw of one index."""
    b_word = philox_words(seed, choice, position, index // 4 * 4, PURPOSE, 4)
    return tl.sum(tl.where(tl.arange(0, 4) == index % 4, to_uniform(b_word), 0.0))


@triton.jit
def load_key(p_seeds, p_choices, p_positions, row):
    """(seed, choice, position) of a row."""
    return tl.load(p_seeds + row), tl.load(p_choices + row), tl.load(p_positions + row)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["p_seeds", "p_choices", "p_positions"])
def _fill_kernel(
    p_out, p_seeds, p_choices, p_positions, count, PURPOSE: tl.constexpr, EXPONENTIAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, block): BLOCK numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    seed, choice, position = load_key(p_seeds, p_choices, p_positions, row)
    first = tl.program_id(1) * BLOCK
    b_word = philox_words(seed, choice, position, first, PURPOSE, BLOCK)
    b_draw = to_exponential(b_word) if EXPONENTIAL else to_uniform(b_word)
    columns = first + tl.arange(0, BLOCK)
    tl.store(p_out + row * count + columns, b_draw, mask=columns < count)


def exponential(stream: Stream, count: int, purpose: int) -> Tensor:
    """Return draws of the unit exponential distribution, [N, count] fp32, for the indices 0 … count − 1 of each row."""
    if runs_triton(stream.seeds):
        return _fill(stream, count, purpose, is_exponential=True)
    words = _words(stream, count, purpose)
    is_small = words < _SMALL_WORD
    u = words.float().mul_(2.0**-32).add_(2.0**-33)
    series = u * (1 / 6)
    for divisor in (5, 4, 3, 2, 1):
        series.add_(1 / divisor).mul_(u)
    rest = words.bitwise_xor_(_WORD).float().mul_(2.0**-32).add_(2.0**-33)
    return torch.where(is_small, series, rest.log_().neg_())


def uniform(stream: Stream, count: int, purpose: int) -> Tensor:
    """Return draws in [0, 1), [N, count] fp32, for the indices 0 … count − 1 of each row."""
    if runs_triton(stream.seeds):
        return _fill(stream, count, purpose, is_exponential=False)
    return (_words(stream, count, purpose) >> 8).float().mul_(2.0**-24)


def _fill(stream: Stream, count: int, purpose: int, *, is_exponential: bool) -> Tensor:
    stream = check_stream(stream, len(stream.seeds))
    out = torch.empty(len(stream.seeds), count, dtype=torch.float32, device=stream.seeds.device)
    if out.numel():
        _fill_kernel[(len(out), triton.cdiv(count, _BLOCK))](
            out, *stream, count, PURPOSE=int(purpose), EXPONENTIAL=is_exponential, BLOCK=_BLOCK
        )
    return out


def check_stream(stream: Stream, num_rows: int) -> Stream:
    """Return the stream with contiguous rows; raise ValueError unless it is of integers and has `num_rows` rows."""
    if stream.seeds.dtype != torch.int64:
        raise ValueError(f"seeds must be int64, not {stream.seeds.dtype}")
    for name, x in stream._asdict().items():
        if x.dtype not in (torch.int32, torch.int64) or x.shape != (num_rows,):
            raise ValueError(f"{name} must be {num_rows} integers, not {x.dtype} of shape {tuple(x.shape)}")
    return Stream(*(x.contiguous() for x in stream))


def _words(stream: Stream, count: int, purpose: int) -> Tensor:
    """[N, count] int64. Products of two words wrap around in int64, but their bits are right."""
    if in_c.draws():
        return in_c.draw_words(stream, count, purpose)
    seeds, choices, positions = (x.long()[:, None] for x in stream)
    shape = len(seeds), -(-count // 4)
    starts = torch.arange(shape[1], device=seeds.device), positions, choices, torch.full_like(seeds, int(purpose))
    c0, c1, c2, c3 = (x.expand(shape).clone(memory_format=torch.contiguous_format) for x in starts)
    c2 &= _WORD
    k0, k1 = seeds & _WORD, seeds >> 32 & _WORD
    one, two = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(_ROUNDS):
        torch.mul(c0, _MULTIPLIERS[0], out=one)
        torch.mul(c2, _MULTIPLIERS[1], out=two)
        # c1 and c3 are whole products, whose upper halves are cut off here.
        torch.bitwise_right_shift(two, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD)
        torch.bitwise_right_shift(one, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, two, c3, one = two, c1, one, c3
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1).bitwise_and_(_WORD).flatten(1)[:, :count]
