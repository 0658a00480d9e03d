"""Attention of new tokens over keys and values that live in pages.

A sequence's keys lie in pages of fixed size anywhere in the pool; its block table lists them in order. The slot of
position t is block_table[t // page] · page + t % page. Queries are ragged: prefill, chunk of a prompt, decode and
verification of drafted tokens are one call with other lengths. The last query of sequence b stands at key
kv_lengths[b] − 1 (bottom-right alignment, as in kernels.flash_attention).
Source: https://arxiv.org/abs/2309.06180.

Legend: T queries of all sequences, B sequences, Hq query heads, Hkv key/value heads, d head dim, P pages in the pool.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.flash_attention import flash_attention_reference


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    kv_lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`paged_attention` in its plainest form: collect each sequence's keys and values, then attend."""
    lengths = kv_lengths.tolist()
    keys = [k_pages[block_tables[b].long()].flatten(0, 1)[:length] for b, length in enumerate(lengths)]
    values = [v_pages[block_tables[b].long()].flatten(0, 1)[:length] for b, length in enumerate(lengths)]
    cu_seqlens_k = torch.tensor([0, *lengths]).cumsum(0)
    return flash_attention_reference(
        q, torch.cat(keys), torch.cat(values), cu_seqlens_q, cu_seqlens_k, window=window, scale=scale
    )


@dataclass(frozen=True)
class PagedPlan:
    """What `paged_attention` works out from lengths and block tables; the same for every layer of a step."""


def plan_paged_attention(
    block_tables: Tensor, cu_seqlens_q: Tensor, kv_lengths: Tensor, page_size: int, window: int | None = None
) -> PagedPlan:
    """Prepare a step's `paged_attention` calls, which share lengths, block tables and window."""
    return PagedPlan()


def write_pages(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store keys and values [T, Hkv, d] at slots [T] int64 of the pages [P, page, Hkv, d]; slot < 0 is skipped."""
    if bool((slots < 0).any()):
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    k_pages.view(-1, *k.shape[1:]).index_copy_(0, slots, k.to(k_pages.dtype))
    v_pages.view(-1, *v.shape[1:]).index_copy_(0, slots, v.to(v_pages.dtype))


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    kv_lengths: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    plan: PagedPlan | None = None,
) -> Tensor:
    """Attend over paged keys and values.

    q [T, Hq, d]; k_pages and v_pages [P, page, Hkv, d]; block_tables [B, max_pages] int32; cu_seqlens_q [B+1] int32;
    kv_lengths [B] int32; `window`: number of keys a query sees, itself included; `scale` defaults to 1/sqrt(d);
    `plan`: the result of `plan_paged_attention` for the same lengths, block tables and window.
    Returns [T, Hq, d] in the dtype of q. Not differentiable. Slots beyond a sequence's length are never used.
    """
    return paged_attention_reference(
        q, k_pages, v_pages, block_tables, cu_seqlens_q, kv_lengths, window=window, scale=scale
    )
