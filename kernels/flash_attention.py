"""Attention over a flat ragged batch of documents, forward and backward.

    O = softmax(scale · Q Kᵀ + mask) V      within each document

Masks are aligned at the bottom right: of a document with s_q queries and s_k keys, query i sees the keys
j ≤ i + s_k − s_q (causal), and with a window w only the last w of them: j > i + s_k − s_q − w. A query that sees no
key gives 0 and receives no gradient. Each key/value head serves Hq/Hkv consecutive query heads.
Source: https://arxiv.org/abs/2307.08691.

Legend: T queries of all documents, S keys of all documents, B documents, Hq query heads, Hkv key/value heads,
d head dim.
"""

import math

import torch
from torch import Tensor


def visible_keys(num_queries: int, num_keys: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each query of one document sees, bool [num_queries, num_keys]."""
    last = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    visible = key <= last if causal else torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return visible if window is None else visible & (key > last - window)


def flash_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`flash_attention` in its plainest form: one document and one matrix of scores at a time."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    bounds_q = cu_seqlens_q.tolist()
    bounds_k = bounds_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
    group = q.shape[1] // k.shape[1]
    outputs = [q[:0]]
    for b in range(len(bounds_q) - 1):
        queries = q[bounds_q[b] : bounds_q[b + 1]].transpose(0, 1)
        keys = k[bounds_k[b] : bounds_k[b + 1]].repeat_interleave(group, dim=1).transpose(0, 1)
        values = v[bounds_k[b] : bounds_k[b + 1]].repeat_interleave(group, dim=1).transpose(0, 1)
        visible = visible_keys(queries.shape[1], keys.shape[1], causal, window, q.device)
        scores = (scale * queries @ keys.transpose(1, 2)).masked_fill(~visible, -math.inf)
        weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(-1, keepdim=True), 0)
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend within each document; differentiable in q, k and v.

    q [T, Hq, d]; k and v [S, Hkv, d]; cu_seqlens_q [B+1] int32: where each document's queries start and end;
    cu_seqlens_k: the same for keys, by default equal to cu_seqlens_q; `window`: number of keys a query sees,
    itself included; `scale` defaults to 1/sqrt(d). Returns [T, Hq, d].
    """
    return flash_attention_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, scale=scale)
