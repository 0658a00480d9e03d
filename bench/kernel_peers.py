"""Who else computes attention and the small kernels, each behind a few lines: torch's own, and what is installed.

An adapter takes one set of inputs and returns the call to time, or None where its package is not installed. Plans,
copies into another layout and compilation happen in the adapter; the call is what a peer would do in every layer. An
adapter may raise: the benchmark writes down why. Dense attention views queries as [B, s, H, d] or [B, H, s, d]: the
memory is the same for everybody.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.kernel_cases import NotItsTask, Run, installed
from bench.kernel_shapes import EPS, PAGE, AttentionInputs, GateInputs, NormInputs, PagedInputs, RotaryInputs

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


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """torch.compile for the shape at hand; on the CPU, where only --tiny comes, the function as it is."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


# Dense causal attention


def sdpa(backend: str) -> Callable[[AttentionInputs], Forward]:
    def adapt(inputs: AttentionInputs) -> Forward:
        grouped = inputs.q.shape[1] != inputs.k.shape[1]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (inputs.dense(x).transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(BACKENDS[backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

        return attend

    return adapt


def flex(inputs: AttentionInputs) -> Forward:
    length = len(inputs.q) // inputs.batch
    flex_attention, causal = _flex(inputs.q.device, length, length)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (inputs.dense(x).transpose(1, 2) for x in (q, k, v))
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


def fa3(inputs: AttentionInputs) -> Forward | None:
    """FlashAttention-3's own package."""
    if (package := installed("flash_attn_interface")) is None:
        return None
    flash_attn_func = package.flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _first(flash_attn_func(inputs.dense(q), inputs.dense(k), inputs.dense(v), causal=True))

    return attend


# Attention over pages


def contiguous_sdpa(backend: str) -> Callable[[PagedInputs], Run]:
    """An easier problem, for scale: the keys lie in one piece, and no table has to be read."""

    def adapt(inputs: PagedInputs) -> Run:
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


def contiguous_flex(inputs: PagedInputs) -> Run:
    """FlexAttention over keys in one piece."""
    q, k, v = _contiguous(inputs)
    flex_attention, causal = _flex(inputs.q.device, q.shape[2], k.shape[2])
    grouped = q.shape[1] != k.shape[1]
    return lambda: (flex_attention(q, k, v, block_mask=causal, enable_gqa=grouped).transpose(1, 2),)


def _contiguous(inputs: PagedInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as [B, H, s, d]."""
    if len(set(inputs.lengths)) > 1:
        raise NotItsTask("sequences of different lengths")
    q = inputs.q.unflatten(0, (-1, inputs.rows))
    dense = (q, inputs.dense(inputs.k_pages), inputs.dense(inputs.v_pages))
    q, k, v = (x.transpose(1, 2) for x in dense)
    return q, k, v


def flashinfer_decode(inputs: PagedInputs) -> Run | None:
    """For one query a sequence; planned once, outside of what is timed."""
    if (flashinfer := installed("flashinfer")) is None:
        return None
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _flashinfer_workspace(inputs.q.device), "NHD", use_tensor_cores=True
    )
    wrapper.plan(*_flashinfer_pages(inputs), *_flashinfer_heads(inputs), PAGE, **_flashinfer_dtypes(inputs))
    return lambda: (wrapper.run(inputs.q, (inputs.k_pages, inputs.v_pages)),)


def flashinfer_prefill(inputs: PagedInputs) -> Run | None:
    """For several queries a sequence: verification and chunks of prompts."""
    if (flashinfer := installed("flashinfer")) is None:
        return None
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_flashinfer_workspace(inputs.q.device), "NHD")
    pages, heads = _flashinfer_pages(inputs), _flashinfer_heads(inputs)
    wrapper.plan(inputs.cu_seqlens, *pages, *heads, PAGE, causal=True, **_flashinfer_dtypes(inputs))
    return lambda: (wrapper.run(inputs.q, (inputs.k_pages, inputs.v_pages)),)


@cache
def _flashinfer_workspace(device: torch.device) -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flashinfer_pages(inputs: PagedInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Where each sequence's pages start in the list of all, that list, and how full each last page is; int32."""
    counts = [-(-length // PAGE) for length in inputs.lengths]
    owned = [inputs.block_tables[row, :count] for row, count in enumerate(counts)]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    fill = torch.tensor([(length - 1) % PAGE + 1 for length in inputs.lengths], dtype=torch.int32)
    return starts.to(inputs.q.device), torch.cat(owned), fill.to(inputs.q.device)


def _flashinfer_heads(inputs: PagedInputs) -> tuple[int, int, int]:
    return inputs.q.shape[1], inputs.k_pages.shape[2], inputs.q.shape[2]


def _flashinfer_dtypes(inputs: PagedInputs) -> dict[str, torch.dtype]:
    return {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.k_pages.dtype}


def fa3_paged(inputs: PagedInputs) -> Run | None:
    """FlashAttention-3 over a page table."""
    if (package := installed("flash_attn_interface")) is None:
        return None
    attend = package.flash_attn_with_kvcache
    q = inputs.q.unflatten(0, (-1, inputs.rows))
    pages = {"cache_seqlens": inputs.kv_lengths, "page_table": inputs.block_tables}
    return lambda: (_first(attend(q, inputs.k_pages, inputs.v_pages, causal=True, **pages)),)


def vllm_fa3(inputs: PagedInputs) -> Run | None:
    """vLLM's build of FlashAttention-3."""
    if (package := installed("vllm.vllm_flash_attn")) is None:
        return None
    attend = package.flash_attn_varlen_func
    arguments = {
        "max_seqlen_q": inputs.rows,
        "cu_seqlens_q": inputs.cu_seqlens,
        "max_seqlen_k": max(inputs.lengths),
        "seqused_k": inputs.kv_lengths,
        "block_table": inputs.block_tables,
        "causal": True,
        "fa_version": 3,
    }
    return lambda: (_first(attend(inputs.q, inputs.k_pages, inputs.v_pages, **arguments)),)


def vllm_triton(inputs: PagedInputs) -> Run | None:
    """vLLM's unified Triton kernel, with the buffers that its backend gives it."""
    if (package := installed("vllm.v1.attention.ops.triton_unified_attention")) is None:
        return None
    attend = package.unified_attention
    (query_heads, head_dim), device = inputs.q.shape[1:], inputs.q.device
    most_sequences = VLLM_SMALLEST_GRID // inputs.k_pages.shape[2]
    partial = (most_sequences, query_heads, VLLM_SEGMENTS)
    out = torch.empty_like(inputs.q)
    arguments = {
        "q": inputs.q,
        "k": inputs.k_pages,
        "v": inputs.v_pages,
        "out": out,
        "cu_seqlens_q": inputs.cu_seqlens,
        "max_seqlen_q": inputs.rows,
        "seqused_k": inputs.kv_lengths,
        "max_seqlen_k": max(inputs.lengths),
        "softmax_scale": head_dim**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": inputs.block_tables,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": torch.ones(1, device=device),
        "v_descale": torch.ones(1, device=device),
        "seq_threshold_3D": most_sequences,
        "num_par_softmax_segments": VLLM_SEGMENTS,
        "softmax_segm_output": torch.empty(*partial, head_dim, device=device),
        "softmax_segm_max": torch.empty(partial, device=device),
        "softmax_segm_expsum": torch.empty(partial, device=device),
    }

    def run() -> tuple[Tensor]:
        attend(**arguments)
        return (out,)

    return run


# Small kernels


def plain_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    summed = x + residual
    wide = summed.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return normalized.to(x.dtype) * weight, summed


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """For the tables of `rotary_tables`, whose sines are negative in the first half."""
    half = q.shape[-1] // 2
    return (q * cos + q.roll(half, dims=-1) * sin).to(q.dtype), (k * cos + k.roll(half, dims=-1) * sin).to(k.dtype)


def plain_rotary_write(inputs: RotaryInputs) -> Run:
    write = compiled(_plain_rotary_write, inputs.q.device)
    return lambda: write(*vars(inputs).values())


def _plain_rotary_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> tuple[Tensor, ...]:
    q, k = plain_rotary(q, k, cos, sin)
    k_pages.flatten(0, 1).index_copy_(0, slots, k)
    v_pages.flatten(0, 1).index_copy_(0, slots, v)
    return q, k_pages, v_pages


def liger_rotary(inputs: RotaryInputs) -> Run | None:
    """Liger's rotation, which overwrites q and k."""
    if (liger := installed("liger_kernel.ops")) is None:
        return None
    rope = liger.LigerRopeFunction
    q, k = inputs.q.transpose(0, 1)[None], inputs.k.transpose(0, 1)[None]
    # Liger reads the first half of each row and subtracts by itself: the second half of ours has the plain sines.
    half = inputs.sin.shape[-1] // 2
    cos, sin = inputs.cos[None, :, 0], inputs.sin[:, 0, half:].repeat(1, 2)[None]

    def run() -> tuple[Tensor, ...]:
        rotated = rope.apply(q, k, cos, sin)
        return rotated[0][0].transpose(0, 1), rotated[1][0].transpose(0, 1)

    return run


def liger_rotary_write(inputs: RotaryInputs) -> Run | None:
    """Liger's rotation and two index copies."""
    rotate = liger_rotary(inputs)
    if rotate is None:
        return None
    k_slots, v_slots = inputs.k_pages.flatten(0, 1), inputs.v_pages.flatten(0, 1)

    def run() -> tuple[Tensor, ...]:
        q, k = rotate()
        k_slots.index_copy_(0, inputs.slots, k)
        v_slots.index_copy_(0, inputs.slots, inputs.v)
        return q, inputs.k_pages, inputs.v_pages

    return run


def liger_norm(inputs: NormInputs) -> Callable[..., tuple[Tensor, ...]] | None:
    """Liger's fused addition and normalisation."""
    if (liger := installed("liger_kernel.ops")) is None:
        return None
    function = liger.LigerFusedAddRMSNormFunction
    return lambda x, residual, weight: function.apply(x, residual, weight, EPS, 0.0, "llama", False)


def flashinfer_norm(inputs: NormInputs) -> Run | None:
    """FlashInfer's fused addition and normalisation, which overwrites both of its inputs."""
    if (flashinfer := installed("flashinfer")) is None:
        return None
    function = flashinfer.fused_add_rmsnorm

    def run() -> tuple[Tensor, ...]:
        function(inputs.x, inputs.residual, inputs.weight, EPS)
        return inputs.x, inputs.residual

    return run


def liger_swiglu(inputs: GateInputs) -> Callable[..., Tensor] | None:
    liger = installed("liger_kernel.ops")
    return None if liger is None else liger.LigerSiLUMulFunction.apply


def _first(result: Any) -> Tensor:
    """Some releases return the output, others a tuple that starts with it."""
    return result[0] if isinstance(result, tuple) else result
