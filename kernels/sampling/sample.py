"""From logits to tokens: adjusted distributions, and sampling from them.

    p = softmax(keep(logits) / temperature),   token = argmax(p / e),   e by kernels/sampling/random.py

All filters keep the tokens from some score on, so they come down to a threshold a row. On CUDA `_thresholds.py` finds
it without sorting, and a race over what it keeps gives the token. Nothing is read by the host.

Legend: N rows, V vocabulary, K most probable tokens; key: a score's bits, ordered as an integer.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.rows import blocks_of_rows
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, runs_triton
from kernels.sampling import _draws_cpu as in_c
from kernels.sampling import _race
from kernels.sampling._thresholds import (
    HIGHEST,
    LOG2_E,
    MINUS_INFINITE,
    find_thresholds,
    key_of,
    least_kept,
    load_keys,
    score_of,
)
from kernels.sampling.random import Purpose, Stream, check_stream, exponential, load_key, philox_words, to_exponential

# Sorting a vocabulary of 49,152 costs 20 to 40 times as much as finding its 256 largest; few distributions need more.
_FIRST_CANDIDATES = 256


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


@triton.jit(do_not_specialize_on_alignment=["p_temperature", "p_min_p", "p_lows", "p_best", "p_masses", "p_firsts"])
def _kept_mass_kernel(
    p_logits, p_temperature, p_min_p, p_lows, p_best, p_masses, p_firsts, row_stride, vocabulary, BLOCK: tl.constexpr
):
    """Program (row, block): Σ exp((score − best) / temperature) over what is kept, and where the best is first."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, best = tl.load(p_temperature + row).to(tl.float32), tl.load(p_best + row)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    b_key = load_keys(p_logits + row * row_stride, columns, vocabulary)
    scale = LOG2_E / tl.where(temperature > 0, temperature, 1.0)
    m_kept = b_key >= least_kept(p_lows, p_min_p, row, best, temperature)
    b_mass = tl.where(m_kept, tl.exp2((score_of(b_key) - best) * scale), 0.0)
    tl.store(p_masses + row * parts + part, tl.sum(b_mass, axis=0))
    tl.store(p_firsts + row * parts + part, tl.min(tl.where(b_key == key_of(best), columns, HIGHEST), axis=0))


@triton.jit(do_not_specialize_on_alignment=["p_temperature", "p_min_p", "p_lows", "p_best", "p_masses", "p_firsts"])
def _probabilities_kernel(
    p_logits, p_temperature, p_min_p, p_lows, p_best, p_masses, p_firsts, p_out, row_stride, vocabulary,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): a block of the distribution."""
    row, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_part = tl.arange(0, LANES)
    temperature, best = tl.load(p_temperature + row).to(tl.float32), tl.load(p_best + row)
    if temperature > 0:
        total = tl.sum(tl.load(p_masses + row * parts + o_part, mask=o_part < parts, other=0.0), axis=0)
        b_key = load_keys(p_logits + row * row_stride, columns, vocabulary)
        b_p = tl.exp2((score_of(b_key) - best) * (LOG2_E / temperature)) / total
        b_p = tl.where(b_key >= least_kept(p_lows, p_min_p, row, best, temperature), b_p, 0.0)
    else:
        b_first = tl.load(p_firsts + row * parts + o_part, mask=o_part < parts, other=HIGHEST)
        b_p = tl.where(columns == tl.min(b_first, axis=0), 1.0, 0.0)
    # The best score of a row is a number or NaN, and NaN makes the row NaN.
    tl.store(p_out + row * vocabulary + columns, b_p + (best - best), mask=columns < vocabulary)


@triton.jit(
    do_not_specialize_on_alignment=[
        "p_temperature", "p_min_p", "p_lows", "p_best", "p_seeds", "p_choices", "p_positions",
        "p_values", "p_indices", "p_arrived", "p_tokens",
    ]
)  # fmt: skip
def _race_kernel(
    p_logits, p_temperature, p_min_p, p_lows, p_best, p_seeds, p_choices, p_positions,
    p_values, p_indices, p_arrived, p_tokens, row_stride, vocabulary,
    PURPOSE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, split): every so many blocks of a row; the last to arrive stores the token."""
    row, splits = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    p_row = p_logits + row * row_stride
    temperature, best = tl.load(p_temperature + row).to(tl.float32), tl.load(p_best + row)
    threshold = least_kept(p_lows, p_min_p, row, best, temperature)
    seed, choice, position = load_key(p_seeds, p_choices, p_positions, row)
    scale = LOG2_E / tl.where(temperature > 0, temperature, 1.0)
    b_best, b_index = _race.start(BLOCK)
    for first in range(tl.program_id(1) * BLOCK, vocabulary, splits * BLOCK):
        columns = first + tl.arange(0, BLOCK)
        b_key = load_keys(p_row, columns, vocabulary)
        b_value = tl.exp2((score_of(b_key) - best) * scale)
        if temperature > 0:
            b_value = b_value / to_exponential(philox_words(seed, choice, position, first, PURPOSE, BLOCK))
        b_value = tl.where((b_key >= threshold) & (b_key > MINUS_INFINITE), b_value, float("-inf"))
        b_best, b_index = _race.advance(b_best, b_index, b_value, columns)
    is_last, token = _race.finish(p_values, p_indices, p_arrived, row, b_best, b_index, LANES)
    if is_last:
        tl.store(p_tokens + row, tl.where(best == best, token, -1))


