"""Attention over a flat ragged batch of documents without Triton: in C, torch's own attention, or bands of queries.

Without gradients `_prefill_cpu` attends, where it takes the call.

On the CPU, bf16 runs in bands of queries: the scores of one band are a few oneDNN products and one softmax, small
enough for the cache. torch's own CPU attention takes 2.2 to 3 times as long for forward and backward, and gives less
exact key and value gradients; the scores are rounded to bf16 here, so the output has about twice its rounding error.
Whatever has a soft cap runs so too.

Legend: as in kernels/attention/flash.py; n queries of a band and m keys that they see.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention._cached_rows import CachedRows
from kernels.attention._prefill_cpu import PrefillPlan, attend_prefill
from kernels.attention._prefill_cpu import takes as prefills
from kernels.common.soft_cap import soft_cap_, soft_cap_slopes, soft_capped

_QUERIES_PER_BAND = 128


def visible_keys(s_q: int, s_k: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each query of one document sees, bool [s_q, s_k]."""
    last = torch.arange(s_k - s_q, s_k, device=device)[:, None]
    key = torch.arange(s_k, device=device)
    visible = key <= last if causal else torch.ones(s_q, s_k, dtype=torch.bool, device=device)
    return visible if window is None else visible & (key > last - window)


def documents(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, num_queries: int, num_keys: int
) -> Iterator[tuple[slice, slice]]:
    """Yield where each document's queries and keys lie; queries past the last document see no key."""
    bounds_q = cu_seqlens_q.tolist()
    bounds_k = bounds_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
    for b in range(len(bounds_q) - 1):
        yield slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_k[b], bounds_k[b + 1])
    if bounds_q[-1] < num_queries:
        yield slice(bounds_q[-1], num_queries), slice(num_keys, num_keys)


class Scores(NamedTuple):
    """What becomes of the products of queries and keys; as `flash_attention` has it."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None


def attend_documents(q: Tensor, k: Tensor, v: Tensor, rows: list[tuple[slice, slice]], settings: Scores) -> Tensor:
    """Attend within each document, whose queries and keys lie at `rows`; differentiable. Returns [T, Hq, d]."""
    keys, values = CachedRows(k, None), CachedRows(v, None)
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if settings.causal and not learns and prefills(q, keys, values):
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        plan = _packed_plan(rows, len(k), settings.window)
        attend_prefill(q, keys, values, plan, out, settings.scale, settings.soft_cap)
        return out
    if _runs_in_bands(q, settings.soft_cap):
        return _BandedAttention.apply(q, k, v, rows, settings)
    outputs = [_attend_document(q[queries], k[keys], v[keys], *settings[:3]) for queries, keys in rows]
    return outputs[0] if len(outputs) == 1 else torch.cat([q[:0], *outputs])


def _packed_plan(rows: list[tuple[slice, slice]], num_keys: int, window: int | None) -> PrefillPlan:
    """A key is a page of its own, and a document's table begins at its first key."""
    sequences = [(k.start, q.start, q.stop - q.start, k.stop - k.start) for q, k in rows]
    tables = np.arange(num_keys, dtype=np.int32).reshape(-1, 1)
    return PrefillPlan(np.array(sequences).reshape(-1, 4), tables, 1, window)


def _runs_in_bands(q: Tensor, soft_cap: float | None) -> bool:
    """torch's own attention knows no cap."""
    return q.device.type == "cpu" and (q.dtype == torch.bfloat16 or soft_cap is not None)


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None = None, soft_cap: float | None = None
) -> Tensor:
    """Attend, differentiably, from q [..., n, d] over k and v [..., m, d]; mask [..., n, m]: as torch's own has it."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = soft_capped(scale * q.to(wide) @ k.to(wide).transpose(-1, -2), soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return (torch.softmax(scores, dim=-1) @ v.to(wide)).to(q.dtype)


def attend_causally(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float, soft_cap: float | None
) -> Tensor:
    """Attend, without gradients, within one document: q [s_q, Hq, d], k and v [s_k, Hkv, d] → [s_q, Hq, d]."""
    if not _runs_in_bands(q, soft_cap):
        return _attend_document(q, k, v, True, window, scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _attend_in_bands(q, k, v, Scores(True, window, scale, soft_cap), out)
    return out


def _attend_document(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float) -> Tensor:
    """Attend within one document through torch's own attention; no copies."""
    s_q, s_k = q.shape[0], k.shape[0]
    # Under a causal mask the first s_q − s_k queries see no key.
    blind = min(s_q, max(0, s_q - s_k)) if causal else s_q * (s_k == 0)
    if blind:
        return torch.cat((torch.zeros_like(q[:blind]), _attend_document(q[blind:], k, v, causal, window, scale)))
    if s_q == 0:
        return q
    square = causal and window is None and s_q == s_k
    mask = visible_keys(s_q, s_k, causal, window, q.device) if causal and not square else None
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class _Band(NamedTuple):
    """A few consecutive queries of a document and the range of keys that any of them sees."""

    queries: slice
    keys: slice
    mask: Tensor
    """[n, 1, c]: 0 or −inf, added to the scores of the last c keys; all other keys are visible."""


def _bands(s_q: int, s_k: int, causal: bool, window: int | None, dtype: torch.dtype) -> Iterator[_Band]:
    """Cut the visible part of one document's scores into bands; queries that see no key are in none."""
    offset = s_k - s_q
    for start in range(max(0, -offset) if causal else 0, s_q if s_k else 0, _QUERIES_PER_BAND):
        stop = min(start + _QUERIES_PER_BAND, s_q)
        low = 0 if window is None else max(0, start + offset - window + 1)
        high = stop + offset if causal else s_k
        seen_by_all = (start + offset if window is None else low) if causal else high
        visible = visible_keys(stop - start, high - seen_by_all, causal, window, torch.device("cpu"))
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf)
        yield _Band(slice(start, stop), slice(low, high), mask[:, None])


