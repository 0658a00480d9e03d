"""The adapters of packages that are not installed here, against stand-ins with their documented arguments.

The stand-ins compute with our references, so a wrong page list, layout or argument shows on a CPU already.
"""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kernels import case as case_module
from bench.kernels.case import NotInstalled, Shape
from bench.kernels.cases import PARTS
from bench.kernels.families import attention, elementwise
from bench.kernels.families.attention import documents, paged
from bench.kernels.families.elementwise import norm, rotary
from kernels.attention.flash import flash_attention_reference
from kernels.attention.paged import paged_attention_reference
from kernels.rms_norm import rms_norm_reference
from tests.compare import check_all_close, check_close

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU = torch.device("cpu")
SHAPES = [paged(3, 1, 40, 4, 2, 16, ragged=True), paged(2, 5, 37, 4, 2, 16)]


def rows_ends(q: Tensor) -> Tensor:
    return torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1])


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: None = None, causal: bool = False) -> Tensor:
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    return flash_attention_reference(*flat, rows_ends(q), causal=causal).view(q.shape)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, causal: bool = False
) -> Tensor:
    assert causal
    out = paged_attention_reference(q.flatten(0, 1), k_cache, v_cache, page_table, rows_ends(q), cache_seqlens)
    return out.view(q.shape)


class FlashInferWrapper:
    """One wrapper for both kinds: decode has no starts of queries and takes one a sequence."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, use_tensor_cores: bool | None = None) -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        self.decodes = use_tensor_cores is not None

    def plan(self, *arguments: Any, causal: bool = False, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        if self.decodes:
            self.starts, *arguments = torch.arange(len(arguments[2]) + 1), *arguments
        else:
            assert causal
            self.starts, *arguments = arguments
        indptr, self.indices, last_page_len, *self.heads, self.page_size = arguments
        assert {x.dtype for x in (indptr, self.indices, last_page_len)} == {torch.int32}
        self.indptr = indptr.tolist()
        self.lengths = (indptr.diff() - 1) * self.page_size + last_page_len

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        k_pages, v_pages = paged_kv_cache
        assert self.heads == [q.shape[1], k_pages.shape[2], q.shape[2]] and self.page_size == k_pages.shape[1]
        owned = [self.indices[start:stop] for start, stop in zip(self.indptr, self.indptr[1:], strict=False)]
        tables = torch.nn.utils.rnn.pad_sequence(owned, batch_first=True)
        return paged_attention_reference(q, k_pages, v_pages, tables, self.starts, self.lengths)


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual += x
    x.copy_(rms_norm_reference(residual, weight, eps))


def unified_attention(
    *, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, softmax_scale: float,
    block_table: Tensor, causal: bool, window_size: tuple[int, int], max_seqlen_q: int, **others: Any
) -> None:  # fmt: skip
    assert causal and window_size == (-1, -1) and max_seqlen_q == cu_seqlens_q.diff().max()
    out.copy_(paged_attention_reference(q, k, v, block_table, cu_seqlens_q, seqused_k, scale=softmax_scale))


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int, seqused_k: Tensor,
    block_table: Tensor, causal: bool, fa_version: int
) -> Tensor:  # fmt: skip
    assert causal and fa_version == 3 and max_seqlen_k == seqused_k.max()
    return paged_attention_reference(q, k, v, block_table, cu_seqlens_q, seqused_k)


class LigerRope:
    """Rotates contiguous [1, T, H, d] in place, with the sines and cosines of the first half of each row."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        for x in (q, k):
            half = x.shape[-1] // 2
            first, second = x[..., :half].float(), x[..., half:].float()
            c, s = (table[:, None, :, :half] for table in (cos, sin))
            x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
        return q, k


class LigerNorm:
    @staticmethod
    def apply(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Any:
        assert (offset, mode, in_place) == (0.0, "llama", False)
        return rms_norm_reference(x + residual, weight, eps), x + residual


MODULES = {
    "flash_attn_interface": SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_with_kvcache=flash_attn_with_kvcache
    ),
    "flashinfer": SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FlashInferWrapper,
        BatchPrefillWithPagedKVCacheWrapper=FlashInferWrapper,
        fused_add_rmsnorm=fused_add_rmsnorm,
    ),
    "vllm.vllm_flash_attn": SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func),
    "vllm.v1.attention.ops.triton_unified_attention": SimpleNamespace(unified_attention=unified_attention),
    "liger_kernel.ops": SimpleNamespace(LigerRopeFunction=LigerRope, LigerFusedAddRMSNormFunction=LigerNorm),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_module, "find_spec", lambda name: name)
    monkeypatch.setattr(case_module, "import_module", MODULES.__getitem__)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("adapter", ["fa3_paged", "vllm_fa3", "vllm_triton", "flashinfer"])
@pytest.mark.usefixtures("installed")
def test_peers_over_pages(shape: Shape, adapter: str) -> None:
    inputs = shape.inputs(CPU)
    out = getattr(attention, adapter)(inputs)()
    check_close(out.reshape(inputs.q.shape), shape.reference(inputs)[0])


@pytest.mark.parametrize("dense", [attention.SDPA["sdpa_flash"], attention.flex], ids=["sdpa_flash", "flex"])
def test_contiguous_peers(dense: Any) -> None:
    inputs = SHAPES[1].inputs(CPU)
    try:
        out = attention.contiguous(dense)(inputs)()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"not on a CPU: {error}")
    check_close(out.reshape(inputs.q.shape), SHAPES[1].reference(inputs)[0])


@pytest.mark.usefixtures("installed")
def test_dense_peers() -> None:
    shape = documents(2, 30, 4, 2, 16)
    inputs = shape.inputs(CPU)
    dense = (attention.of_documents(one) for one in (attention.SDPA["sdpa_flash"], attention.flex))
    for adapter in (*dense, attention.fa3):
        out = adapter(inputs)(inputs.q, inputs.k, inputs.v)
        check_close(out.reshape(inputs.q.shape), shape.reference(inputs)[0])


@pytest.mark.usefixtures("installed")
def test_small_peers() -> None:
    written = rotary(32, 4, 2, 16, write=True)
    inputs = written.inputs(CPU)
    expected = written.reference(inputs)
    for adapter in (elementwise.compiled_rotary_write, elementwise.liger_rotary_write):
        check_all_close(adapter(deepcopy(inputs))(), expected)
    normed = norm(8, 48)
    inputs = normed.inputs(CPU)
    leaves, wanted = (inputs.x, inputs.residual, inputs.weight), normed.reference(inputs)
    check_all_close(elementwise.plain_norm(*leaves), wanted)
    check_all_close(elementwise.liger_norm(inputs)(*leaves), wanted)
    check_all_close(elementwise.flashinfer_norm(inputs)(*leaves), wanted)


def test_what_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_module, "find_spec", lambda name: None)
    packages = {"fa3", "vllm_fa3", "vllm_triton", "flashinfer", "liger", "liger + index_copy"}
    packages |= {"bitsandbytes", "torchao", "marlin", "marlin fp16"}
    seen = set()
    for part in PARTS.values():
        for case in part.cases(tiny=True):
            named = [candidate for candidate in case.candidates if candidate.name in packages]
            seen |= {candidate.name for candidate in named}
            inputs = case.shape.inputs(CPU) if named else None
            for candidate in named:
                with pytest.raises(NotInstalled):
                    candidate.prepare(inputs)
    assert seen == packages
