"""Attention over packed documents and over pages: shapes, and peers.

Peers' dense attention views queries as [B, s, H, d] or [B, H, s, d]: the memory is the same for everybody.

Legend: T tokens, B sequences, Hq query heads, Hkv key/value heads, d head dim, P pages.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from bench.kernels.case import BF16, Call, Inputs, NotItsTask, Outputs, Shape, compiled, in_fp64, needs, normal
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

    def make() -> dict[str, Any]:
        sizes = {"q": query_heads, "k": kv_heads, "v": kv_heads} | ({} if mode == "forward" else {"grad": query_heads})
        heads = {name: normal(batch * length, size, head_dim) for name, size in sizes.items()}
        return heads | {"cu_seqlens_q": torch.arange(0, batch * length + 1, length, dtype=torch.int32)}

    fields = {"batch": batch, "length": length, "query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    heads = "MHA" if query_heads == kv_heads else f"GQA{query_heads // kv_heads}"
    flops, moved = {"forward": (1.0, 2), "backward": (2.5, 4), "forward+backward": (3.5, 6)}[mode]
    return Shape(
        name=f"d{head_dim} {_short(length)} x{batch} {heads} {mode}", fields=fields | {"mode": mode}, make=make,
        reference=in_fp64(_attention_in_bands), leaves=("q", "k", "v"), grads=("grad",), mode=mode,
        num_bytes=2 * batch * length * head_dim * moved * (query_heads + kv_heads),
        flops=flops * 2 * batch * length**2 * query_heads * head_dim,
    )  # fmt: skip


def _attention_in_bands(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Some queries of a document and the keys up to the last of them at once: the end of a shorter document."""
    bands = []
    for start, stop in pairwise(cu_seqlens_q.tolist()):
        for first in range(start, stop, BAND):
            last = min(first + BAND, stop)
            operands = q[first:last], k[start:last], v[start:last]
            ends = torch.tensor([0, last - first]), torch.tensor([0, last - start])
            # Backward computes the scores of a band again, as those of all would not fit.
            bands.append(checkpoint(flash_attention_reference, *operands, *ends, use_reentrant=False))
    return torch.cat(bands)