def _attend_in_bands(q: Tensor, k: Tensor, v: Tensor, settings: Scores, out: Tensor) -> None:
    """Write the attention of one document, q [s_q, Hq, d] over k and v [s_k, Hkv, d], into out [s_q, Hq, d]."""
    s_q, (s_k, num_kv_heads, _) = q.shape[0], k.shape
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    workspace = _workspace(2, q, k)
    out.zero_()
    for queries, keys, mask in _bands(s_q, s_k, settings.causal, settings.window, q.dtype):
        rows = _rows(q[queries], num_kv_heads)
        _, probabilities = _probabilities(rows, k[:, keys], mask, settings, workspace)
        attended = torch.bmm(probabilities, v[:, keys])
        out[queries].unflatten(1, (num_kv_heads, -1)).copy_(_heads(attended, mask.shape[0]))


def _workspace(count: int, q: Tensor, k_heads: Tensor) -> Tensor:
    """Return buffers for the scores of the largest band, [count, elements], reused from band to band."""
    elements = min(q.shape[0], _QUERIES_PER_BAND) * q.shape[1] * k_heads.shape[1]
    return torch.empty(count, elements, dtype=q.dtype)


def _rows(x: Tensor, num_kv_heads: int) -> Tensor:
    """Line up the query heads that share keys: [n, Hq, d] → [Hkv, n·G, d]."""
    return x.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).reshape(num_kv_heads, -1, x.shape[-1])


def _heads(rows: Tensor, n: int) -> Tensor:
    """Undo `_rows` up to a view: [Hkv, n·G, d] → [n, Hkv, G, d]."""
    return rows.unflatten(1, (n, -1)).transpose(0, 1)


def _probabilities(
    rows: Tensor, k_heads: Tensor, mask: Tensor, settings: Scores, workspace: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scores, cap(scale · rows k_headsᵀ) + mask, and their softmax, [Hkv, n·G, m], which is in the second
    buffer of the workspace."""
    shape = (rows.shape[0], rows.shape[1], k_heads.shape[1])
    scores, probabilities = (buffer[: math.prod(shape)].view(shape) for buffer in workspace[:2])
    torch.baddbmm(scores, rows, k_heads.transpose(1, 2), beta=0, alpha=settings.scale, out=scores)
    if settings.soft_cap is not None:  # in fp32, or each of its steps would round
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores = soft_cap_(scores.to(wide), settings.soft_cap)
    scores.unflatten(1, (mask.shape[0], -1))[..., shape[2] - mask.shape[2] :].add_(mask)
    if scores.dtype != probabilities.dtype:
        return scores, probabilities.copy_(torch.softmax(scores, dim=-1))
    return scores, torch.softmax(scores, dim=-1, out=probabilities)


class _BandedAttention(torch.autograd.Function):
    """Attention of all documents in bands of queries; the backward pass computes the probabilities anew."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: list[tuple[slice, slice]],
        settings: Scores,
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for queries, keys in documents:
            _attend_in_bands(q[queries], k[keys], v[keys], settings, out[queries])
        ctx.save_for_backward(q, k, v)
        ctx.documents, ctx.settings = documents, settings
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for queries, keys in ctx.documents:
            document = q[queries], k[keys], v[keys], grad_out[queries]
            _backward_in_bands(*document, ctx.settings, grads[0][queries], grads[1][keys], grads[2][keys])
        return *grads, None, None


def _backward_in_bands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    settings: Scores,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    """Write one document's gradients: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − rowsum(P ∘ dO Vᵀ)), dQ = dS K, dK = dSᵀ Q.

    Under a cap dS is multiplied with its slopes.
    """
    sums_dtype = torch.promote_types(q.dtype, torch.float32)
    s_q, (s_k, num_kv_heads, _) = q.shape[0], k.shape
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    sum_k, sum_v = torch.zeros(k.shape, dtype=sums_dtype), torch.zeros(v.shape, dtype=sums_dtype)
    workspace = _workspace(3, q, k)
    for queries, keys, mask in _bands(s_q, s_k, settings.causal, settings.window, q.dtype):
        rows, grad_rows = _rows(q[queries], num_kv_heads), _rows(grad_out[queries], num_kv_heads)
        scores, probabilities = _probabilities(rows, k[:, keys], mask, settings, workspace)
        slopes = None if settings.soft_cap is None else soft_cap_slopes(scores, settings.soft_cap)
        grad_scores, _, grad_probabilities = (
            buffer[: probabilities.numel()].view(probabilities.shape) for buffer in workspace
        )
        sum_v[:, keys] += torch.bmm(probabilities.transpose(1, 2), grad_rows)
        torch.bmm(grad_rows, v[:, keys].transpose(1, 2), out=grad_probabilities)
        torch.ops.aten._softmax_backward_data.out(
            grad_probabilities, probabilities, -1, q.dtype, grad_input=grad_scores
        )
        if slopes is not None:
            grad_scores.mul_(slopes)
        sum_k[:, keys] += torch.bmm(grad_scores.transpose(1, 2), rows)
        grad_queries = torch.bmm(grad_scores, k[:, keys]).mul_(settings.scale)
        grad_q[queries].unflatten(1, (num_kv_heads, -1)).copy_(_heads(grad_queries, mask.shape[0]))
    grad_k.copy_(sum_k.mul_(settings.scale).transpose(0, 1))
    grad_v.copy_(sum_v.transpose(0, 1))
