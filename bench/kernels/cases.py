"""The table of the kernel benchmark: parts in the order in which they run, their shapes, and who computes them.

`tiny` are a few shapes that Triton's interpreter gets through in seconds: they prove that a part runs from end to end,
and nothing else. A new part is one more entry in `PARTS`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.kernels.case import Candidate, Case, Inputs, Outputs, Prepare, Run, Shape, of_leaves
from bench.kernels.inputs.attention import PAGE, documents, in_16_bits, last_rows, paged
from bench.kernels.inputs.elementwise import EPS, gate, norm, rotary, routed
from bench.kernels.inputs.linear import adapted, gated
from bench.kernels.inputs.linear import product as weight_product
from bench.kernels.inputs.losses import KINDS, alpha_of, in_chunks, loss, of_means
from bench.kernels.inputs.sampling import (
    DRAFTED,
    are_kept,
    are_possible,
    drafted,
    in_any_order,
    logprobs,
    penalties,
    texts,
    tokens,
)  # fmt: skip
from bench.kernels.peers import attention, elementwise, linear, losses, sampling
from kernels.attention.flash import flash_attention
from kernels.attention.paged import paged_attention, plan_paged_attention
from kernels.attention.rotary import apply_rotary
from kernels.attention.rotary_write import rotate_and_write
from kernels.linear.lora import lora_add
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from kernels.linear.quantized_swiglu import quantized_swiglu
from kernels.losses.linear_cross_entropy import linear_cross_entropy
from kernels.losses.linear_distillation import linear_distillation
from kernels.rms_norm import rms_norm
from kernels.sampling.logit_adjustments import adjust_scores
from kernels.sampling.ngram import find_ngrams
from kernels.sampling.sample import sample_tokens
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.verification import VerifyOutput, verify
from kernels.swiglu import swiglu
from kernels.token_routing import gather_rows, scatter_add_rows, select_tokens


@dataclass(frozen=True)
class Group:
    """Every candidate on every shape that it takes."""

    candidates: Sequence[Candidate]
    tiny: Sequence[Shape]
    shapes: Sequence[Shape]
    measures_memory: bool = False

    def cases(self, *, tiny: bool) -> Iterator[Case]:
        for shape in self.tiny if tiny else self.shapes:
            yield Case(shape, [one for one in self.candidates if one.takes(shape)], self.measures_memory)


class Part:
    """What one run of the driver measures, in under 4 minutes."""

    def __init__(self, text: str, *groups: Group) -> None:
        self.text, self.groups = text, groups

    def cases(self, *, tiny: bool) -> list[Case]:
        return [case for group in self.groups for case in group.cases(tiny=tiny)]


def _ours(prepare: Prepare, **more: Any) -> Candidate:
    return Candidate("potstill", prepare, role="ours", **more)


def _baseline(name: str, prepare: Prepare, **more: Any) -> Candidate:
    return Candidate(name, prepare, role="baseline", **more)


def _on(field: str, *values: Any) -> Callable[[Shape], bool]:
    """Whether a shape has one of these values."""
    return lambda shape: shape[field] in values


# Attention


def _flash(inputs: Inputs, **options: bool) -> attention.Forward:
    return lambda q, k, v: flash_attention(q, k, v, inputs.cu_seqlens, **options)


def _plan(inputs: Inputs) -> Any:
    return plan_paged_attention(inputs.block_tables, inputs.cu_seqlens, inputs.kv_lengths, PAGE)


def _attend(inputs: Inputs, plan: Any) -> Outputs:
    pages = (inputs.k_pages, inputs.v_pages, inputs.block_tables, inputs.cu_seqlens, inputs.kv_lengths)
    return (paged_attention(inputs.q, *pages, plan=plan, k_scales=inputs.k_scales, v_scales=inputs.v_scales),)


def _paged(inputs: Inputs) -> Run:
    """Planned once, outside of what is timed: all layers of a step share a plan."""
    plan = _plan(inputs)
    _attend(inputs, plan)  # a plan lists its work when it is first used
    return lambda: _attend(inputs, plan)


def _to_last_rows(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """The last of the drafted rows sees what a decoded token would see: the same result, from one row."""
    return outputs, (expected[0].unflatten(0, (len(outputs[0]), -1))[:, -1],)


FLASH = [
    _ours(of_leaves(_flash)),
    # Without the promise of the same bits each time, which most peers do not give.
    _baseline(
        "any order", of_leaves(partial(_flash, deterministic=False)), takes=lambda shape: shape.mode != "forward"
    ),
    *(Candidate(backend, of_leaves(attention.sdpa(backend))) for backend in attention.BACKENDS),
    Candidate("fa3", of_leaves(attention.fa3)),
    Candidate("flex", of_leaves(attention.flex), compiles=True),
]
PAGED = [
    _ours(_paged),
    _baseline("with plan", lambda inputs: lambda: _attend(inputs, _plan(inputs))),  # what a step pays once
    Candidate("fa3", attention.fa3_paged),
    Candidate("vllm_fa3", attention.vllm_fa3),
    Candidate("vllm_triton", attention.vllm_triton),
    *(Candidate(f"contiguous_{backend}", attention.contiguous_sdpa(backend)) for backend in attention.BACKENDS),
    Candidate("flashinfer", attention.flashinfer_decode, takes=_on("rows", 1)),
    Candidate("flashinfer", attention.flashinfer_prefill, takes=lambda shape: shape["rows"] > 1),
    Candidate("contiguous_flex", attention.contiguous_flex, compiles=True),
]
ONE_ROW = _baseline("decode", lambda inputs: _paged(last_rows(inputs)), compare=_to_last_rows)
IN_8_BITS = [_ours(_paged), _baseline("bf16 pages", lambda inputs: _paged(in_16_bits(inputs)))]
BYTE_TYPES = (torch.int8, torch.float8_e4m3fn)
LLAMA = (32, 8, 128)
"""Heads of Llama-3-8B."""


def _flash_group(mode: str) -> Group:
    """16k tokens, hidden size 2048."""
    sizes = product((128, 64), (4096, 8192, 16_384, 2048), (1, 4))
    shapes = [documents(16_384 // n, n, 2048 // d, 2048 // d // group, d, mode) for d, n, group in sizes]
    return Group(FLASH, [documents(2, 40, 2, 1, 64, mode)], shapes)


# Around attention


def _write(inputs: Inputs) -> Run:
    new, pages = (inputs.q, inputs.k, inputs.v), (inputs.k_pages, inputs.v_pages)
    tables = (inputs.cos, inputs.sin)
    return lambda: (rotate_and_write(*new, *pages, inputs.slots, rotary=tables), *pages)


def _add(inputs: Inputs) -> Run:
    return lambda: (scatter_add_rows(inputs.x, inputs.index, inputs.delta, inputs.gate, in_place=True),)


NORM = [
    _ours(of_leaves(lambda inputs: lambda x, residual, weight: rms_norm(x, weight, EPS, residual))),
    Candidate("liger", of_leaves(elementwise.liger_norm)),
    Candidate("flashinfer", elementwise.flashinfer_norm, in_place=True, takes=_on("backward", False)),
    Candidate("torch_compile", of_leaves(elementwise.compiled_norm), compiles=True),
]
GATE = [
    _ours(of_leaves(lambda inputs: lambda gate, up: swiglu(gate, up))),
    Candidate("liger", of_leaves(elementwise.liger_swiglu), takes=_on("backward", False)),
    Candidate("liger", of_leaves(elementwise.liger_swiglu), takes=_on("backward", True), in_place=True),
    Candidate("torch_compile", of_leaves(elementwise.compiled_swiglu), compiles=True),
]
ROTARY = [
    _ours(lambda inputs: lambda: apply_rotary(inputs.q, inputs.k, inputs.cos, inputs.sin)),
    Candidate("liger", elementwise.liger_rotary, in_place=True),
    Candidate("torch_compile", elementwise.compiled_rotary, compiles=True),
]
ROTARY_WRITE = [
    _ours(_write, in_place=True),
    Candidate("liger + index_copy", elementwise.liger_rotary_write, in_place=True),
    Candidate("torch_compile", elementwise.compiled_rotary_write, in_place=True, compiles=True),
]
ROUTED = {
    "select": [
        _ours(lambda inputs: lambda: select_tokens(inputs.mask, len(inputs.index))),
        Candidate("torch", elementwise.torch_select),
    ],
    "gather": [
        _ours(lambda inputs: lambda: (gather_rows(inputs.x, inputs.index),)),
        Candidate("torch", elementwise.torch_gather),
    ],
    "add": [_ours(_add, in_place=True), Candidate("torch", elementwise.torch_add, in_place=True)],
}


# Linear

MATRICES = ((4096, 4096), (4096, 14_336), (14_336, 4096), (8192, 28_672))
"""(K, N) of Llama-3-8B, and the largest of its 70B model."""
ROWS = (1, 16, 64, 256, 4, 32, 128, 2, 8)
"""Decode and verification; those with a goal first."""


def _product(inputs: Inputs) -> linear.Product:
    weight = prepare_quantized_weight(inputs.weight)
    return lambda x: quantized_linear(x, weight)


def _adapted(inputs: Inputs) -> linear.Product:
    weight = prepare_quantized_weight(inputs.weight)
    return lambda x: quantized_linear(x, weight, None, inputs.adapters, inputs.slots)


def _adapters_after(inputs: Inputs) -> linear.Product:
    multiply = _product(inputs)
    return lambda x: lora_add(multiply(x), x, inputs.adapters, inputs.slots)


def _gated(inputs: Inputs) -> linear.Product:
    weight = prepare_quantized_weight(inputs.weight)
    return lambda x: quantized_swiglu(x, weight)


def _gate_after(inputs: Inputs) -> linear.Product:
    multiply = _product(inputs)
    return lambda x: swiglu(*multiply(x).chunk(2, dim=1))


def _first(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    return outputs, expected[:1]


def _second(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    return outputs, expected[1:]


def _is_nf4_row(shape: Shape) -> bool:
    return (shape["format"], shape["rows"], shape.mode) == ("nf4", 1, "forward")


def _forward_on(*formats: str) -> Callable[[Shape], bool]:
    return lambda shape: shape["format"] in formats and shape.mode == "forward"


LINEAR = [
    _ours(of_leaves(_product)),
    Candidate("cublas", of_leaves(linear.cublas)),
    Candidate("bitsandbytes", of_leaves(linear.bitsandbytes), takes=_on("format", "nf4")),
    Candidate("torch_int4", of_leaves(linear.torch_int4), takes=_forward_on("int4")),
    Candidate("torch_int8", of_leaves(linear.torch_int8), takes=_forward_on("int8")),
    Candidate("gemlite", of_leaves(linear.gemlite), takes=_forward_on("int4", "int8", "fp8")),
    Candidate("torchao", of_leaves(linear.torchao), takes=_forward_on("int4", "int8", "fp8")),
    Candidate("marlin", of_leaves(linear.vllm_marlin), takes=_forward_on("int4", "int8")),
    Candidate("marlin fp16", of_leaves(linear.marlin), takes=_forward_on("int4")),
    Candidate("bitsandbytes gemv", of_leaves(linear.bitsandbytes_gemv), takes=_is_nf4_row),
]
ADAPTERS = [
    _ours(of_leaves(_adapted), compare=_first),
    _baseline("two calls", of_leaves(_adapters_after), compare=_first),
    _baseline("no adapters", of_leaves(_product), compare=_second),
    Candidate("cublas", of_leaves(linear.cublas_adapters), compare=_first),
]
GATED = [
    _ours(of_leaves(_gated)),
    # Triton's interpreter cuts bf16 off where a GPU rounds; three cuts in a row exceed the bound on the tiny shape.
    _baseline("two calls", of_leaves(_gate_after), takes=lambda shape: shape["k"] > 256),
    Candidate("cublas", of_leaves(linear.cublas_gate)),
]


def _linear_group(name: str) -> Group:
    shapes = [weight_product(name, *matrix, rows) for rows in ROWS for matrix in MATRICES]
    return Group(LINEAR, [weight_product(name, 256, 128, rows) for rows in (1, 3)], shapes)


def _backward(*formats: str, matrices: Sequence[tuple[int, int]] = MATRICES[1:2]) -> list[Shape]:
    sizes = product((2048, 8192), formats, matrices)
    return [weight_product(name, *matrix, rows, backward=True) for rows, name, matrix in sizes]


# Losses

VOCABULARY = 131_072


def _our_loss(inputs: Inputs) -> Run:
    kind, teacher = inputs.shape["kind"], (inputs.teacher, inputs.teacher_head)

    def loss_of(hidden: Tensor, head: Tensor, inputs: Inputs, rows: slice) -> Tensor:
        if not kind:
            return linear_cross_entropy(hidden, head, inputs.labels)
        return linear_distillation(hidden, head, *teacher, inputs.labels, kind=kind, alpha=alpha_of(kind)).loss

    return lambda: in_chunks(inputs, loss_of, len(inputs.student))


LOSSES = [
    _ours(_our_loss),
    Candidate("dense", losses.dense),
    Candidate("chunked", losses.chunked),
    Candidate("liger", losses.liger_cross_entropy, takes=_on("kind", "")),
    Candidate("liger", losses.liger_jsd, compare=of_means, takes=_on("kind", *losses.LIGER_BETA)),
]
_losses = partial(Group, LOSSES, measures_memory=True)


# Sampling

WORDS = 128_256
BATCHES = (1, 16, 64, 256)
MODES = ("temperature", "top-k", "top-p", "min-p", "top-k top-p")
TOPS = (0, 5, 20)


def _penalize(inputs: Inputs) -> Run:
    return lambda: (adjust_scores(inputs.logits, inputs.state, slots=inputs.slots, positions=inputs.positions),)


def _logprobs(inputs: Inputs) -> Run:
    return lambda: tuple(token_logprobs(inputs.logits, inputs.tokens, inputs.shape["num_top"]))


def _verify(inputs: Inputs) -> Run:
    given = {name: getattr(inputs, name) for name in ("counts", "lengths", "parents", "stream")}
    return lambda: tuple(verify(inputs.target_p, inputs.draft_p, inputs.tokens, **given))


def _verified(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    return outputs, expected[: len(VerifyOutput._fields)]


TOKENS = [
    _ours(lambda inputs: lambda: (sample_tokens(inputs.logits, inputs.filters, inputs.stream),), compare=_first),
    Candidate("flashinfer", sampling.flashinfer_sample, compare=are_kept),
    Candidate("torch", sampling.torch_sample, compare=are_kept),
]
PENALTIES = [_ours(_penalize), Candidate("torch", sampling.torch_penalties)]
LOGPROBS = [_ours(_logprobs), Candidate("torch", sampling.torch_logprobs, compare=in_any_order)]
VERIFICATION = [
    _ours(_verify, compare=_verified),
    Candidate("flashinfer", sampling.flashinfer_chain, compare=are_possible, takes=_on("tree", False)),
    Candidate("torch", sampling.torch_chain, compare=are_possible, takes=_on("tree", False)),
    Candidate("torch", sampling.torch_tree, compare=_verified, reads_on_host=True, takes=_on("tree", True)),
]
NGRAMS = [
    _ours(lambda inputs: lambda: find_ngrams(inputs.text, inputs.lengths, DRAFTED)),
    Candidate("torch", sampling.torch_ngrams),
]

# fmt: off
PARTS = {
    "flash_forward": Part(
        "Causal attention of 16k tokens in documents of 2k to 16k, hidden size 2048, as in the FlashAttention papers.",
        _flash_group("forward")),
    "flash_forward_backward": Part(
        "The same shapes, forward and backward together: what a training step pays.", _flash_group("forward+backward")),
    "flash_backward": Part("The same shapes, backward alone.", _flash_group("backward")),
    "decode": Part(
        "One new token a sequence over pages: bound by reading keys and values.",
        Group(PAGED, [paged(3, 1, 40, 4, 2, 64), paged(3, 1, 40, 4, 1, 64, ragged=True)], [
            *(paged(batch, 1, context, 32, 32 // group, 128)
              for context, group, batch in product((8192, 32_768, 2048), (4, 8), (32, 128, 8, 1))),
            paged(32, 1, 32_768, *LLAMA, ragged=True)])),
    "decode_8bit": Part(
        "Decode over pages in int8 and fp8 with a scale per token and head: half the bytes.",
        Group(IN_8_BITS, [paged(2, 1, 40, 4, 2, 64, page_dtype=dtype) for dtype in BYTE_TYPES], [
            paged(batch, 1, context, *LLAMA, page_dtype=dtype) for dtype in BYTE_TYPES
            for batch, context in ((32, 8192), (128, 8192), (8, 8192), (32, 32_768), (1, 32_768))])),
    "verify": Part(
        "The drafted tokens of speculative decoding: 4 or 8 rows a sequence, beside plain decode over the same keys.",
        Group([*PAGED, ONE_ROW], [paged(2, 4, 40, 4, 2, 64)], [
            paged(batch, rows, context, *LLAMA)
            for context, rows, batch in product((8192, 32_768), (4, 8), (1, 8, 32))])),
    "prefill_paged": Part(
        "A chunk of a prompt over the pages of everything before it.",
        Group(PAGED, [paged(2, 20, 40, 4, 2, 64)], [
            paged(*sizes, *LLAMA) for sizes in
            ((1, 2048, 8192), (1, 2048, 32_768), (1, 512, 32_768), (4, 512, 8192), (8, 256, 2048))])),
    "fused": Part(
        "Small kernels around attention, at decode's, verification's and training's numbers of tokens.",
        Group(NORM, [norm(32, 48), norm(32, 48, True)],
              [*(norm(count, 4096) for count in (16, 256, 8192)), norm(8192, 4096, True)]),
        Group(GATE, [gate(32, 80), gate(32, 80, True)],
              [*(gate(count, 14_336) for count in (16, 256, 8192)), gate(8192, 14_336, True)]),
        Group(ROTARY, [rotary(32, 4, 2, 64)], [rotary(8192)]),
        Group(ROTARY_WRITE, [rotary(32, 4, 2, 64, True)], [rotary(count, write=True) for count in (16, 256, 8192)])),
    "quantized_nf4": Part(
        "x Wᵀ with W in NF4, doubly quantized, at the numbers of rows of decode and verification.",
        _linear_group("nf4")),
    "quantized_int4": Part("The same with symmetric INT4 in groups of 128.", _linear_group("int4")),
    "quantized_int8": Part("The same with INT8 and a scale for each output.", _linear_group("int8")),
    "quantized_fp8": Part("The same with FP8 and a scale for each output.", _linear_group("fp8")),
    "quantized_backward": Part(
        "The gradient of x, as QLoRA's backward pass computes it: NF4 on all matrices, the other formats on one.",
        Group(LINEAR, [weight_product(name, 256, 128, 3, backward=True) for name in ("nf4", "int8")],
              [*_backward("nf4", matrices=MATRICES), *_backward("int4", "int8", "fp8")])),
    "quantized_fused": Part(
        "NF4 products with the adapters of 1, 8 or 64 users in a batch of 64 rows; gate and up as one product.",
        Group(ADAPTERS, [adapted(256, 128, 4, 3)],
              [adapted(*matrix, 64, users) for matrix in MATRICES[:3] for users in (1, 8, 64)]),
        Group(GATED, [gated(256, 128, 3)], [gated(4096, 28_672, rows) for rows in (1, 16, 64)])),
    "losses_cross_entropy": Part(
        "Linear + cross-entropy, forward and backward.",
        _losses([loss(24, 200, 32)], [
            loss(8192, VOCABULARY, 4096), loss(8192, VOCABULARY, 2048), loss(2048, VOCABULARY, 2048),
            loss(8192, 49_152, 576)])),
    "losses_distillation": Part(
        "Linear + divergence of two heads, of all kinds, forward and backward.",
        _losses([loss(24, 200, 32, 48, kind) for kind in KINDS], [
            *(loss(8192, VOCABULARY, 2048, 4096, kind) for kind in KINDS),
            *(loss(2048, VOCABULARY, 2048, 4096, kind) for kind in ("forward_kl", "jsd")),
            *(loss(8192, 49_152, 576, 1024, kind) for kind in ("forward_kl", "jsd"))])),
    "sampling_tokens": Part(
        "One token a row by each kind of filter; penalties; log-probabilities of the token and of the most likely.",
        Group(TOKENS, [tokens(mode, 2, 300) for mode in MODES],
              [tokens(mode, batch, WORDS) for mode in MODES for batch in BATCHES]),
        Group(PENALTIES, [penalties(2, 300)], [penalties(batch, WORDS) for batch in BATCHES]),
        Group(LOGPROBS, [logprobs(top, 2, 300) for top in TOPS],
              [logprobs(top, batch, WORDS) for top in TOPS for batch in BATCHES])),
    "sampling_drafts": Part(
        "Verification of drafted chains and trees against the target's distributions; drafts from the text itself.",
        Group(VERIFICATION, [drafted(False, 4, 2, 300), drafted(True, 8, 2, 300)], [
            *(drafted(False, 4, batch, WORDS) for batch in BATCHES),
            *(drafted(True, 8, batch, WORDS) for batch in (1, 16, 64))]),
        Group(NGRAMS, [texts(100, 2)], [texts(8192, batch) for batch in BATCHES])),
    "sampling_routing": Part(
        "Find the selected tokens, gather them, add them back: what a mixture of depths does around a layer.",
        *(Group(ROUTED[verb], [routed(verb, 64, 8, 48)], [routed(verb, 256, 32, 4096), routed(verb, 8192, 1024, 4096)])
          for verb in ROUTED)),
}
# fmt: on


def parts_named(wanted: str) -> list[str]:
    """The part of this name, else all whose names begin with it and an underscore: `quantized` means six."""
    return [wanted] if wanted in PARTS else [name for name in PARTS if name.startswith(f"{wanted}_")]
