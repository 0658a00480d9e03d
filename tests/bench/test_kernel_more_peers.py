"""The adapters of quantized products, losses and sampling, against stand-ins with the arguments of their packages.

The stand-ins read a layout as its package documents it, so a swapped nibble or scale shows on a CPU already.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels import case as case_module
from bench.kernels.case import Case, Inputs, NotItsTask
from bench.kernels.cases import PARTS
from bench.kernels.families import linear as quantized
from bench.kernels.families.linear import QUANTIZERS, product, weight_bytes
from bench.kernels.families.losses import KINDS, loss, plain_loss
from bench.kernels.families.sampling import are_kept, are_possible, penalties
from bench.kernels.timing import Clock, Lab, Limits, run_case
from kernels.linear.quantization import NF4_TABLE
from kernels.losses.linear_distillation import linear_distillation_reference
from kernels.sampling.logit_adjustments import adjust_scores_reference
from tests.compare import check_close

CPU = torch.device("cpu")
LAB = Lab(CPU, Clock(), l2_bytes=0, limits=Limits(1e10, 1e11), rounds=2)
K, N, ROWS, GROUP = 256, 128, 3, 128


def linear_inputs(format_name: str, rows: int = ROWS) -> Inputs:
    return product(format_name, K, N, rows).inputs(CPU)


class Layer:
    """x Wᵀ with a matrix of floats."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


# bitsandbytes: two elements a byte, the first in the high nibble; absmax of 64 neighbours, itself quantized or not


class QuantState(SimpleNamespace):
    def __init__(self, absmax: Tensor, **fields: Any) -> None:
        super().__init__(absmax=absmax, **fields)


def _nf4_weight(codes: Tensor, state: QuantState) -> Tensor:
    assert codes.shape[1] == 1 and state.quant_type == "nf4" and state.blocksize == 64
    nested = getattr(state, "state2", None)
    absmax = state.absmax
    if nested is not None:
        assert nested.blocksize == 256 and nested.dtype == torch.float32
        absmax = nested.code[absmax.long()] * nested.absmax.repeat_interleave(256)[: len(absmax)] + state.offset
    assert absmax.dtype == torch.float32
    nibbles = torch.cat((codes >> 4, codes & 15), dim=1).flatten().long()
    return (torch.tensor(NF4_TABLE)[nibbles].view(-1, 64) * absmax[:, None]).view(state.shape)


def matmul_4bit(A: Tensor, B: Tensor, quant_state: QuantState) -> Tensor:
    return F.linear(A, _nf4_weight(B, quant_state).to(A.dtype))


def gemv_4bit(A: Tensor, B: Tensor, *, state: QuantState) -> Tensor:
    assert len(A) == 1
    return matmul_4bit(A, B, state)


# GemLite: one code a byte, W = (code − zero) · scale


class HqqInt:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        assert dtype == torch.bfloat16

    def from_weights(self, W_q: Tensor, scales: Tensor, zeros: Tensor, bias: None = None) -> Layer:
        assert W_q.dtype == torch.uint8
        shifted = W_q.float().view(N, -1, GROUP) - zeros[..., None].float()
        return Layer((shifted * scales[..., None].float()).view(W_q.shape))


class Weight8Bit(HqqInt):
    def from_weights(self, weight: Tensor, bias: None = None, scales: Tensor | None = None) -> Layer:  # type: ignore[override]
        assert weight.itemsize == 1 and scales is not None
        return Layer(weight.float() * scales)


# torchao


def int4_tile_packed(qdata: Any, scale_and_zero: Tensor, block_size: list[int], shape: torch.Size) -> Tensor:
    assert block_size == [1, GROUP] and shape == (N, K)
    return _tinygemm_weight(qdata, scale_and_zero)


