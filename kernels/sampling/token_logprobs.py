"""Log-probabilities of given tokens and of the most probable ones, without a sort.

    logprob(t) = x_t − log Σ exp(x),   rank(t) = 1 + number of scores above x_t

A row is read once, a block by each program, which lays down the block's maximum, sum and rank and its K best tokens in
order, equal scores by their indices. The program that arrives last adds up and merges the lists.

Legend: N rows, V vocabulary, P blocks of a row, K most probable tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.arrival import arrives_last
from kernels.common.rows import rows_per_block
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, runs_triton
from kernels.sampling import _race

_NOBODY = tl.constexpr(2**31 - 1)


class Logprobs(NamedTuple):
    """Of each row's token and of its K most probable tokens."""

    chosen: Tensor
    """[N] fp32; NaN for the token −1."""
    ranks: Tensor
    """[N] int32, from 1."""
    top_tokens: Tensor
    """[N, K] int64, best first."""
    top: Tensor
    """[N, K] fp32"""


def token_logprobs_reference(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """`token_logprobs` in its plainest form: by sorting."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    ordered = logprobs.sort(dim=-1, descending=True, stable=True)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    return Logprobs(chosen[:, 0], ranks.int(), ordered.indices[:, :num_top], ordered.values[:, :num_top])


@triton.jit
def _best(b_x, b_index):
    """The best score and its index, of equal ones the lowest; those without a token have the index _NOBODY."""
    best = tl.max(tl.where(b_index < _NOBODY, b_x, float("-inf")), axis=0)
    return best, tl.min(tl.where(b_x == best, b_index, _NOBODY), axis=0)


@triton.jit
def _list_best(b_x, b_index, p_best, p_indices, num_top):
    """Store the `num_top` best of a block, in order."""
    for rank in range(num_top):
        best, index = _best(b_x, b_index)
        tl.store(p_best + rank, best)
        tl.store(p_indices + rank, index)
        b_index = tl.where(b_index == index, _NOBODY, b_index)


@triton.jit
def _merge_lists(p_best, p_indices, p_top, p_top_tokens, parts, num_top, log_sum, LANES: tl.constexpr):
    """Store the `num_top` best of all blocks' lists, in order: the best of their heads, each in turn."""
    o_part = tl.arange(0, LANES)
    b_taken = tl.zeros([LANES], dtype=tl.int32)
    for rank in range(num_top):
        o_head = o_part * num_top + b_taken
        m_head = (o_part < parts) & (b_taken < num_top)
        b_x = tl.load(p_best + o_head, mask=m_head, other=float("-inf"), cache_modifier=".cg")
        b_index = tl.load(p_indices + o_head, mask=m_head, other=_NOBODY, cache_modifier=".cg")
        best, index = _best(b_x, b_index)
        tl.store(p_top + rank, best - log_sum)
        tl.store(p_top_tokens + rank, index.to(tl.int64))
        b_taken += (b_index == index).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_top"],
    do_not_specialize_on_alignment=[
        "p_tokens", "p_largest", "p_sums", "p_above", "p_best", "p_indices", "p_arrived",
        "p_chosen", "p_ranks", "p_top_tokens", "p_top",
    ],
)  # fmt: skip
def _logprobs_kernel(
    p_logits, p_tokens, p_largest, p_sums, p_above, p_best, p_indices, p_arrived,
    p_chosen, p_ranks, p_top_tokens, p_top, row_stride, vocabulary, num_top, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block)."""
    row, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    part = row * parts + tl.program_id(1)
    token = tl.load(p_tokens + row).to(tl.int64)
    is_token = (token >= 0) & (token < vocabulary)
    score = tl.load(p_logits + row * row_stride + token, mask=is_token, other=float("nan")).to(tl.float32)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocabulary
    b_x = tl.load(p_logits + row * row_stride + columns, mask=mask, other=float("-inf")).to(tl.float32)
    largest = tl.max(b_x, axis=0)
    tl.store(p_largest + part, largest)
    # A block of forbidden tokens has the sum 0.
    tl.store(p_sums + part, tl.sum(tl.exp(b_x - tl.where(largest > float("-inf"), largest, 0.0)), axis=0))
    tl.store(p_above + part, tl.sum((b_x > score).to(tl.int32), axis=0))
    _list_best(b_x, tl.where(mask, columns, _NOBODY), p_best + part * num_top, p_indices + part * num_top, num_top)
    if arrives_last(p_arrived, row, parts):
        o_part = tl.arange(0, LANES)
        m_part = o_part < parts
        o_part += row * parts
        b_largest = tl.load(p_largest + o_part, m_part, other=float("-inf"), cache_modifier=".cg")
        b_sum = tl.load(p_sums + o_part, m_part, other=0.0, cache_modifier=".cg")
        b_above = tl.load(p_above + o_part, m_part, other=0, cache_modifier=".cg")
        best = tl.max(b_largest, axis=0)
        log_sum = best + tl.log(tl.sum(b_sum * tl.exp(b_largest - best), axis=0))
        tl.store(p_chosen + row, score - log_sum)
        tl.store(p_ranks + row, tl.sum(b_above, axis=0) + 1)
        p_best += row * parts * num_top
        p_indices += row * parts * num_top
        p_top += row * num_top
        p_top_tokens += row * num_top
        _merge_lists(p_best, p_indices, p_top, p_top_tokens, parts, num_top, log_sum, LANES)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Return the log-probabilities of tokens [N] and of the `num_top` most probable ones under logits [N, V].

    On CUDA this is one kernel and the host reads nothing. Raises ValueError for wrong shapes and for K > V.
    """
    if logits.dim() != 2 or tokens.shape != logits.shape[:1] or not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"token_logprobs takes logits [N, V], tokens [N], K ≤ V: {logits.shape}, {num_top}")
    if not runs_triton(logits):
        size = rows_per_block(logits.shape[1])
        blocks = zip(logits.split(size), tokens.split(size), strict=True)
        columns = zip(*(_score_rows(*block, num_top) for block in blocks), strict=True)
        return Logprobs(*(torch.cat(parts) for parts in columns))
    check_rows(logits=logits)
    (rows, vocabulary), device = logits.shape, logits.device
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    top = torch.empty(rows, num_top, dtype=torch.float32, device=device)
    result = Logprobs(
        chosen, torch.empty_like(chosen, dtype=torch.int32), torch.empty_like(top, dtype=torch.int64), top
    )
    if rows:
        grid = rows, _race.num_blocks(vocabulary)
        largest, sums = torch.empty(2, *grid, dtype=torch.float32, device=device)
        lists = _race.partial_results(rows, grid[1] * num_top, device)
        _logprobs_kernel[grid](
            logits, tokens.contiguous(), largest, sums, torch.empty_like(sums, dtype=torch.int32), *lists,
            torch.zeros_like(result.ranks), result.chosen, result.ranks, result.top_tokens, result.top,
            logits.stride(0), vocabulary, num_top,
            LANES=_race.num_lanes(vocabulary), BLOCK=_race.block_size(vocabulary), num_warps=_race.WARPS,
        )  # fmt: skip
    return result


def _score_rows(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = torch.where(tokens >= 0, logprobs.gather(1, tokens.clamp_min(0)[:, None])[:, 0], torch.nan)
    ranks = (logprobs > chosen[:, None]).sum(dim=-1) + 1
    best = logprobs.topk(num_top, dim=-1)
    return Logprobs(chosen, ranks.int(), best.indices, best.values)
