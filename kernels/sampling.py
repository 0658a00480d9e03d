"""From logits to tokens: adjusted distributions, sampling, and the acceptance rule of speculative decoding.

Legend: N rows, V vocabulary, k drafted tokens.
"""

import math

import torch
from torch import Tensor


def adjusted_probabilities(
    logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return the distribution that a request samples from, [N, V] fp32, each row summing to 1.

    In this order: temperature, top-k (0 = off), top-p (1 = off), min-p (0 = off), each given per row, [N].
    A row of temperature 0 is one-hot at its first maximum.
    """
    greedy = temperature == 0
    scores = logits.float() / torch.where(greedy, 1, temperature)[:, None]
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        scores = _keep_top_k_top_p(scores, top_k, top_p)
    probabilities = torch.softmax(scores, dim=-1)
    if bool((min_p > 0).any()):
        floor = min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0)
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    if bool(greedy.any()):
        probabilities[greedy] = 0
        probabilities[greedy, logits[greedy].argmax(dim=-1)] = 1
    return probabilities


def _keep_top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = scores.sort(dim=-1)
    vocabulary = scores.shape[-1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).long()
    smallest_kept = ordered.gather(1, (vocabulary - k)[:, None])
    ordered = ordered.masked_fill(ordered < smallest_kept, -math.inf)
    below = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    dropped = (below <= 1 - top_p[:, None]) & (top_p[:, None] < 1)
    dropped[:, -1] = False
    return torch.empty_like(scores).scatter_(1, order, ordered.masked_fill(dropped, -math.inf))


def sample(probabilities: Tensor, exponential: Tensor) -> Tensor:
    """Draw one token a row, [N] int64, from probabilities [N, V] by an exponential race.

    `exponential` [N, V] holds independent draws of the unit exponential distribution; argmax(p / e) has the
    distribution p.
    """
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
    return residual if bool(residual.any()) else p