def paged(
    batch: int, rows: int, context: int, query_heads: int, kv_heads: int, head_dim: int, *,
    ragged: bool = False, page_dtype: torch.dtype = BF16,
) -> Shape:  # fmt: skip
    """`batch` sequences of `rows` new tokens each, with `context` keys including theirs, or from an eighth if `ragged`.

    q [B·rows, Hq, d], k_pages and v_pages [P, page, Hkv, d] in random order, block_tables [B, max_pages]. Keys and
    values are in bf16, or in 8 bits with fp32 scales [P, page, Hkv]. Bytes: these and the table; queries and output.
    """
    lengths = [context * (batch + 7 * row) // (8 * batch) if ragged else context for row in range(1, batch + 1)]
    pages = [math.ceil(length / PAGE) for length in lengths]

    def pool(name: str) -> dict[str, Tensor | None]:
        x = normal(sum(pages), PAGE, kv_heads, head_dim)
        x, scales = (x, None) if page_dtype == BF16 else quantize_rows_reference(x, page_dtype)
        return {f"{name}_pages": x, f"{name}_scales": scales}

    def make() -> dict[str, Any]:
        order = torch.randperm(sum(pages)).to(torch.int32)
        tables = torch.nn.utils.rnn.pad_sequence(order.split(pages), batch_first=True)
        made = pool("k") | pool("v") | {"q": normal(batch * rows, query_heads, head_dim), "block_tables": tables}
        made |= {"cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32) * rows}
        return made | {"kv_lengths": torch.tensor(lengths, dtype=torch.int32), "lengths": lengths, "rows": rows}

    more = ("" if rows == 1 else f" q{rows}") + (" ragged" if ragged else "")
    more += "" if page_dtype == BF16 else " " + str(page_dtype).removeprefix("torch.").split("_")[0]
    per_head = 2 * head_dim if page_dtype == BF16 else head_dim + 4
    fields = {"batch": batch, "rows": rows, "context": context, "query_heads": query_heads, "kv_heads": kv_heads}
    return Shape(
        name=f"GQA{query_heads // kv_heads} {_short(context)} x{batch}{more}", make=make, reference=_attention_of_each,
        fields=fields | {"head_dim": head_dim, "ragged": ragged, "page_dtype": str(page_dtype)},
        num_bytes=2 * sum(lengths) * kv_heads * per_head + 4 * sum(pages) + 4 * batch * rows * query_heads * head_dim,
        flops=4 * sum(rows * (length - (rows - 1) / 2) for length in lengths) * query_heads * head_dim,
    )  # fmt: skip


def _attention_of_each(inputs: Inputs) -> Outputs:
    """One sequence after the other."""
    outputs, pools = [], ((inputs.k_pages, inputs.k_scales), (inputs.v_pages, inputs.v_scales))
    for row, (length, q) in enumerate(zip(inputs.lengths, inputs.q.split(inputs.rows), strict=True)):
        pages = inputs.block_tables[row, : math.ceil(length / PAGE)].long()
        scaled = ((x[pages], None if scales is None else scales[pages]) for x, scales in pools)
        k, v = (dequantize_rows(*each, torch.float64) for each in scaled)
        table, ends = torch.arange(len(pages), device=pages.device)[None], torch.tensor([0, inputs.rows])
        outputs.append(paged_attention_reference(q.double(), k, v, table, ends, torch.tensor([length])))
    return (torch.cat(outputs),)


def last_rows(inputs: Inputs) -> Inputs:
    """The same keys, with only the last query of each sequence: plain decode."""
    q = inputs.q.unflatten(0, (-1, inputs.rows))[:, -1].contiguous()
    return inputs.replace(q=q, cu_seqlens_q=inputs.cu_seqlens_q // inputs.rows, rows=1)


def in_16_bits(inputs: Inputs) -> Inputs:
    """The same keys and values as bf16 pages."""
    k_pages = dequantize_rows(inputs.k_pages, inputs.k_scales, BF16)
    v_pages = dequantize_rows(inputs.v_pages, inputs.v_scales, BF16)
    return inputs.replace(k_pages=k_pages, v_pages=v_pages, k_scales=None, v_scales=None)


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)


Dense = Callable[[Tensor, Tensor, Tensor], Tensor]
VLLM_SEGMENTS = 16
VLLM_SMALLEST_GRID = 128
"""vLLM's Triton kernel splits keys in 16, for at most 128 / Hkv sequences of one query."""
FLASHINFER_WORKSPACE_BYTES = 256 * 2**20


# Dense attention, of q, k and v [B, H, s, d], aligned at the bottom right


def sdpa(backend: SDPBackend, device: torch.device, rows: int, keys: int) -> Dense:
    """torch's, by one of its backends."""
    from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, which takes a second

    if 1 < rows < keys and backend == SDPBackend.CUDNN_ATTENTION:
        raise NotItsTask("no causal mask aligned at the bottom right")
    square: dict[str, Any] = {"is_causal": True}
    causal = square if rows == keys else {"attn_mask": None if rows == 1 else causal_lower_right(rows, keys)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **causal, enable_gqa=q.shape[1] != k.shape[1])

    return attend


@cache
def flex(device: torch.device, rows: int, keys: int) -> Dense:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (keys - rows)

    call, causal = compiled(flex_attention, device), create_block_mask(visible, None, None, rows, keys, device=device)
    return lambda q, k, v: call(q, k, v, block_mask=causal, enable_gqa=q.shape[1] != k.shape[1])


SDPA = {
    "sdpa_flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa_efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
}


def of_documents(dense: Callable[..., Dense]) -> Callable[[Inputs], Dense]:
    """Dense attention of packed documents of one length."""

    def adapt(inputs: Inputs) -> Dense:
        attend = dense(inputs.q.device, inputs.shape["length"], inputs.shape["length"])
        return lambda *heads: attend(*(_documents(inputs, x).transpose(1, 2) for x in heads)).transpose(1, 2)

    return adapt


def _documents(inputs: Inputs, x: Tensor) -> Tensor:
    """View x [T, H, d] as [B, T/B, H, d]."""
    return x.view(inputs.shape["batch"], -1, *x.shape[1:])


def contiguous(dense: Callable[..., Dense]) -> Callable[[Inputs], Call]:
    """An easier problem, for scale: the keys lie in one piece, and no table has to be read."""

    def prepare(inputs: Inputs) -> Call:
        if len(set(inputs.lengths)) > 1:
            raise NotItsTask("sequences of different lengths")
        q, tables = inputs.q.unflatten(0, (-1, inputs.rows)), inputs.block_tables.long()
        k, v = (x[tables].flatten(1, 2)[:, : inputs.lengths[0]] for x in (inputs.k_pages, inputs.v_pages))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend = dense(q.device, q.shape[2], k.shape[2])
        return lambda: attend(q, k, v).transpose(1, 2)

    return prepare


# Packages


@needs("flash_attn_interface")
def fa3(package: Any, inputs: Inputs) -> Dense:
    """FlashAttention-3's own package."""
    return lambda *heads: _first(package.flash_attn_func(*(_documents(inputs, x) for x in heads), causal=True))


@needs("flashinfer")
def flashinfer(package: Any, inputs: Inputs) -> Call:
    """Its decode for one query a sequence, its prefill for several; planned once, outside of what is timed."""
    workspace, pages = _flashinfer_workspace(inputs.q.device), _flashinfer_pages(inputs)
    dtypes = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.k_pages.dtype}
    if inputs.rows == 1:
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*pages, **dtypes)
    else:
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(inputs.cu_seqlens_q, *pages, causal=True, **dtypes)
    return lambda: wrapper.run(inputs.q, (inputs.k_pages, inputs.v_pages))