def _tinygemm_weight(codes: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """codes: as they were before packing, two a byte, the even one in the high nibble."""
    nibbles = torch.stack((codes >> 4, codes & 15), dim=-1).view(N, -1, GROUP).float()
    scales, zeros = scales_and_zeros.float().permute(2, 1, 0)[..., None]
    return ((nibbles - 8) * scales + zeros).view(N, K).bfloat16()


def row_scaled(qdata: Tensor, scale: Tensor, block_size: list[int], dtype: torch.dtype) -> Tensor:
    assert block_size == [1, K] and scale.shape == (N, 1)
    return (qdata.float() * scale.float()).to(dtype)


# Marlin: GPTQ's words, 32 bits of neighbours in K; symmetric codes around half of the range


def apply_gptq_marlin_linear(
    input: Tensor, weight: Any, weight_scale: Tensor, weight_zp: Tensor, g_idx: Tensor, g_idx_sort_indices: Tensor,
    workspace: Tensor, wtype: int, output_size_per_partition: int, input_size_per_partition: int, is_k_full: bool,
) -> Tensor:  # fmt: skip
    words, bits = weight
    assert (output_size_per_partition, input_size_per_partition, is_k_full) == (N, K, True) and bits == wtype
    assert not len(weight_zp) and not len(g_idx) and not len(g_idx_sort_indices)
    shifts = torch.arange(0, 32, bits)[None, :, None]
    codes = (words.long()[:, None] >> shifts & 2**bits - 1).reshape(K, N) - 2 ** (bits - 1)
    scales = weight_scale.float().repeat_interleave(K // len(weight_scale), 0)
    return input @ (codes * scales).to(input.dtype)


class MarlinLayer(Layer):
    def __init__(self, infeatures: int, outfeatures: int, groupsize: int) -> None:
        self.groups = infeatures // groupsize

    def to(self, device: torch.device) -> "MarlinLayer":
        return self

    def pack(self, linear: torch.nn.Linear, scales: Tensor) -> None:
        assert scales.shape == (N, self.groups) and scales.dtype == linear.weight.dtype == torch.float16
        codes = linear.weight.data.float().view(N, self.groups, -1) / scales.float()[..., None]
        check_close(codes, codes.round(), dtype=torch.float16)
        assert codes.round().abs().max() <= 8
        self.weight = linear.weight.data


# Liger: means of the divergence, sums of the cross-entropy, and what else it returns


class LigerCrossEntropy:
    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: None, ce_weight: None, ignore_index: int,
        lse_square_scale: float, label_smoothing: float, reduction: str, softcap: None, return_z_loss: bool,
        accum_dtype: torch.dtype,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (ignore_index, lse_square_scale, label_smoothing, return_z_loss) == (-100, 0.0, 0.0, False)
        assert accum_dtype == torch.float32
        return F.cross_entropy((_input @ weight.t()).float(), target, reduction=reduction), None, None, None


class LigerJsd:
    @staticmethod
    def apply(
        student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor, jsd_beta: float, ignore_index: int, temperature: float, accum_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        assert (ignore_index, temperature, accum_dtype) == (-100, 1.0, torch.float32)
        sums = linear_distillation_reference(
            student_input.float(), student_weight.float(), teacher_input.float(), teacher_weight.float(), shift_labels,
            kind="jsd", alpha=jsd_beta,
        )  # fmt: skip
        return sums.loss / len(shift_labels)


# FlashInfer: tokens and distributions, int32


class FlashInferSampling:
    """Takes the most probable token that a filter leaves."""

    @staticmethod
    def softmax(logits: Tensor, temperature: Tensor) -> Tensor:
        assert logits.dtype == torch.float32
        return (logits / temperature[:, None]).softmax(dim=-1)

    @staticmethod
    def sampling_from_logits(logits: Tensor, *, seed: Tensor, offset: Tensor) -> Tensor:
        assert seed.dtype == offset.dtype == torch.int64 and len(seed) == len(offset) == 1
        return logits.argmax(dim=-1).int()

    @staticmethod
    def filtered(scores: Tensor, limit: Tensor, *more: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        assert limit.shape == scores.shape[:1]
        return FlashInferSampling.sampling_from_logits(scores, seed=seed, offset=offset)

    top_k_sampling_from_probs = top_p_sampling_from_probs = min_p_sampling_from_probs = filtered
    top_k_top_p_sampling_from_logits = filtered

    @staticmethod
    def chain_speculative_sampling(
        draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, *, seed: Tensor, offset: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rejects every draft that it may; then takes what the target prefers most over the draft."""
        assert draft_token_ids.dtype == torch.int32 and draft_probs.shape[1] + 1 == target_probs.shape[1]
        ids = torch.full((len(draft_token_ids), target_probs.shape[1]), -1, dtype=torch.int32)
        for row, tokens in enumerate(draft_token_ids.tolist()):
            for node, token in enumerate(tokens):
                left = target_probs[row, node] - draft_probs[row, node]
                if left[token] < 0:
                    break
                ids[row, node] = token
            else:
                node, left = len(tokens), target_probs[row, -1]
            ids[row, node] = left.argmax()
        return ids, ids[:, 0], ids[:, 0]


MODULES = {
    "bitsandbytes": SimpleNamespace(
        matmul_4bit=matmul_4bit, functional=SimpleNamespace(QuantState=QuantState, gemv_4bit=gemv_4bit)
    ),
    "gemlite": SimpleNamespace(
        helper=SimpleNamespace(A16W4_HQQ_INT=HqqInt, A16W8_INT8=Weight8Bit, A16W8_FP8=Weight8Bit)
    ),
    "torchao.quantization": SimpleNamespace(
        Int4TilePackedTo4dTensor=int4_tile_packed, Int8Tensor=row_scaled, Float8Tensor=row_scaled
    ),
    "vllm.model_executor.layers.quantization.utils.marlin_utils": SimpleNamespace(
        marlin_make_empty_g_idx=lambda device: torch.empty(0, dtype=torch.int),
        marlin_permute_scales=lambda s, size_k, size_n, group_size: s,
        marlin_make_workspace_new=lambda device: torch.zeros(1),
        apply_gptq_marlin_linear=apply_gptq_marlin_linear,
    ),
    "vllm._custom_ops": SimpleNamespace(gptq_marlin_repack=lambda words, perm, k, n, bits: (words, bits)),
    "vllm.scalar_type": SimpleNamespace(scalar_types=SimpleNamespace(uint4b8=4, uint8b128=8)),
    "marlin": SimpleNamespace(Layer=MarlinLayer),
    "liger_kernel.ops": SimpleNamespace(
        LigerFusedLinearCrossEntropyFunction=LigerCrossEntropy, LigerFusedLinearJSDFunction=LigerJsd
    ),
    "flashinfer.sampling": FlashInferSampling,
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package, and a GPU for who asks; what torch packs for tinygemm stays as it is."""
    monkeypatch.setattr(case_module, "find_spec", lambda name: name)
    monkeypatch.setattr(case_module, "import_module", MODULES.__getitem__)
    monkeypatch.setattr(quantized, "_need_gpu", lambda inputs: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(quantized, "_tuned_gemlite", quantized._tuned_gemlite.__wrapped__)
    aten = SimpleNamespace(
        _convert_weight_to_int4pack=lambda codes, inner_tiles: codes,
        _weight_int4pack_mm=lambda x, codes, group, scales: F.linear(x, _tinygemm_weight(codes, scales)),
        _weight_int8pack_mm=torch.ops.aten._weight_int8pack_mm,
    )
    monkeypatch.setattr(torch.ops, "aten", aten)


def adapters() -> list[tuple[str, str]]:
    names = {
        "nf4": ("bitsandbytes",),
        "int4": ("torch_int4", "gemlite", "torchao", "vllm_marlin", "marlin"),
        "int8": ("torch_int8", "gemlite", "torchao", "vllm_marlin"),
        "fp8": ("gemlite", "torchao"),
    }
    return [(format_name, name) for format_name, listed in names.items() for name in listed]


@pytest.mark.parametrize(("format_name", "adapter"), adapters())
@pytest.mark.usefixtures("installed")
def test_quantized_peers_multiply_with_our_codes(format_name: str, adapter: str) -> None:
    inputs = linear_inputs(format_name)
    multiply = getattr(quantized, adapter)(inputs)
    check_close(multiply(inputs.x), inputs.shape.reference(inputs)[0], dtype=torch.bfloat16)


@pytest.mark.usefixtures("installed")
def test_bitsandbytes_for_one_row() -> None:
    inputs = linear_inputs("nf4", rows=1)
    multiply = quantized.bitsandbytes_gemv(inputs)
    check_close(multiply(inputs.x), inputs.shape.reference(inputs)[0], dtype=torch.bfloat16)


@pytest.mark.parametrize("format_name", QUANTIZERS)
def test_who_needs_a_gpu_says_so(format_name: str) -> None:
    inputs = linear_inputs(format_name)
    adapter = {"nf4": quantized.bitsandbytes_gemv, "int4": quantized.torch_int4}.get(format_name, quantized.gemlite)
    with pytest.raises(NotItsTask, match="only on a GPU"):
        adapter(inputs)


def test_weights_cost_what_the_formats_store() -> None:
    assert weight_bytes("nf4", 4096, 4096) / 4096**2 == pytest.approx(4.127 / 8, rel=1e-3)
    assert weight_bytes("int4", 4096, 4096) * 8 == 4.125 * 4096**2
    assert weight_bytes("int8", 10, 20) == 220


def test_gemlite_gets_the_tuning_of_the_same_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    package = SimpleNamespace(__file__="/packages/gemlite/__init__.py", load_config=loaded.append)
    monkeypatch.setattr(quantized, "installed", lambda name: package)
    for gpu in ("NVIDIA H200", "NVIDIA A100"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=gpu: gpu)
        assert quantized._tuned_gemlite.__wrapped__() is package
    assert loaded == ["/packages/gemlite/configs/h100.json"]


def cases_with(part: str, candidate: str) -> list[Case]:
    return [case for case in PARTS[part].cases(tiny=True) if candidate in {one.name for one in case.candidates}]


@pytest.mark.parametrize(
    ("part", "peer", "count"),
    [
        ("losses_cross_entropy", "liger", 1),
        ("losses_distillation", "liger", 3),
        ("sampling_tokens", "flashinfer", 5),
        ("sampling_drafts", "flashinfer", 1),
    ],
)
@pytest.mark.usefixtures("installed")
def test_peers_of_losses_and_sampling_are_right(part: str, peer: str, count: int) -> None:
    cases = cases_with(part, peer)
    assert len(cases) == count
    for case in cases:
        found = run_case(case, LAB, 60.0)["candidates"]
        assert {one["status"] for one in found.values()} == {"measured"}, found


@pytest.mark.parametrize("kind", KINDS)
def test_plain_losses_are_the_reference(kind: Any) -> None:
    inputs = loss(6, 40, 16, 24, kind).inputs(CPU)
    heads = {name: x.double() for name, x in vars(inputs).items() if name.startswith(("student", "teacher"))}
    plain = plain_loss(heads["student"], heads["student_head"], inputs.replace(**heads), slice(None))
    alpha = 0.5 if kind == "jsd" else 0.1
    names = ("student", "student_head", "teacher", "teacher_head")
    sums = linear_distillation_reference(*(heads[name] for name in names), inputs.labels, kind=kind, alpha=alpha)
    check_close(plain.double(), sums.loss, dtype=torch.float32)


def test_penalties_of_the_benchmark_are_the_reference() -> None:
    inputs = penalties(3, 50).inputs(CPU)
    expected = adjust_scores_reference(inputs.logits, inputs.state, slots=inputs.slots, positions=inputs.positions)
    check_close(inputs.shape.reference(inputs)[0], expected)


def test_a_token_that_a_filter_dropped_is_seen() -> None:
    probabilities = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    for tokens, kept in (([1, 0], [True, True]), ([1, 1], [True, False]), ([3, -1], [False, False])):
        (found,), (wanted,) = are_kept((torch.tensor(tokens),), (torch.empty(0), probabilities))
        assert found.tolist() == kept and wanted.all()


def test_a_commitment_that_cannot_be_is_seen() -> None:
    """One draft, token 0, of q = (.8, .2, 0) where p = (.5, .3, .2): token 1 or 2 replace it; 1 follows it."""
    target_p = torch.tensor([[[0.5, 0.3, 0.2], [0.0, 1.0, 0.0]]])
    expected = (target_p, torch.tensor([[[0.8, 0.2, 0.0]]]), torch.tensor([[0]]))
    possible = {(0, 1), (1, -1), (2, -1)}
    for committed in [(first, second) for first in (-1, 0, 1, 2, 3) for second in (-1, 0, 1, 2, 3)]:
        (found,), _ = are_possible((torch.tensor([committed]),), expected)
        assert found.tolist() == [committed in possible], committed