@triton.jit(
    do_not_specialize_on_alignment=[
        "p_seeds", "p_choices", "p_positions", "p_values", "p_indices", "p_arrived", "p_tokens",
    ]
)  # fmt: skip
def _draw_kernel(
    p_probabilities, p_seeds, p_choices, p_positions, p_values, p_indices, p_arrived, p_tokens, row_stride, vocabulary,
    PURPOSE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, split): as `_race_kernel`, over a distribution."""
    row, splits = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    seed, choice, position = load_key(p_seeds, p_choices, p_positions, row)
    b_best, b_index = _race.start(BLOCK)
    for first in range(tl.program_id(1) * BLOCK, vocabulary, splits * BLOCK):
        columns = first + tl.arange(0, BLOCK)
        b_p = tl.load(p_probabilities + row * row_stride + columns, mask=columns < vocabulary, other=float("-inf"))
        b_value = b_p / to_exponential(philox_words(seed, choice, position, first, PURPOSE, BLOCK))
        b_best, b_index = _race.advance(b_best, b_index, b_value, columns)
    is_last, token = _race.finish(p_values, p_indices, p_arrived, row, b_best, b_index, LANES)
    if is_last:
        tl.store(p_tokens + row, token)


def adjusted_probabilities(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, cuts: bool = True
) -> Tensor:
    """Return the distribution that a request samples from, [N, V] fp32, each row summing to 1.

    logits [N, V]. In this order: temperature, top-k (0 = off), top-p (1 = off), min-p (0 = off), each given per row,
    [N]. Of tokens as probable as the last one kept all are kept. A row of temperature 0 is one-hot at its first
    maximum. On CUDA nothing is read by the host, and a row whose largest logit is not finite, or that holds a NaN, is
    NaN; `cuts=False`, where no row asks for top-k or top-p, saves their launches.
    """
    if runs_triton(logits):
        return _launch_probabilities(logits, Filters(temperature, top_k, top_p, min_p), cuts=cuts)
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


def sample_tokens(
    logits: Tensor, filters: Filters, stream: Stream, *, purpose: int = Purpose.TARGET, cuts: bool = True
) -> Tensor:
    """Draw one token a row, [N] int64, from `adjusted_probabilities` of logits [N, V].

    The draw is the stream's own, so a row's token does not depend on the other rows. A row whose largest logit is not
    finite, or that holds a NaN, gets the token −1. On CUDA launches follow from the shapes and the host reads nothing;
    `cuts=False`, where no row asks for top-k or top-p, saves theirs.
    """
    if runs_triton(logits):
        return _launch_race(logits, filters, stream, int(purpose), cuts=cuts)
    tokens = best_tokens(logits)
    for rows in blocks_of_rows(filters.temperature > 0, logits.shape[1]):
        probabilities = adjusted_probabilities(logits[rows], **{name: x[rows] for name, x in filters._asdict().items()})
        drawn = race(probabilities, Stream(*(x[rows] for x in stream)), purpose)
        tokens[rows] = torch.where(tokens[rows] < 0, -1, drawn)
    return tokens


def best_tokens(logits: Tensor) -> Tensor:
    """The first largest of each row of logits [N, V], [N] int64; −1 where it is not finite, or the row holds a NaN.

    What `sample_tokens` gives at temperature 0.
    """
    if in_c.ranks(logits):
        return in_c.first_best(logits)
    scores = logits.float()  # a CPU compares fp32 several times faster than bf16
    tokens = scores.argmax(dim=-1)
    return torch.where(scores.gather(1, tokens[:, None])[:, 0].isfinite(), tokens, -1)


def race(probabilities: Tensor, stream: Stream, purpose: int) -> Tensor:
    """Draw one token a row, [N] int64, from probabilities [N, V] fp32, by the stream's own draws.

    A row without a number above 0 gets any token, or −1 where it is NaN. On CUDA one kernel computes each draw where it
    is needed, and the host reads nothing. Raises ValueError for a stream of other rows.
    """
    if runs_triton(probabilities):
        return _launch_draw(probabilities, stream, int(purpose))
    if in_c.draws():
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


def _launch_probabilities(logits: Tensor, filters: Filters, *, cuts: bool) -> Tensor:
    filters = _check(logits, filters)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    rows, vocabulary = logits.shape
    if rows:
        lows, best, _ = find_thresholds(logits, *filters[:3], cuts=cuts)
        grid, block = (rows, _race.num_blocks(vocabulary)), _race.block_size(vocabulary)
        masses, firsts = _race.partial_results(*grid, logits.device)
        found = logits, filters.temperature, filters.min_p, lows, best, masses, firsts
        _kept_mass_kernel[grid](*found, logits.stride(0), vocabulary, BLOCK=block, num_warps=_race.WARPS)
        _probabilities_kernel[grid](
            *found, out, logits.stride(0), vocabulary,
            LANES=_race.num_lanes(vocabulary), BLOCK=block, num_warps=_race.WARPS,
        )  # fmt: skip
    return out


def _launch_race(logits: Tensor, filters: Filters, stream: Stream, purpose: int, *, cuts: bool) -> Tensor:
    filters, stream = _check(logits, filters), check_stream(stream, len(logits))
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        lows, best, arrived = find_thresholds(logits, *filters[:3], cuts=cuts)
        splits = _race.num_splits(rows, vocabulary, logits.device)
        _race_kernel[(rows, splits)](
            logits, filters.temperature, filters.min_p, lows, best, *stream,
            *_race.partial_results(rows, splits, logits.device), arrived, tokens, logits.stride(0), vocabulary,
            PURPOSE=purpose, LANES=_race.num_lanes(vocabulary), BLOCK=_race.block_size(vocabulary),
            num_warps=_race.WARPS,
        )  # fmt: skip
    return tokens


def _launch_draw(probabilities: Tensor, stream: Stream, purpose: int) -> Tensor:
    check_rows(probabilities=probabilities)
    (rows, vocabulary), stream = probabilities.shape, check_stream(stream, len(probabilities))
    tokens = torch.empty(rows, dtype=torch.int64, device=probabilities.device)
    if rows:
        splits = _race.num_splits(rows, vocabulary, probabilities.device)
        _draw_kernel[(rows, splits)](
            probabilities, *stream, *_race.partial_results(rows, splits, probabilities.device),
            torch.zeros_like(tokens, dtype=torch.int32), tokens, probabilities.stride(0), vocabulary,
            PURPOSE=purpose, LANES=_race.num_lanes(vocabulary), BLOCK=_race.block_size(vocabulary),
            num_warps=_race.WARPS,
        )  # fmt: skip
    return tokens
