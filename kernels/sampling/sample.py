"""From logits to tokens: adjusted distributions, and sampling from them.

    p = softmax(keep(logits) / temperature),   token = argmax(p / e),   e by kernels/sampling/random.py

All filters keep the tokens from some score on, so they come down to a threshold a row. On CUDA it is found without
sorting, between two scores of the row that close in on it. A pass over the row weighs what lies above two pivots, one
halfway between the scores and one halfway between their bit patterns: the first is quick, the second needs 31 passes
at worst; and each bound moves on to the next score that occurs, so few passes are needed. Nothing is read by the host.

Source: https://flashinfer.ai/2025/03/10/sampling.html (no sort).
Legend: N rows, V vocabulary, K most probable tokens; key: a score's bits, ordered as an integer.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.rows import blocks_of_rows
from kernels.common.triton_support import check_rows, runs_triton
from kernels.sampling import _draws_cpu as in_c
from kernels.sampling import _race
from kernels.sampling.random import Purpose, Stream, check_stream, exponential, load_key, philox_words, to_exponential

# Sorting a vocabulary of 49,152 costs 20 to 40 times as much as finding its 256 largest; few distributions need more.
_FIRST_CANDIDATES = 256
_SEARCH_BLOCK = 4096
_WRITE_BLOCK = 1024
_LOG2_E = tl.constexpr(math.log2(math.e))
_INFINITE = tl.constexpr(0x7F800000)
_MINUS_INFINITE = tl.constexpr(-0x7F800001)
_LOWEST, _HIGHEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


class Filters(NamedTuple):
    """How each row is sampled, [N] each, on the device of the logits."""

    temperature: Tensor
    """fp32; 0 takes the first maximum."""
    top_k: Tensor
    """int32 or int64; 0 is off."""
    top_p: Tensor
    """fp32; 1 is off."""
    min_p: Tensor
    """fp32; 0 is off."""


def adjusted_probabilities_reference(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """`adjusted_probabilities` in its plainest form: row by row, by sorting."""
    rows = []
    for row, t, k, p, m in zip(logits.float(), temperature, top_k, top_p, min_p, strict=True):
        if t == 0:
            rows.append(torch.zeros_like(row).scatter_(0, row.argmax(keepdim=True), 1))
            continue
        probabilities = torch.softmax(row / t, dim=-1)
        if k > 0:
            least = probabilities.sort(descending=True).values[min(int(k), len(row)) - 1]
            probabilities[probabilities < least] = 0
            probabilities /= probabilities.sum()
        if p < 1:
            ordered = probabilities.sort(descending=True).values
            more_probable = ordered.cumsum(0) - ordered
            least = ordered[max(int((more_probable < p).sum()), 1) - 1]
            probabilities[probabilities < least] = 0
            probabilities /= probabilities.sum()
        probabilities[probabilities < m * probabilities.max()] = 0
        rows.append(probabilities / probabilities.sum())
    return torch.stack(rows)


@triton.jit
def _key_of(b_x):
    """fp32 → int32 of the same order; −0 becomes +0."""
    b_bits = tl.where(b_x == 0, 0.0, b_x).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(b_key):
    """The inverse of `_key_of`."""
    return (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_keys(p_row, columns, vocabulary):
    """The keys of a block of scores; columns beyond the row have the lowest."""
    b_x = tl.load(p_row + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)
    # A row with a NaN must show it in its maximum.
    b_key = tl.where(b_x != b_x, _INFINITE, _key_of(b_x))
    return tl.where(columns < vocabulary, b_key, _LOWEST)


@triton.jit
def _extremes(p_row, vocabulary, BLOCK: tl.constexpr):
    """The largest key, and the smallest of a score that is not −inf."""
    b_largest = tl.full([BLOCK], _LOWEST, tl.int32)
    b_smallest = tl.full([BLOCK], _HIGHEST, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        b_key = _load_keys(p_row, first + tl.arange(0, BLOCK), vocabulary)
        b_largest = tl.maximum(b_largest, b_key)
        b_smallest = tl.minimum(b_smallest, tl.where(b_key > _MINUS_INFINITE, b_key, _HIGHEST))
    return tl.max(b_largest, axis=0), tl.min(b_smallest, axis=0)


@triton.jit
def _mass(p_row, vocabulary, threshold, best, scale, BLOCK: tl.constexpr):
    """The sum of exp((score − best) / temperature) over the keys from the threshold on."""
    b_mass = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, vocabulary, BLOCK):
        b_key = _load_keys(p_row, first + tl.arange(0, BLOCK), vocabulary)
        b_mass += tl.where(b_key >= threshold, tl.exp2((_score_of(b_key) - best) * scale), 0.0)
    return tl.sum(b_mass, axis=0)


@triton.jit
def _weigh(b_key, b_weight, pivot, b_above, b_next, b_last):
    """Add a block to: the weight above the pivot, the smallest key above it, the largest key up to it."""
    m_above = b_key > pivot
    b_above += tl.where(m_above, b_weight, 0.0)
    b_next = tl.minimum(b_next, tl.where(m_above, b_key, _HIGHEST))
    b_last = tl.maximum(b_last, tl.where(m_above, _LOWEST, b_key))
    return b_above, b_next, b_last


@triton.jit
def _narrow(low, high, b_above, b_next, b_last, limit):
    """Move one bound past the pivot, and on to the next key that occurs."""
    is_kept = tl.sum(b_above, axis=0) < limit
    high = tl.where(is_kept, tl.minimum(high, tl.max(b_last, axis=0)), high)
    low = tl.where(is_kept, low, tl.maximum(low, tl.min(b_next, axis=0) - 1))
    return low, high


@triton.jit
def _search(p_row, vocabulary, low, high, limit, best, scale, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key in (low, high] above which less than `limit` lies, in tokens or in mass; `high` occurs."""
    while low + 1 < high:
        middle = _key_of(0.5 * _score_of(low) + 0.5 * _score_of(high))
        one = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        two = (low >> 1) + (high >> 1) + (low & high & 1)
        b_above_1, b_above_2 = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
        b_next_1, b_next_2 = tl.full([BLOCK], _HIGHEST, tl.int32), tl.full([BLOCK], _HIGHEST, tl.int32)
        b_last_1, b_last_2 = tl.full([BLOCK], _LOWEST, tl.int32), tl.full([BLOCK], _LOWEST, tl.int32)
        for first in range(0, vocabulary, BLOCK):
            b_key = _load_keys(p_row, first + tl.arange(0, BLOCK), vocabulary)
            b_weight = tl.full([BLOCK], 1.0, tl.float32)
            if BY_MASS:
                b_weight = tl.where(b_key > _LOWEST, tl.exp2((_score_of(b_key) - best) * scale), 0.0)
            b_above_1, b_next_1, b_last_1 = _weigh(b_key, b_weight, one, b_above_1, b_next_1, b_last_1)
            b_above_2, b_next_2, b_last_2 = _weigh(b_key, b_weight, two, b_above_2, b_next_2, b_last_2)
        low, high = _narrow(low, high, b_above_1, b_next_1, b_last_1, limit)
        low, high = _narrow(low, high, b_above_2, b_next_2, b_last_2, limit)
    return high


