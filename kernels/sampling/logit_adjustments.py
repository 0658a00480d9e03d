"""Logit bias, forbidden tokens and penalties, from state that stays on the device.

    x ← logit + bias
    x ← x / r if x > 0 else x · r          where prompt or output holds the token
    x ← x − f · n − s · [n > 0]

r repetition, f frequency and s presence penalty, n how often the output holds the token; definitions as in vLLM. A
request's state lies in its slot from its first token to its last, and a step sends nothing but the slots of its rows.
The counts are dense, since a sampled token must find its count without a search; biases are short lists.

Legend: N rows, V vocabulary, S slots, M most biases a request, K most drafted tokens before a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.rows import blocks_of_rows
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, runs_triton

IN_PROMPT = 1 << 30
"""Added to the count of a token that the prompt holds."""
ALWAYS = 2**31 - 1
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_BLOCK = 1024
_LANES = 32


class RequestState(NamedTuple):
    """What the scores of each slot are adjusted by."""

    counts: Tensor
    """[S, V] int32: times that the output holds the token, + IN_PROMPT if the prompt does."""
    repetition: Tensor
    """[S] fp32; 1 is off."""
    frequency: Tensor
    """[S] fp32"""
    presence: Tensor
    """[S] fp32"""
    bias_tokens: Tensor
    """[S, M] int32; −1 where there is none."""
    bias_values: Tensor
    """[S, M] fp32; −inf forbids the token. Values of one token add up."""
    bias_until: Tensor
    """[S, M] int32: the bias holds at output positions below this; ALWAYS, or min_tokens for the tokens that end."""


def adjust_scores_reference(
    logits: Tensor, state: RequestState, *, slots: Tensor, positions: Tensor, drafted: Tensor | None = None
) -> Tensor:
    """`adjust_scores` in its plainest form: one token at a time."""
    scores = logits.double().tolist()
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        before = [] if drafted is None else drafted[row].tolist()
        biases = list(zip(*(x[slot].tolist() for x in state[4:]), strict=True))
        for token, score in enumerate(scores[row] if slot >= 0 else ()):
            count = int(state.counts[slot, token])
            n = count % IN_PROMPT + before.count(token)
            score += sum(value for biased, value, until in biases if biased == token and position < until)
            if count >= IN_PROMPT or n:
                score = score / float(state.repetition[slot]) if score > 0 else score * float(state.repetition[slot])
            score -= float(state.frequency[slot]) * n + float(state.presence[slot]) * (n > 0)
            scores[row][token] = score
    return torch.tensor(scores, dtype=torch.float64).reshape(logits.shape)


@triton.jit
def _penalized(b_x, b_count, b_drafted, repetition, frequency, presence):
    """The scores after the penalties; b_count as in the state, b_drafted is added to it."""
    b_n = (b_count & (_IN_PROMPT - 1)) + b_drafted
    m_seen = (b_count + b_drafted) > 0
    b_repeated = tl.where(b_x > 0, b_x / repetition, b_x * repetition)
    b_x = tl.where(m_seen, b_repeated, b_x)
    return tl.where(b_n > 0, b_x - (frequency * b_n.to(tl.float32) + presence), b_x)


@triton.jit
def _overwrite(
    p_targets, num_targets, p_logits, p_counts, p_out, p_bias_tokens, p_bias_values, p_bias_until, num_biases,
    p_drafted, num_drafted, position, first, last, repetition, frequency, presence, LANES: tl.constexpr,
):  # fmt: skip
    """Store the scores of those tokens of a list that lie in [first, last), from their biases and drafted tokens."""
    for target in range(0, num_targets, LANES):
        o_target = target + tl.arange(0, LANES)
        b_token = tl.load(p_targets + o_target, mask=o_target < num_targets, other=-1).to(tl.int32)
        m_token = (b_token >= first) & (b_token < last)
        if tl.sum(m_token.to(tl.int32), axis=0) > 0:
            b_bias, b_drafted = tl.zeros([LANES], dtype=tl.float32), tl.zeros([LANES], dtype=tl.int32)
            for entry in range(num_biases):
                value = tl.where(position < tl.load(p_bias_until + entry), tl.load(p_bias_values + entry), 0.0)
                b_bias += tl.where(b_token == tl.load(p_bias_tokens + entry), value, 0.0)
            for entry in range(num_drafted):
                b_drafted += (b_token == tl.load(p_drafted + entry)).to(tl.int32)
            b_x = tl.load(p_logits + b_token, mask=m_token, other=0.0).to(tl.float32) + b_bias
            b_count = tl.load(p_counts + b_token, mask=m_token, other=0)
            b_x = _penalized(b_x, b_count, b_drafted, repetition, frequency, presence)
            tl.store(p_out + b_token, b_x, mask=m_token)


@triton.jit(
    do_not_specialize=["num_biases", "num_drafted"],
    do_not_specialize_on_alignment=[
        "p_slots", "p_positions", "p_drafted", "p_repetition", "p_frequency", "p_presence",
        "p_bias_tokens", "p_bias_values", "p_bias_until",
    ],
)  # fmt: skip
def _adjust_kernel(
    p_logits, p_out, p_slots, p_positions, p_drafted, p_counts, p_repetition, p_frequency, p_presence,
    p_bias_tokens, p_bias_values, p_bias_until, row_stride, vocabulary, num_biases, num_drafted,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): all scores by their counts, then once more those with a bias or a drafted token."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    mask = columns < vocabulary
    p_logits += row * row_stride
    p_out += row * vocabulary
    slot = tl.load(p_slots + row).to(tl.int64)
    b_x = tl.load(p_logits + columns, mask=mask, other=0.0).to(tl.float32)
    if slot >= 0:
        repetition, frequency = tl.load(p_repetition + slot), tl.load(p_frequency + slot)
        presence, position = tl.load(p_presence + slot), tl.load(p_positions + row).to(tl.int32)
        p_counts += slot * vocabulary
        b_count = tl.load(p_counts + columns, mask=mask, other=0)
        b_x = _penalized(b_x, b_count, tl.zeros([BLOCK], dtype=tl.int32), repetition, frequency, presence)
        tl.store(p_out + columns, b_x, mask=mask)
        # What follows overwrites scores that other threads of this program have just stored.
        tl.debug_barrier()
        p_bias_tokens += slot * num_biases
        p_bias_values += slot * num_biases
        p_bias_until += slot * num_biases
        p_drafted += row * num_drafted
        last = tl.minimum(first + BLOCK, vocabulary)
        _overwrite(
            p_bias_tokens, num_biases, p_logits, p_counts, p_out, p_bias_tokens, p_bias_values, p_bias_until,
            num_biases, p_drafted, num_drafted, position, first, last, repetition, frequency, presence, LANES,
        )  # fmt: skip
        _overwrite(
            p_drafted, num_drafted, p_logits, p_counts, p_out, p_bias_tokens, p_bias_values, p_bias_until,
            num_biases, p_drafted, num_drafted, position, first, last, repetition, frequency, presence, LANES,
        )  # fmt: skip
    else:
        tl.store(p_out + columns, b_x, mask=mask)


def adjust_scores(
    logits: Tensor, state: RequestState, *, slots: Tensor, positions: Tensor, drafted: Tensor | None = None
) -> Tensor:
    """Return the scores after bias and penalties, [N, V] fp32, of logits [N, V].

    slots [N] integers, −1 for rows that stay as they are; positions [N] integers: number of the output token that the
    row decides; drafted [N, K] integers: tokens that the row takes as emitted though they are not counted yet, −1
    where there is none. On CUDA the host reads nothing.
    """
    rows, vocabulary = logits.shape
    if state.counts.shape[1] != vocabulary or slots.shape != (rows,) or positions.shape != (rows,):
        raise ValueError(f"adjust_scores takes counts, slots and positions for logits {logits.shape}")
    if any(not x.is_contiguous() for x in state):
        raise ValueError("the state of the requests must be contiguous")
    if not runs_triton(logits):
        return _adjust(logits, state, slots, positions, drafted)
    check_rows(logits=logits)
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    if rows:
        _adjust_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
            logits, out, slots.contiguous(), positions.contiguous(),
            slots if drafted is None else drafted.contiguous(), *state, logits.stride(0), vocabulary,
            state.bias_tokens.shape[1], 0 if drafted is None else drafted.shape[1], LANES=_LANES, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Count emitted tokens [N, K], −1 where there is none, in the slots [N] of counts [S, V] int32, in place."""
    is_token = (tokens >= 0) & (slots >= 0)[:, None]
    indices = torch.where(is_token, slots.long()[:, None] * counts.shape[1] + tokens, 0).flatten()
    counts.view(-1).scatter_add_(0, indices, is_token.flatten().to(counts.dtype))


def _adjust(logits: Tensor, state: RequestState, slots: Tensor, positions: Tensor, drafted: Tensor | None) -> Tensor:
    scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
    for rows in blocks_of_rows(slots >= 0, logits.shape[1]):
        before = None if drafted is None else drafted[rows].long()
        scores[rows] = _adjust_rows(scores[rows], state, slots[rows].long(), positions[rows], before)
    return scores


def _adjust_rows(x: Tensor, state: RequestState, slots: Tensor, positions: Tensor, drafted: Tensor | None) -> Tensor:
    tokens, values, until = (part[slots] for part in state[4:])
    holds = (tokens >= 0) & (positions[:, None] < until)
    x.scatter_add_(1, tokens.clamp_min(0).long(), torch.where(holds, values, 0))
    counts = state.counts[slots]
    if drafted is not None:
        counts.scatter_add_(1, drafted.clamp_min(0), (drafted >= 0).to(counts.dtype))
    repetition, frequency, presence = (part[slots, None] for part in state[1:4])
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    n = counts % IN_PROMPT
    return torch.where(n > 0, x - (frequency * n + presence), x)
