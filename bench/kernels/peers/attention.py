"""Attention. Dense attention views queries as [B, s, H, d] or [B, H, s, d]: the memory is the same for everybody."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.kernels.case import Inputs, NotItsTask, Run, compiled, needs
from bench.kernels.inputs.attention import PAGE, dense

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q [T, Hq, d], k and v [T, Hkv, d] to the output, [T, Hq, d] or viewed as [B, s, Hq, d]."""
BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
VLLM_SEGMENTS = 16
VLLM_SMALLEST_GRID = 128
"""vLLM's Triton kernel splits keys in 16, for at most 128 / Hkv sequences of one query."""
FLASHINFER_WORKSPACE_BYTES = 256 * 2**20


# Packed documents


def _documents(inputs: Inputs, x: Tensor) -> Tensor:
    """View x [T, H, d] as [B, T/B, H, d]."""
    return x.view(inputs.shape["batch"], -1, *x.shape[1:])


def sdpa(backend: str) -> Callable[[Inputs], Forward]:
    def adapt(inputs: Inputs) -> Forward:
        grouped = inputs.q.shape[1] != inputs.k.shape[1]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (_documents(inputs, x).transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(BACKENDS[backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

        return attend

    return adapt


def flex(inputs: Inputs) -> Forward:
    flex_attention, causal = _flex(inputs.q.device, inputs.shape["length"], inputs.shape["length"])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (_documents(inputs, x).transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return flex_attention(*heads, block_mask=causal, enable_gqa=grouped).transpose(1, 2)

    return attend


@cache
def _flex(device: torch.device, rows: int, keys: int) -> tuple[Callable[..., Tensor], Any]:
    """FlexAttention, compiled, and its block mask: causal, aligned at the bottom right."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (keys - rows)

    return compiled(flex_attention, device), create_block_mask(visible, None, None, rows, keys, device=device)


@needs("flash_attn_interface")
def fa3(package: Any, inputs: Inputs) -> Forward:
    """FlashAttention-3's own package."""
    return lambda *heads: _first(package.flash_attn_func(*(_documents(inputs, x) for x in heads), causal=True))


# Pages


def contiguous_sdpa(backend: str) -> Callable[[Inputs], Run]:
    """An easier problem, for scale: the keys lie in one piece, and no table has to be read."""

    def adapt(inputs: Inputs) -> Run:
        q, k, v = _contiguous(inputs)
        grouped = q.shape[1] != k.shape[1]
        mask = None if inputs.rows == 1 else causal_lower_right(q.shape[2], k.shape[2])
        if mask is not None and backend == "sdpa_cudnn":
            raise NotItsTask("no causal mask aligned at the bottom right")

        def run() -> tuple[Tensor]:
            with sdpa_kernel(BACKENDS[backend]):
                return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2),)

        return run

    return adapt


def contiguous_flex(inputs: Inputs) -> Run:
    """FlexAttention over keys in one piece."""
    q, k, v = _contiguous(inputs)
    flex_attention, causal = _flex(inputs.q.device, q.shape[2], k.shape[2])
    grouped = q.shape[1] != k.shape[1]
    return lambda: (flex_attention(q, k, v, block_mask=causal, enable_gqa=grouped).transpose(1, 2),)


def _contiguous(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    if len(set(inputs.lengths)) > 1:
        raise NotItsTask("sequences of different lengths")
    return dense(inputs)


@needs("flashinfer")
def flashinfer_decode(flashinfer: Any, inputs: Inputs) -> Run:
    """For one query a sequence; planned once, outside of what is timed."""
    workspace = _flashinfer_workspace(inputs.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(*_flashinfer_pages(inputs), **_flashinfer_dtypes(inputs))
    return lambda: (wrapper.run(inputs.q, (inputs.k_pages, inputs.v_pages)),)


@needs("flashinfer")
def flashinfer_prefill(flashinfer: Any, inputs: Inputs) -> Run:
    """For several queries a sequence: verification and chunks of prompts."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_flashinfer_workspace(inputs.q.device), "NHD")
    wrapper.plan(inputs.cu_seqlens, *_flashinfer_pages(inputs), causal=True, **_flashinfer_dtypes(inputs))
    return lambda: (wrapper.run(inputs.q, (inputs.k_pages, inputs.v_pages)),)


@cache
def _flashinfer_workspace(device: torch.device) -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flashinfer_pages(inputs: Inputs) -> tuple[Any, ...]:
    """Where each sequence's pages start in the list of all, that list, how full each last page is; heads; page size."""
    lengths, device = inputs.lengths, inputs.q.device
    counts = [-(-length // PAGE) for length in lengths]
    owned = [inputs.block_tables[row, :count] for row, count in enumerate(counts)]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    fill = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
    heads = inputs.q.shape[1], inputs.k_pages.shape[2], inputs.q.shape[2]
    return starts.to(device), torch.cat(owned), fill.to(device), *heads, PAGE


def _flashinfer_dtypes(inputs: Inputs) -> dict[str, torch.dtype]:
    return {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.k_pages.dtype}


@needs("flash_attn_interface")
def fa3_paged(package: Any, inputs: Inputs) -> Run:
    """FlashAttention-3 over a page table."""
    q = inputs.q.unflatten(0, (-1, inputs.rows))
    pages = {"cache_seqlens": inputs.kv_lengths, "page_table": inputs.block_tables}
    attend = package.flash_attn_with_kvcache
    return lambda: (_first(attend(q, inputs.k_pages, inputs.v_pages, causal=True, **pages)),)


def _vllm_arguments(inputs: Inputs) -> dict[str, Any]:
    return {
        "max_seqlen_q": inputs.rows, "cu_seqlens_q": inputs.cu_seqlens, "max_seqlen_k": max(inputs.lengths),
        "seqused_k": inputs.kv_lengths, "block_table": inputs.block_tables, "causal": True,
    }  # fmt: skip


@needs("vllm.vllm_flash_attn")
def vllm_fa3(package: Any, inputs: Inputs) -> Run:
    """vLLM's build of FlashAttention-3."""
    attend, arguments = package.flash_attn_varlen_func, _vllm_arguments(inputs) | {"fa_version": 3}
    return lambda: (_first(attend(inputs.q, inputs.k_pages, inputs.v_pages, **arguments)),)


@needs("vllm.v1.attention.ops.triton_unified_attention")
def vllm_triton(package: Any, inputs: Inputs) -> Run:
    """vLLM's unified Triton kernel, with the buffers that its backend gives it."""
    (query_heads, head_dim), device = inputs.q.shape[1:], inputs.q.device
    most_sequences = VLLM_SMALLEST_GRID // inputs.k_pages.shape[2]
    partial = (most_sequences, query_heads, VLLM_SEGMENTS)
    out = torch.empty_like(inputs.q)
    arguments = _vllm_arguments(inputs) | {
        "q": inputs.q, "k": inputs.k_pages, "v": inputs.v_pages, "out": out, "softmax_scale": head_dim**-0.5,
        "window_size": (-1, -1), "softcap": 0.0, "q_descale": None, "k_descale": torch.ones(1, device=device),
        "v_descale": torch.ones(1, device=device), "seq_threshold_3D": most_sequences,
        "num_par_softmax_segments": VLLM_SEGMENTS,
        "softmax_segm_output": torch.empty(*partial, head_dim, device=device),
        "softmax_segm_max": torch.empty(partial, device=device),
        "softmax_segm_expsum": torch.empty(partial, device=device),
    }  # fmt: skip

    def run() -> tuple[Tensor]:
        package.unified_attention(**arguments)
        return (out,)

    return run


def _first(result: Any) -> Tensor:
    """Some releases return the output, others a tuple that starts with it."""
    return result[0] if isinstance(result, tuple) else result
