"""Attention over packed documents and over pages.

Legend: T tokens, B sequences, Hq query heads, Hkv key/value heads, d head dim, P pages.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bench.kernels.case import BF16, Inputs, Outputs, Shape, normal
from kernels.attention._kv_quantization import dequantize_rows, quantize_rows_reference
from kernels.attention.flash import flash_attention_reference
from kernels.attention.paged import paged_attention_reference

PAGE = 16
BAND = 512
"""Queries of a document that the reference attends at once."""


def documents(batch: int, length: int, query_heads: int, kv_heads: int, head_dim: int, mode: str = "forward") -> Shape:
    """`batch` documents of `length` tokens each, causal. q and grad [T, Hq, d], k and v [T, Hkv, d].

    FLOPs are counted as in the FlashAttention papers: half of the square, two products forward and five backward.
    Bytes: q, k, v and the output; backward these and the output's gradient are read, and three gradients written.
    """

    def make(device: torch.device) -> dict[str, Any]:
        sizes = {"q": query_heads, "k": kv_heads, "v": kv_heads} | ({} if mode == "forward" else {"grad": query_heads})
        heads = {name: normal(batch * length, size, head_dim, device=device) for name, size in sizes.items()}
        cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        return {**heads, "cu_seqlens": cu_seqlens}

    fields = {"batch": batch, "length": length, "query_heads": query_heads, "kv_heads": kv_heads}
    heads = "MHA" if query_heads == kv_heads else f"GQA{query_heads // kv_heads}"
    flops = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}[mode]
    moved = {"forward": 2, "backward": 4, "forward+backward": 6}[mode]
    return Shape(
        name=f"d{head_dim} {_short(length)} x{batch} {heads} {mode}",
        fields=fields | {"head_dim": head_dim, "mode": mode}, make=make, reference=_attention_in_bands,
        num_bytes=2 * batch * length * head_dim * moved * (query_heads + kv_heads),
        flops=flops * 2 * batch * length**2 * query_heads * head_dim, leaves=("q", "k", "v"), grads=("grad",),
        mode=mode,
    )  # fmt: skip


def _attention_in_bands(inputs: Inputs) -> Outputs:
    mode = inputs.shape.mode
    leaves = [x.double().requires_grad_(mode != "forward") for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = leaves
    out = torch.empty_like(q, requires_grad=False)
    for queries, keys in _bands(inputs.cu_seqlens.tolist()):
        ends = [torch.tensor([0, rows.stop - rows.start]) for rows in (queries, keys)]
        band = flash_attention_reference(q[queries], k[keys], v[keys], *ends)
        out[queries] = band.detach()
        if mode != "forward":
            band.backward(inputs.grad[queries].double())
    gradients = tuple(x.grad for x in leaves if x.grad is not None)
    return gradients if mode == "backward" else (out, *gradients)


def _bands(bounds: list[int]) -> Iterator[tuple[slice, slice]]:
    """Some queries of a document and the keys up to the last of them: the end of a shorter document."""
    for start, stop in pairwise(bounds):
        for first in range(start, stop, BAND):
            last = min(first + BAND, stop)
            yield slice(first, last), slice(start, last)


def paged(
    batch: int, rows: int, context: int, query_heads: int, kv_heads: int, head_dim: int, *,
    ragged: bool = False, page_dtype: torch.dtype = BF16,
) -> Shape:  # fmt: skip
    """`batch` sequences of `rows` new tokens each, with `context` keys including theirs, or fewer if `ragged`.

    q [B·rows, Hq, d], k_pages and v_pages [P, page, Hkv, d] in random order, block_tables [B, max_pages]. Keys and
    values are in bf16, or in 8 bits with fp32 scales [P, page, Hkv]. Bytes: these and the table; queries and output.
    """
    lengths = _ragged(batch, context) if ragged else [context] * batch
    pages = [math.ceil(length / PAGE) for length in lengths]

    def pool(device: torch.device) -> tuple[Tensor, Tensor | None]:
        x = normal(sum(pages), PAGE, kv_heads, head_dim, device=device)
        return (x, None) if page_dtype == BF16 else quantize_rows_reference(x, page_dtype)

    def make(device: torch.device) -> dict[str, Any]:
        order = torch.randperm(sum(pages), device=device).to(torch.int32)
        tables = torch.zeros(batch, max(pages), dtype=torch.int32, device=device)
        for row, owned in enumerate(order.split(pages)):
            tables[row, : len(owned)] = owned
        (k_pages, k_scales), (v_pages, v_scales) = pool(device), pool(device)
        return {
            "q": normal(batch * rows, query_heads, head_dim, device=device), "k_pages": k_pages, "v_pages": v_pages,
            "k_scales": k_scales, "v_scales": v_scales, "block_tables": tables,
            "cu_seqlens": torch.arange(batch + 1, dtype=torch.int32, device=device) * rows,
            "kv_lengths": torch.tensor(lengths, dtype=torch.int32, device=device), "lengths": lengths, "rows": rows,
        }  # fmt: skip  # fmt: skip

    more = ("" if rows == 1 else f" q{rows}") + (" ragged" if ragged else "")
    more += "" if page_dtype == BF16 else " " + str(page_dtype).removeprefix("torch.").split("_")[0]
    per_head = 2 * head_dim if page_dtype == BF16 else head_dim + 4
    fields = {"batch": batch, "rows": rows, "context": context, "query_heads": query_heads, "kv_heads": kv_heads}
    return Shape(
        name=f"GQA{query_heads // kv_heads} {_short(context)} x{batch}{more}",
        fields=fields | {"head_dim": head_dim, "ragged": ragged, "page_dtype": str(page_dtype)}, make=make,
        reference=_attention_of_each,
        num_bytes=2 * sum(lengths) * kv_heads * per_head + 4 * sum(pages) + 4 * batch * rows * query_heads * head_dim,
        flops=4 * sum(rows * (length - (rows - 1) / 2) for length in lengths) * query_heads * head_dim,
    )  # fmt: skip


def _ragged(batch: int, context: int) -> list[int]:
    """Keys of each sequence: evenly from an eighth of the context to all of it."""
    return [context * (batch + 7 * index) // (8 * batch) for index in range(1, batch + 1)]


def _attention_of_each(inputs: Inputs) -> Outputs:
    """One sequence after the other."""
    outputs, rows = [], inputs.rows
    for row, length in enumerate(inputs.lengths):
        pages = inputs.block_tables[row, : math.ceil(length / PAGE)].long()
        k, v = (
            dequantize_rows(x[pages], None if scales is None else scales[pages], torch.float64)
            for x, scales in ((inputs.k_pages, inputs.k_scales), (inputs.v_pages, inputs.v_scales))
        )
        table, q = torch.arange(len(pages), device=pages.device)[None], inputs.q[row * rows : (row + 1) * rows].double()
        outputs.append(paged_attention_reference(q, k, v, table, torch.tensor([0, rows]), torch.tensor([length])))
    return (torch.cat(outputs),)


def last_rows(inputs: Inputs) -> Inputs:
    """The same keys, with only the last query of each sequence: plain decode."""
    ends = torch.arange(len(inputs.lengths) + 1, dtype=torch.int32, device=inputs.q.device)
    q = inputs.q.unflatten(0, (-1, inputs.rows))[:, -1].contiguous()
    return inputs.replace(q=q, cu_seqlens=ends, rows=1)


def in_16_bits(inputs: Inputs) -> Inputs:
    """The same keys and values as bf16 pages."""
    k_pages = dequantize_rows(inputs.k_pages, inputs.k_scales, BF16)
    v_pages = dequantize_rows(inputs.v_pages, inputs.v_scales, BF16)
    return inputs.replace(k_pages=k_pages, v_pages=v_pages, k_scales=None, v_scales=None)


def dense(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, and k and v copied from pages in order, as [B, H, s, d]; for sequences of one length."""
    tables, q = inputs.block_tables.long(), inputs.q.unflatten(0, (-1, inputs.rows))
    k, v = (x[tables].flatten(1, 2)[:, : inputs.lengths[0]] for x in (inputs.k_pages, inputs.v_pages))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)