@triton.jit
def _threshold_kernel(
    p_logits, p_temperature, p_top_k, p_top_p, p_min_p, p_threshold, p_best, p_total, p_first, p_arrived,
    row_stride, vocabulary, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the key of its least kept score and its best score, NaN if that is not finite.

    With NORMALIZE also the mass that is kept, and the index of the first maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * row_stride
    high, smallest = _extremes(p_row, vocabulary, BLOCK)
    is_finite = (high > _MINUS_INFINITE) & (high < _INFINITE)
    best = _score_of(high)
    temperature = tl.load(p_temperature + row).to(tl.float32)
    scale = _LOG2_E / tl.where(temperature > 0, temperature, 1.0)
    threshold = high
    if is_finite & (temperature > 0):
        top_k, top_p = tl.load(p_top_k + row).to(tl.int32), tl.load(p_top_p + row).to(tl.float32)
        min_p = tl.load(p_min_p + row).to(tl.float32)
        threshold = smallest
        if (top_k > 0) & (top_k < vocabulary):
            threshold = _search(
                p_row, vocabulary, smallest - 1, high, top_k.to(tl.float32), best, scale, BY_MASS=False, BLOCK=BLOCK
            )
        if top_p < 1:
            limit = top_p * _mass(p_row, vocabulary, threshold, best, scale, BLOCK)
            threshold = _search(p_row, vocabulary, threshold - 1, high, limit, best, scale, BY_MASS=True, BLOCK=BLOCK)
        if min_p > 0:
            threshold = tl.maximum(threshold, _key_of(best + temperature * tl.log(min_p)))
    tl.store(p_threshold + row, threshold)
    tl.store(p_best + row, tl.where(is_finite, best, float("nan")))
    if p_arrived is not None:
        tl.store(p_arrived + row, 0)
    if NORMALIZE:
        tl.store(p_total + row, _mass(p_row, vocabulary, threshold, best, scale, BLOCK))
        b_first = tl.full([BLOCK], _HIGHEST, tl.int32)
        for first in range(0, vocabulary, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            m_best = _load_keys(p_row, columns, vocabulary) == high
            b_first = tl.minimum(b_first, tl.where(m_best, columns, _HIGHEST))
        tl.store(p_first + row, tl.min(b_first, axis=0))


@triton.jit
def _probabilities_kernel(
    p_logits, p_temperature, p_threshold, p_best, p_total, p_first, p_out, row_stride, vocabulary, BLOCK: tl.constexpr
):
    """Program (row, block): a block of the distribution."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(p_temperature + row).to(tl.float32)
    best = tl.load(p_best + row)
    if temperature > 0:
        b_key = _load_keys(p_logits + row * row_stride, columns, vocabulary)
        b_p = tl.exp2((_score_of(b_key) - best) * (_LOG2_E / temperature)) / tl.load(p_total + row)
        b_p = tl.where(b_key >= tl.load(p_threshold + row), b_p, 0.0)
    else:
        b_p = tl.where(columns == tl.load(p_first + row), 1.0, 0.0)
    # The best score of a row is a number or NaN, and NaN makes the row NaN.
    tl.store(p_out + row * vocabulary + columns, b_p + (best - best), mask=columns < vocabulary)


@triton.jit
def _race_kernel(
    p_logits, p_temperature, p_threshold, p_best, p_seeds, p_choices, p_positions,
    p_values, p_indices, p_arrived, p_tokens, row_stride, vocabulary,
    PURPOSE: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, split): every SPLITS-th block of a row; the last to arrive stores the token."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_row = p_logits + row * row_stride
    temperature = tl.load(p_temperature + row).to(tl.float32)
    threshold, best = tl.load(p_threshold + row), tl.load(p_best + row)
    seed, choice, position = load_key(p_seeds, p_choices, p_positions, row)
    scale = _LOG2_E / tl.where(temperature > 0, temperature, 1.0)
    b_best, b_index = _race.start(BLOCK)
    for first in range(split * BLOCK, vocabulary, SPLITS * BLOCK):
        columns = first + tl.arange(0, BLOCK)
        b_key = _load_keys(p_row, columns, vocabulary)
        b_value = tl.exp2((_score_of(b_key) - best) * scale)
        if temperature > 0:
            b_value = b_value / to_exponential(philox_words(seed, choice, position, first, PURPOSE, BLOCK))
        b_value = tl.where((b_key >= threshold) & (b_key > _MINUS_INFINITE), b_value, float("-inf"))
        b_best, b_index = _race.advance(b_best, b_index, b_value, columns)
    is_last, token = _race.finish(
        p_values, p_indices, p_arrived, row, split, b_best, b_index, SPLITS=SPLITS, LANES=LANES
    )
    if is_last:
        tl.store(p_tokens + row, tl.where(best == best, token, -1))


def adjusted_probabilities(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return the distribution that a request samples from, [N, V] fp32, each row summing to 1.

    logits [N, V]. In this order: temperature, top-k (0 = off), top-p (1 = off), min-p (0 = off), each given per row,
    [N]. Of tokens as probable as the last one kept all are kept. A row of temperature 0 is one-hot at its first
    maximum. On CUDA nothing is read by the host, and a row whose largest logit is not finite, or that holds a NaN, is
    NaN.
    """
    if runs_triton(logits):
        return _launch_probabilities(logits, Filters(temperature, top_k, top_p, min_p))
    greedy = temperature == 0
    scores = logits.float() / torch.where(greedy, 1, temperature)[:, None]
    # A filter touches only the rows that ask for it: the others must not depend on their company.
    for keep, limits, asked in (
        (_keep_top_k, top_k, top_k > 0),
        (_keep_top_p, top_p, top_p < 1),
        (_keep_min_p, min_p, min_p > 0),
    ):
        rows = (asked & ~greedy).nonzero()[:, 0]
        if len(rows):
            scores[rows] = keep(scores[rows], limits[rows])
    probabilities = torch.softmax(scores, dim=-1)
    if bool(greedy.any()):
        probabilities[greedy] = 0
        probabilities[greedy, logits[greedy].argmax(dim=-1)] = 1
    return probabilities


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """Set the scores of dropped tokens to −inf, in place; so do the other filters."""
    top_k = top_k.clamp(max=scores.shape[-1]).long()
    largest = scores.topk(int(top_k.max()), dim=-1).values
    return scores.masked_fill_(scores < largest.gather(1, top_k[:, None] - 1), -math.inf)


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    probabilities = torch.softmax(scores, dim=-1)
    if not scores.is_cuda and in_c.draws():
        return scores.masked_fill_(scores < in_c.least_kept(scores, probabilities, top_p), -math.inf)
    num_candidates, vocabulary = _FIRST_CANDIDATES, scores.shape[-1]
    while True:
        num_candidates = min(num_candidates, vocabulary)
        largest = probabilities.topk(num_candidates, dim=-1).values
        kept = (largest.cumsum(dim=-1) - largest < top_p[:, None]).sum(dim=-1, keepdim=True).clamp_(min=1)
        if num_candidates == vocabulary or int(kept.max()) < num_candidates:
            return scores.masked_fill_(probabilities < largest.gather(1, kept - 1), -math.inf)
        num_candidates *= 16


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    return scores.masked_fill_(scores < scores.amax(dim=-1, keepdim=True) + min_p[:, None].log(), -math.inf)


def sample_tokens(logits: Tensor, filters: Filters, stream: Stream, *, purpose: int = Purpose.TARGET) -> Tensor:
    """Draw one token a row, [N] int64, from `adjusted_probabilities` of logits [N, V].

    The draw is the stream's own, so a row's token does not depend on the other rows. A row whose largest logit is not
    finite, or that holds a NaN, gets the token −1. On CUDA this takes two kernels and the host reads nothing.
    """
    if runs_triton(logits):
        return _launch_race(logits, filters, stream, int(purpose))
    # fp32 first, because a CPU compares fp32 several times faster than bf16.
    scores = logits.float()
    tokens = scores.argmax(dim=-1)
    best = scores.gather(1, tokens[:, None])[:, 0]
    for rows in blocks_of_rows(filters.temperature > 0, logits.shape[1]):
        probabilities = adjusted_probabilities(scores[rows], **{name: x[rows] for name, x in filters._asdict().items()})
        tokens[rows] = race(probabilities, Stream(*(x[rows] for x in stream)), purpose)
    return torch.where(best.isfinite(), tokens, -1)


def race(probabilities: Tensor, stream: Stream, purpose: int) -> Tensor:
    """Draw one token a row, [N] int64, from probabilities [N, V] fp32, by the stream's own draws.

    A row without a number above 0 gets any token.
    """
    if not runs_triton(probabilities) and in_c.draws():
        return in_c.race(probabilities, stream, purpose)
    return sample(probabilities, exponential(stream, probabilities.shape[1], purpose))


def sample(probabilities: Tensor, exponential: Tensor) -> Tensor:
    """Draw one token a row, [N] int64, from probabilities [N, V] by an exponential race.

    `exponential` [N, V] holds independent draws of the unit exponential distribution; argmax(p / e) has the
    distribution p.
    """
    # A draw of exactly 0 must not turn the quotient of an impossible token into NaN.
    return (probabilities / exponential.clamp_min(torch.finfo(torch.float32).tiny)).argmax(dim=-1)


def _check(logits: Tensor, filters: Filters) -> Filters:
    check_rows(logits=logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be rows over a vocabulary, not of shape {tuple(logits.shape)}")
    for name, x in filters._asdict().items():
        if x.shape != logits.shape[:1]:
            raise ValueError(f"{name} must have one value a row, {len(logits)}, not the shape {tuple(x.shape)}")
    return Filters(*(x.contiguous() for x in filters))


def _find_thresholds(
    logits: Tensor, filters: Filters, *, totals: Tensor | None = None, firsts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys of the least kept scores, best scores and zeros, [N] each; fill totals and firsts if given."""
    rows, vocabulary = logits.shape
    thresholds, arrived = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = max(16, min(_SEARCH_BLOCK, triton.next_power_of_2(vocabulary)))
    _threshold_kernel[(rows,)](
        logits, *filters, thresholds, best, totals, firsts, arrived, logits.stride(0), vocabulary,
        NORMALIZE=totals is not None, BLOCK=block, num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return thresholds, best, arrived


def _launch_probabilities(logits: Tensor, filters: Filters) -> Tensor:
    filters = _check(logits, filters)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        firsts = torch.empty_like(totals, dtype=torch.int32)
        thresholds, best, _ = _find_thresholds(logits, filters, totals=totals, firsts=firsts)
        _probabilities_kernel[(len(logits), triton.cdiv(logits.shape[1], _WRITE_BLOCK))](
            logits, filters.temperature, thresholds, best, totals, firsts, out,
            logits.stride(0), logits.shape[1], BLOCK=_WRITE_BLOCK,
        )  # fmt: skip
    return out


def _launch_race(logits: Tensor, filters: Filters, stream: Stream, purpose: int) -> Tensor:
    filters, stream = _check(logits, filters), check_stream(stream, len(logits))
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        thresholds, best, arrived = _find_thresholds(logits, filters)
        splits = _race.num_splits(rows, vocabulary, logits.device)
        _race_kernel[(rows, splits)](
            logits, filters.temperature, thresholds, best, *stream,
            *_race.partial_results(rows, splits, logits.device), arrived, tokens, logits.stride(0), vocabulary,
            PURPOSE=purpose, SPLITS=splits, LANES=triton.next_power_of_2(splits),
            BLOCK=_race.block_size(vocabulary), num_warps=_race.WARPS,
        )  # fmt: skip
    return tokens