@cache
def _flashinfer_workspace(device: torch.device) -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flashinfer_pages(inputs: Inputs) -> tuple[Any, ...]:
    """Where each sequence's pages start in the list of all, that list, how full each last page is; heads; page size."""
    counts, table = (inputs.kv_lengths + PAGE - 1) // PAGE, inputs.block_tables
    starts, fill = F.pad(counts.cumsum(0), (1, 0)).int(), (inputs.kv_lengths - 1) % PAGE + 1
    owned = table[torch.arange(table.shape[1], device=table.device) < counts[:, None]]
    return starts, owned, fill, inputs.q.shape[1], inputs.k_pages.shape[2], inputs.q.shape[2], PAGE


@needs("flash_attn_interface")
def fa3_paged(package: Any, inputs: Inputs) -> Call:
    """FlashAttention-3 over a page table."""
    q = inputs.q.unflatten(0, (-1, inputs.rows))
    pages = {"cache_seqlens": inputs.kv_lengths, "page_table": inputs.block_tables}
    attend = package.flash_attn_with_kvcache
    return lambda: _first(attend(q, inputs.k_pages, inputs.v_pages, causal=True, **pages))


def _vllm_arguments(inputs: Inputs) -> dict[str, Any]:
    return {
        "max_seqlen_q": inputs.rows, "cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_k": max(inputs.lengths),
        "seqused_k": inputs.kv_lengths, "block_table": inputs.block_tables, "causal": True,
    }  # fmt: skip


@needs("vllm.vllm_flash_attn")
def vllm_fa3(package: Any, inputs: Inputs) -> Call:
    """vLLM's build of FlashAttention-3."""
    attend, arguments = package.flash_attn_varlen_func, _vllm_arguments(inputs) | {"fa_version": 3}
    return lambda: _first(attend(inputs.q, inputs.k_pages, inputs.v_pages, **arguments))


@needs("vllm.v1.attention.ops.triton_unified_attention")
def vllm_triton(package: Any, inputs: Inputs) -> Call:
    """vLLM's unified Triton kernel, with the buffers that its backend gives it."""
    (heads, head_dim), device = inputs.q.shape[1:], inputs.q.device
    most_sequences, out = VLLM_SMALLEST_GRID // inputs.k_pages.shape[2], torch.empty_like(inputs.q)
    one, segments = torch.ones(1, device=device), (most_sequences, heads, VLLM_SEGMENTS)
    arguments = _vllm_arguments(inputs) | {
        "q": inputs.q, "k": inputs.k_pages, "v": inputs.v_pages, "out": out, "softmax_scale": head_dim**-0.5,
        "window_size": (-1, -1), "softcap": 0.0, "q_descale": None, "k_descale": one, "v_descale": one,
        "seq_threshold_3D": most_sequences, "num_par_softmax_segments": VLLM_SEGMENTS,
        "softmax_segm_output": torch.empty(*segments, head_dim, device=device),
        "softmax_segm_max": torch.empty(segments, device=device),
        "softmax_segm_expsum": torch.empty(segments, device=device),
    }  # fmt: skip

    def run() -> Tensor:
        package.unified_attention(**arguments)
        return out

    return run


def _first(result: Any) -> Tensor:
    """Some releases return the output, others a tuple that starts with it."""
    return result[0] if isinstance(result, tuple) else result
