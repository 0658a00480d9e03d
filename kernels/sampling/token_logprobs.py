"""Log-probabilities of given tokens and of the most probable ones, without a sort.

    logprob(t) = x_t − log Σ exp(x),   rank(t) = 1 + number of scores above x_t

A pass for the maximum, one for the sum and the rank, and one for each of the most probable tokens: the best of those
that come after the one before, equal scores in the order of their indices.

Legend: N rows, V vocabulary, K most probable tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.rows import rows_per_block
from kernels.common.triton_support import check_rows, runs_triton

_BLOCK = 4096
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
def _load(p_row, columns, vocabulary):
    return tl.load(p_row + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit(
    do_not_specialize=["num_top"],
    do_not_specialize_on_alignment=["p_tokens", "p_chosen", "p_ranks", "p_top_tokens", "p_top"],
)
def _logprobs_kernel(
    p_logits, p_tokens, p_chosen, p_ranks, p_top_tokens, p_top, row_stride, vocabulary, num_top,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * row_stride
    token = tl.load(p_tokens + row).to(tl.int64)
    is_token = (token >= 0) & (token < vocabulary)
    score = tl.load(p_row + token, mask=is_token, other=float("nan")).to(tl.float32)
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        b_best = tl.maximum(b_best, _load(p_row, first + tl.arange(0, BLOCK), vocabulary))
    best = tl.max(b_best, axis=0)
    b_sum, b_above = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, vocabulary, BLOCK):
        b_x = _load(p_row, first + tl.arange(0, BLOCK), vocabulary)
        b_sum += tl.exp(b_x - best)
        b_above += (b_x > score).to(tl.int32)
    log_sum = best + tl.log(tl.sum(b_sum, axis=0))
    tl.store(p_chosen + row, score - log_sum)
    tl.store(p_ranks + row, tl.sum(b_above, axis=0) + 1)
    last_score, last_index = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
    for rank in range(num_top):
        b_best = tl.full([BLOCK], float("-inf"), tl.float32)
        b_index = tl.full([BLOCK], _NOBODY, tl.int32)
        for first in range(0, vocabulary, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            b_x = _load(p_row, columns, vocabulary)
            m_after = (b_x < last_score) | ((b_x == last_score) & (columns > last_index))
            m_after &= columns < vocabulary
            m_better = m_after & ((b_x > b_best) | (b_index == _NOBODY))
            b_best, b_index = tl.where(m_better, b_x, b_best), tl.where(m_better, columns, b_index)
        last_score = tl.max(b_best, axis=0)
        last_index = tl.min(tl.where(b_best == last_score, b_index, _NOBODY), axis=0)
        tl.store(p_top_tokens + row * num_top + rank, last_index.to(tl.int64))
        tl.store(p_top + row * num_top + rank, last_score - log_sum)


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
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        _logprobs_kernel[(rows,)](
            logits, tokens.contiguous(), result.chosen, result.ranks, result.top_tokens, result.top,
            logits.stride(0), vocabulary, num_top, BLOCK=block, num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
    return result


def _score_rows(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = torch.where(tokens >= 0, logprobs.gather(1, tokens.clamp_min(0)[:, None])[:, 0], torch.nan)
    ranks = (logprobs > chosen[:, None]).sum(dim=-1) + 1
    best = logprobs.topk(num_top, dim=-1)
    return Logprobs(chosen, ranks.int(), best.indices, best.values)
