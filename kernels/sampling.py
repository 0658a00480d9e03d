"""From logits to tokens: adjusted distributions, sampling, and the acceptance rule of speculative decoding.

Legend: N rows, V vocabulary, K most probable tokens, k drafted tokens.
"""

import math

import torch
from torch import Tensor

# Sorting a vocabulary of 49,152 costs 20 to 40 times as much as finding its 256 largest; few distributions need more.
_FIRST_CANDIDATES = 256


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


def adjusted_probabilities(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return the distribution that a request samples from, [N, V] fp32, each row summing to 1.

    logits [N, V]. In this order: temperature, top-k (0 = off), top-p (1 = off), min-p (0 = off), each given per row,
    [N]. Of tokens as probable as the last one kept all are kept. A row of temperature 0 is one-hot at its first
    maximum.
    """
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


def sample(probabilities: Tensor, exponential: Tensor) -> Tensor:
    """Draw one token a row, [N] int64, from probabilities [N, V] by an exponential race.

    `exponential` [N, V] holds independent draws of the unit exponential distribution; argmax(p / e) has the
    distribution p.
    """
    # A draw of exactly 0 must not turn the quotient of an impossible token into NaN.
    return (probabilities / exponential.clamp_min(torch.finfo(torch.float32).tiny)).argmax(dim=-1)


def verify_draft(
    target_p: Tensor, draft_p: Tensor | None, draft_tokens: Tensor, u: Tensor, exponential: Tensor
) -> tuple[int, int]:
    """Accept a prefix of the drafted tokens and draw the token after it, so that all follow the target exactly.

    target_p [k+1, V] and draft_p [k, V]: the adjusted distributions of both models (None: the draft was
    deterministic, its distributions are one-hot); draft_tokens [k]; u [k] uniform in [0, 1); exponential [V].
    Returns (number of accepted tokens, next token). Source: https://arxiv.org/abs/2211.17192.
    """
    k = draft_tokens.shape[0]
    drafted = draft_tokens[:, None]
    p = target_p[:k].gather(1, drafted)[:, 0]
    q = torch.ones_like(p) if draft_p is None else draft_p.gather(1, drafted)[:, 0]
    # Strictly below: a token of target probability 0 must be rejected even when u is 0.
    rejected = (u * q >= p).tolist()
    accepted = rejected.index(True) if True in rejected else k
    remaining = target_p[accepted]
    if accepted < k:
        remaining = _residual(remaining, None if draft_p is None else draft_p[accepted], int(draft_tokens[accepted]))
    return accepted, int(sample(remaining[None], exponential[None]))


def _residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """Return max(p − q, 0) (unnormalised), or p itself where rounding left nothing of it."""
    if q is None:
        residual = p.clone()
        residual[token] = 0
    else:
        residual = (p - q).clamp_min(0)
    return residual if float(residual.sum()) > 0 else p
