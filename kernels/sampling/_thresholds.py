"""The least score that the filters of each row keep, found by all processors and without a sort.

    a pass:  16 pivots cut (low, high] into equal parts;  above each: how many tokens or how much mass;
             low ← the last pivot above which the limit lies,   high ← the first above which less does

Bounds are keys, the bits of scores ordered as integers, so 8 passes close in on one key from any two: 8 for top-k, then
8 for top-p, and a pass before them for the largest and the smallest score. Of bf16 scores the upper half of the bits
says all, and 4 passes do. Every pass is a launch in which a row is cut into blocks, one a program; the program that
arrives last adds the sums of the blocks up and moves the bounds. Cuts and orders of sums follow from the vocabulary
alone, so a row's threshold has the same bits in any batch. A row leaves a pass at once if it is greedy, does not ask
for the filter, or is down to one key; where no row asks for any, only the first pass is launched.

Source: radix selection, https://flashinfer.ai/2025/03/10/sampling.html (no sort).
Legend: N rows, V vocabulary, P blocks of a row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.arrival import arrives_last
from kernels.common.triton import tl, triton
from kernels.sampling import _race

LOG2_E = tl.constexpr(math.log2(math.e))
_INFINITE = tl.constexpr(0x7F800000)
MINUS_INFINITE = tl.constexpr(-0x7F800001)
LOWEST, HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
_PIVOT_BITS = 4
_IDLE_BITS = {torch.bfloat16: 16}
"""Lowest bits of a key that all scores of a dtype have in common, by sign."""


class Thresholds(NamedTuple):
    """What a row keeps, but for min-p; [N] each."""

    lows: Tensor
    """int32: keys above this are kept by top-k and top-p."""
    best: Tensor
    """fp32: the largest score, NaN if that is not finite or the row holds a NaN."""
    arrived: Tensor
    """int32 zeros: programs of a row that have arrived."""


@triton.jit
def key_of(b_x):
    """fp32 → int32 of the same order; −0 becomes +0."""
    b_bits = tl.where(b_x == 0, 0.0, b_x).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(b_key):
    """The inverse of `key_of`."""
    return (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_keys(p_row, columns, vocabulary):
    """The keys of a block of scores; columns beyond the row have the lowest."""
    b_x = tl.load(p_row + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)
    # A row with a NaN must show it in its maximum.
    b_key = tl.where(b_x != b_x, _INFINITE, key_of(b_x))
    return tl.where(columns < vocabulary, b_key, LOWEST)


@triton.jit
def least_kept(p_lows, p_min_p, row, best, temperature):
    """The least key that a row keeps: of a greedy one its best."""
    least = tl.load(p_lows + row) + 1
    min_p = tl.load(p_min_p + row).to(tl.float32)
    if min_p > 0:
        least = tl.maximum(least, key_of(best + temperature * tl.log(min_p)))
    return tl.where(temperature > 0, least, key_of(best))


@triton.jit(do_not_specialize_on_alignment=["p_largest", "p_smallest", "p_lows", "p_highs", "p_best", "p_arrived"])
def _extremes_kernel(
    p_logits, p_largest, p_smallest, p_lows, p_highs, p_best, p_arrived, row_stride, vocabulary,
    IDLE_BITS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): the best score of a row, and as its low what lies below all that are not −inf."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b_key = load_keys(p_logits + row * row_stride, part * BLOCK + tl.arange(0, BLOCK), vocabulary)
    tl.store(p_largest + row * parts + part, tl.max(b_key, axis=0))
    tl.store(p_smallest + row * parts + part, tl.min(tl.where(b_key > MINUS_INFINITE, b_key, HIGHEST), axis=0))
    if arrives_last(p_arrived, row, parts):
        o_part = tl.arange(0, LANES)
        m_part = o_part < parts
        b_largest = tl.load(p_largest + row * parts + o_part, m_part, other=LOWEST, cache_modifier=".cg")
        b_smallest = tl.load(p_smallest + row * parts + o_part, m_part, other=HIGHEST, cache_modifier=".cg")
        largest = tl.max(b_largest, axis=0)
        is_finite = (largest > MINUS_INFINITE) & (largest < _INFINITE)
        tl.store(p_best + row, tl.where(is_finite, score_of(largest), float("nan")))
        low = ((tl.min(b_smallest, axis=0) >> IDLE_BITS) << IDLE_BITS) - 1
        tl.store(p_lows + row, low)
        # One key apart, as the passes leave them: only a first pass opens the bounds.
        tl.store(p_highs + row, low + (1 << IDLE_BITS))


@triton.jit
def _add_parts(p_sums, row, parts, LANES: tl.constexpr, PIVOTS: tl.constexpr):
    """The sums of a row above each pivot, from those of its blocks."""
    o_part, o_pivot = tl.arange(0, LANES), tl.arange(0, PIVOTS)
    p_part = p_sums + (row * parts + o_part[:, None]) * PIVOTS + o_pivot[None, :]
    return tl.sum(tl.load(p_part, mask=o_part[:, None] < parts, other=0.0, cache_modifier=".cg"), axis=0)


@triton.jit(
    do_not_specialize=["is_first"],
    do_not_specialize_on_alignment=["p_temperature", "p_asked", "p_lows", "p_highs", "p_limits", "p_best", "p_arrived"],
)
def _narrow_kernel(
    p_logits, p_temperature, p_asked, p_lows, p_highs, p_limits, p_best, p_arrived, p_sums,
    row_stride, vocabulary, is_first,
    BY_MASS: tl.constexpr, IDLE_BITS: tl.constexpr, PIVOT_BITS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): towards the smallest key above which less than a limit lies, in tokens or in mass.

    p_asked is top-k or top-p. A mass is relative to all that lies above `low` in the first pass. In all bounds the idle
    bits are 1.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, best = tl.load(p_temperature + row).to(tl.float32), tl.load(p_best + row)
    asked = tl.load(p_asked + row).to(tl.float32)
    is_asked = (temperature > 0) & (best == best)
    is_asked &= (asked < 1) if BY_MASS else ((asked > 0) & (asked < vocabulary))
    low, high = tl.load(p_lows + row), key_of(best) | ((1 << IDLE_BITS) - 1)
    if is_first == 0:
        high = tl.load(p_highs + row)
    if is_asked & (low + (1 << IDLE_BITS) < high):
        PIVOTS: tl.constexpr = 1 << PIVOT_BITS
        num_keys = (high.to(tl.int64) - low) >> IDLE_BITS
        b_step = (num_keys * tl.arange(0, PIVOTS) >> PIVOT_BITS) << IDLE_BITS
        b_pivot = (low + b_step).to(tl.int32)
        b_key = load_keys(p_logits + row * row_stride, part * BLOCK + tl.arange(0, BLOCK), vocabulary)
        b_weight = tl.full([BLOCK], 1.0, tl.float32)
        if BY_MASS:
            b_weight = tl.where(b_key > LOWEST, tl.exp2((score_of(b_key) - best) * (LOG2_E / temperature)), 0.0)
        b_above = tl.sum(tl.where(b_key[None, :] > b_pivot[:, None], b_weight[None, :], 0.0), axis=1)
        tl.store(p_sums + (row * parts + part) * PIVOTS + tl.arange(0, PIVOTS), b_above)
        if arrives_last(p_arrived, row, parts):
            b_sum = _add_parts(p_sums, row, parts, LANES, PIVOTS)
            limit = asked
            if BY_MASS:
                # The first pivot is `low` itself.
                limit = asked * tl.max(b_sum, axis=0)
                if is_first == 0:
                    limit = tl.load(p_limits + row)
                tl.store(p_limits + row, limit)
            tl.store(p_lows + row, tl.max(tl.where(b_sum < limit, low, b_pivot), axis=0))
            tl.store(p_highs + row, tl.min(tl.where(b_sum < limit, b_pivot, high), axis=0))


def find_thresholds(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *, cuts: bool = True
) -> Thresholds:
    """Return what each row of logits [N, V] keeps, N ≥ 1; the rest [N] each.

    17 launches, 9 for bf16, whatever the values; one if the host knows that no row asks for top-k or top-p (`cuts`).
    """
    (rows, vocabulary), device = logits.shape, logits.device
    parts, idle_bits = _race.num_blocks(vocabulary), _IDLE_BITS.get(logits.dtype, 0)
    shapes = {"LANES": _race.num_lanes(vocabulary), "BLOCK": _race.block_size(vocabulary), "num_warps": _race.WARPS}
    found = Thresholds(
        torch.empty(rows, dtype=torch.int32, device=device), torch.empty(rows, dtype=torch.float32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )  # fmt: skip
    largest, smallest = torch.empty(2, rows, parts, dtype=torch.int32, device=device)
    highs, limits = torch.empty_like(found.lows), torch.empty_like(found.best)
    _extremes_kernel[(rows, parts)](
        logits, largest, smallest, found.lows, highs, found.best, found.arrived, logits.stride(0), vocabulary,
        IDLE_BITS=idle_bits, **shapes,
    )  # fmt: skip
    if not cuts:
        return found
    sums = torch.empty(rows, parts, 1 << _PIVOT_BITS, dtype=torch.float32, device=device)
    for asked, by_mass in ((top_k, False), (top_p, True)):
        for number in range((32 - idle_bits) // _PIVOT_BITS):
            _narrow_kernel[(rows, parts)](
                logits, temperature, asked, found.lows, highs, limits, found.best, found.arrived, sums,
                logits.stride(0), vocabulary, int(number == 0),
                BY_MASS=by_mass, IDLE_BITS=idle_bits, PIVOT_BITS=_PIVOT_BITS, **shapes,
            )  # fmt: skip
    return found
