"""Drafts from the text itself: what followed the latest earlier occurrence of the last few tokens.

For the largest size ≤ `max_ngram` whose last tokens occur before, the k tokens behind the latest such occurrence are
proposed, fewer where the text ends. On the device, so that the next step's tokens need not be known to the host.

Source: https://github.com/apoorvumang/prompt-lookup-decoding.
Legend: B sequences, R rows of text, S most tokens, k drafted tokens.
"""

import torch
from torch import Tensor

from kernels.common.triton import tl, triton
from kernels.common.triton_support import runs_triton

MAX_NGRAM = 3
SEARCHED_TOKENS = 8192
_BLOCK = 1024
_LANES = 32


def find_ngrams_reference(
    tokens: list[int], k: int, *, max_ngram: int = MAX_NGRAM, searched: int = SEARCHED_TOKENS
) -> list[int]:
    """The draft of one sequence, a list of up to k tokens."""
    tokens = tokens[-searched:]
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + k]
    return []


@triton.jit
def _matches(p_row, columns, length, lowest, age, mask):
    """Whether the token `age` tokens before each column is the token `age` tokens before the last."""
    last = tl.load(p_row + tl.maximum(length - 1 - age, 0))
    m_column = mask & (columns - age >= lowest)
    return m_column & (tl.load(p_row + columns - age, mask=m_column, other=0) == last)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["p_rows", "p_lengths", "p_drafts", "p_counts"])
def _ngram_kernel(
    p_tokens, p_rows, p_lengths, p_drafts, p_counts, row_stride, k,
    MAX_NGRAM: tl.constexpr, SEARCHED: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence. The best occurrence has the largest (tokens that match, position of the last of them)."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_tokens + tl.load(p_rows + row).to(tl.int64) * row_stride
    length = tl.load(p_lengths + row).to(tl.int32)
    lowest = tl.maximum(length - SEARCHED, 0)
    b_best = tl.full([BLOCK], -1, tl.int64)
    for first in range(lowest, length - 1, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < length - 1
        m_same = _matches(p_row, columns, length, lowest, 0, mask)
        b_size = m_same.to(tl.int64)
        for age in tl.static_range(1, MAX_NGRAM):
            m_same = _matches(p_row, columns, length, lowest, age, m_same)
            b_size += m_same.to(tl.int64)
        b_best = tl.maximum(b_best, tl.where(b_size > 0, (b_size << 32) + columns, -1))
    best = tl.max(b_best, axis=0)
    start = (best & 0xFFFFFFFF).to(tl.int32) + 1
    count = tl.where(best >= 0, tl.minimum(length - start, k), 0)
    for first in range(0, k, LANES):
        o_draft = first + tl.arange(0, LANES)
        b_draft = tl.load(p_row + start + o_draft, mask=o_draft < count, other=-1)
        tl.store(p_drafts + row * k + o_draft, b_draft.to(tl.int64), mask=o_draft < k)
    tl.store(p_counts + row, count)


def find_ngrams(
    tokens: Tensor,
    lengths: Tensor,
    k: int,
    *,
    rows: Tensor | None = None,
    max_ngram: int = MAX_NGRAM,
    searched: int = SEARCHED_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Return drafts [B, k] int64, −1 behind their counts, and the counts [B] int32.

    tokens [R, S] integers, contiguous in the last dimension; rows [B] int64: where each sequence lies in them, None: in
    order; lengths [B] integers; only the last `searched` tokens are looked at. On CUDA the host reads nothing.
    """
    if k < 1 or max_ngram < 1 or tokens.dim() != 2 or lengths.shape != (tokens if rows is None else rows).shape[:1]:
        raise ValueError(
            f"find_ngrams takes tokens [R, S], lengths and rows [B] and k ≥ 1: {tokens.shape}, {lengths.shape}, {k}"
        )
    rows = torch.arange(len(lengths), device=tokens.device) if rows is None else rows
    drafts = torch.full((len(rows), k), -1, device=tokens.device)
    if runs_triton(tokens):
        counts = torch.empty(len(rows), dtype=torch.int32, device=tokens.device)
        if len(rows):
            tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
            _ngram_kernel[(len(rows),)](
                tokens, rows.contiguous(), lengths.contiguous(), drafts, counts, tokens.stride(0), k,
                MAX_NGRAM=max_ngram, SEARCHED=searched, LANES=_LANES, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip
        return drafts, counts
    sizes = []
    for draft, row, length in zip(drafts, rows.tolist(), lengths.tolist(), strict=True):
        found = _find(tokens[row, max(length - searched, 0) : length], k, max_ngram)
        draft[: len(found)] = found
        sizes.append(len(found))
    return drafts, torch.tensor(sizes, dtype=torch.int32)


def _find(history: Tensor, k: int, max_ngram: int) -> Tensor:
    for size in range(min(max_ngram, len(history) - 1), 0, -1):
        occurrences = (history.unfold(0, size, 1)[:-1] == history[-size:]).all(dim=1).nonzero()
        if len(occurrences):
            after = int(occurrences[-1]) + size
            return history[after : after + k]
    return history[:0]
