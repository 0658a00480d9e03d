"""The table of the kernel benchmark: parts in the order in which they run, their shapes, and who computes them.

`tiny` are a few shapes that Triton's interpreter gets through in seconds: they prove that a part runs from end to end,
and nothing else. A new part is one more entry in `PARTS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Adapt, Call, Candidate, Case, Inputs, Outputs, Shape, by_name
from bench.kernels.families import attention, elementwise, experts, linear, losses, sampling
from bench.kernels.families.attention import documents, paged
from bench.kernels.families.elementwise import EPS, gate, norm, rotary, routed
from bench.kernels.families.losses import KINDS, loss
from bench.parts import parts_of_family
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


class Part:
    """What is measured in one go, in under 4 minutes."""

    def __init__(self, text: str, *groups: Group) -> None:
        self.text, self.groups = text, groups

    def cases(self, *, tiny: bool) -> list[Case]:
        """Those of all groups, in order."""
        return [
            Case(shape, [one for one in group.candidates if one.takes(shape)], group.measures_memory)
            for group in self.groups
            for shape in (group.tiny if tiny else group.shapes)
        ]


_ours = partial(Candidate, "potstill", role="ours")
_baseline = partial(Candidate, role="baseline")


def _on(**wanted: Sequence[Any]) -> Callable[[Shape], bool]:
    """Whether each of these fields of a shape, or its mode, has one of these values."""
    return lambda shape: all(({"mode": shape.mode} | shape.fields)[field] in wanted[field] for field in wanted)


def _only(start: int, stop: int) -> Callable[[Outputs, Outputs], tuple[Outputs, Outputs]]:
    """Compare with these of the reference's results."""
    return lambda outputs, expected: (outputs, expected[start:stop])


# Attention


def over_pages(inputs: Inputs, plans_anew: bool = False) -> Call:
    """Ours, planned once, outside of what is timed: all layers of a step share a plan; or in each call."""
    attend = by_name(paged_attention)(inputs)
    plan_anew = partial(by_name(plan_paged_attention)(inputs), page_size=attention.PAGE)
    if plans_anew:
        return lambda: attend(plan=plan_anew())
    plan = plan_anew()
    attend(plan=plan)  # a plan lists its work when it is first used
    return lambda: attend(plan=plan)


def _to_last_rows(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    """The last of the drafted rows sees what a decoded token would see: the same result, from one row."""
    return outputs, (expected[0].unflatten(0, (len(outputs[0]), -1))[:, -1],)


_repeating_bits = by_name(partial(flash_attention, deterministic=True))
FLASH = [
    _ours(by_name(flash_attention)),
    # With the promise of the same bits each time, which most peers do not give.
    _baseline("same bits", _repeating_bits, takes=_on(mode=("backward", "forward+backward"))),
    *(Candidate(name, attention.of_documents(dense)) for name, dense in attention.SDPA.items()),
    Candidate("fa3", attention.fa3),
    Candidate("flex", attention.of_documents(attention.flex), compiles=True),
]
PAGED = [
    _ours(over_pages),
    _baseline("with plan", partial(over_pages, plans_anew=True)),  # what a step pays once
    Candidate("fa3", attention.fa3_paged),
    Candidate("vllm_fa3", attention.vllm_fa3),
    Candidate("vllm_triton", attention.vllm_triton),
    *(Candidate(f"contiguous_{name}", attention.contiguous(dense)) for name, dense in attention.SDPA.items()),
    Candidate("flashinfer", attention.flashinfer),
    Candidate("contiguous_flex", attention.contiguous(attention.flex), compiles=True),
]
ONE_ROW = _baseline("decode", lambda inputs: over_pages(attention.last_rows(inputs)), compare=_to_last_rows)
IN_8_BITS = [_ours(over_pages), _baseline("bf16 pages", lambda inputs: over_pages(attention.in_16_bits(inputs)))]
BYTE_TYPES = (torch.int8, torch.float8_e4m3fn)
LLAMA = (32, 8, 128)
"""Heads of Llama-3-8B."""


def _flash_group(mode: str) -> Group:
    """16k tokens, hidden size 2048."""
    sizes = product((128, 64), (4096, 8192, 16_384, 2048), (1, 4))
    shapes = [documents(16_384 // n, n, 2048 // d, 2048 // d // group, d, mode) for d, n, group in sizes]
    return Group(FLASH, [documents(2, 40, 2, 1, 64, mode)], shapes)


# Around attention


def _write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Outputs:
    return rotate_and_write(q, k, v, k_pages, v_pages, slots, rotary=(cos, sin)), k_pages, v_pages


NORM = [
    _ours(by_name(partial(rms_norm, eps=EPS))),
    Candidate("liger", elementwise.liger_norm),
    Candidate("flashinfer", elementwise.flashinfer_norm, in_place=True, takes=_on(backward=(False,))),
    Candidate("torch_compile", by_name(elementwise.plain_norm, compiles=True), compiles=True),
]
GATE = [
    _ours(by_name(swiglu)),
    Candidate("liger", elementwise.liger_swiglu, takes=_on(backward=(False,))),
    Candidate("liger", elementwise.liger_swiglu, takes=_on(backward=(True,)), in_place=True),
    Candidate("torch_compile", by_name(lambda gate, up: F.silu(gate) * up, compiles=True), compiles=True),
]
ROTARY = [
    _ours(by_name(apply_rotary)),
    Candidate("liger", elementwise.liger_rotary, in_place=True),
    Candidate("torch_compile", by_name(elementwise.plain_rotary, compiles=True), compiles=True),
]
ROTARY_WRITE = [
    _ours(by_name(_write), in_place=True),
    Candidate("liger + index_copy", elementwise.liger_rotary_write, in_place=True),
    Candidate("torch_compile", elementwise.compiled_rotary_write, in_place=True, compiles=True),
]
ROUTED = {
    "select": [_ours(by_name(select_tokens)), Candidate("torch", elementwise.torch_select)],
    "gather": [_ours(by_name(gather_rows)), Candidate("torch", by_name(elementwise.torch_gather))],
    "add": [
        _ours(by_name(partial(scatter_add_rows, in_place=True)), in_place=True),
        Candidate("torch", by_name(elementwise.torch_add), in_place=True),
    ],
}
LEADING = [
    _ours(by_name(linear.of_leading_rows)),
    Candidate("torch, after a wait", by_name(linear.wait_and_multiply)),
    Candidate("torch, all rows", by_name(linear.all_rows)),
]
EXPERTS = [
    _ours(experts.in_one_launch),
    Candidate("torch, one after the other", experts.one_after_the_other),
    Candidate("torch grouped", experts.torch_grouped),
]


# Linear

MATRICES = ((4096, 4096), (4096, 14_336), (14_336, 4096), (8192, 28_672))
"""(K, N) of Llama-3-8B, and the largest of its 70B model."""
ROWS = (1, 16, 64, 256, 4, 32, 128, 2, 8)
"""Decode and verification; those with a goal first."""


def _prepared(function: Call) -> Adapt:
    """Ours, `by_name`, with the weight in our layout."""
    return lambda inputs: by_name(function)(inputs.replace(weight=prepare_quantized_weight(inputs.weight)))


_forward_on = partial(_on, mode=("forward",))
LINEAR = [
    _ours(_prepared(quantized_linear)),
    Candidate("cublas", linear.cublas),
    Candidate("bitsandbytes", linear.bitsandbytes, takes=_on(format=("nf4",))),
    Candidate("torch_int4", linear.torch_int4, takes=_forward_on(format=("int4",))),
    Candidate("torch_int8", linear.torch_int8, takes=_forward_on(format=("int8",))),
    Candidate("gemlite", linear.gemlite, takes=_forward_on(format=("int4", "int8", "fp8"))),
    Candidate("torchao", linear.torchao, takes=_forward_on(format=("int4", "int8", "fp8"))),
    Candidate("marlin", linear.vllm_marlin, takes=_forward_on(format=("int4", "int8"))),
    Candidate("marlin fp16", linear.marlin, takes=_forward_on(format=("int4",))),
    Candidate("bitsandbytes gemv", linear.bitsandbytes_gemv, takes=_forward_on(format=("nf4",), rows=(1,))),
]
_adapters_after = _prepared(lambda x, weight, lora, slots: lora_add(quantized_linear(x, weight), x, lora, slots))
ADAPTERS = [
    _ours(_prepared(quantized_linear), compare=_only(0, 1)),
    _baseline("two calls", _adapters_after, compare=_only(0, 1)),
    _baseline("no adapters", _prepared(lambda x, weight: quantized_linear(x, weight)), compare=_only(1, 2)),
    Candidate("cublas", linear.cublas_adapters, compare=_only(0, 1)),
]
_gate_after = _prepared(lambda x, weight: swiglu(*quantized_linear(x, weight).chunk(2, dim=1)))
GATED = [
    _ours(_prepared(quantized_swiglu)),
    # Triton's interpreter cuts bf16 off where a GPU rounds; three cuts in a row exceed the bound on the tiny shape.
    _baseline("two calls", _gate_after, takes=lambda shape: shape["k"] > 256),
    Candidate("cublas", linear.cublas_gate),
]


def _linear_group(name: str) -> Group:
    shapes = [linear.product(name, *matrix, rows) for rows in ROWS for matrix in MATRICES]
    return Group(LINEAR, [linear.product(name, 256, 128, rows) for rows in (1, 3)], shapes)


# Losses

VOCABULARY = 131_072
LOSSES = [
    _ours(losses.by_rows(losses.loss_by(linear_cross_entropy, linear_distillation))),
    Candidate("dense", losses.by_rows(losses.plain_loss)),
    Candidate("chunked", losses.by_rows(losses.plain_loss, losses.CHUNK)),
    Candidate("liger", losses.liger_cross_entropy, takes=_on(kind=("",))),
    Candidate("liger", losses.liger_jsd, compare=losses.of_means, takes=_on(kind=losses.LIGER_BETA)),
]
_losses = partial(Group, LOSSES, measures_memory=True)


# Sampling

WORDS = 128_256
BATCHES = (1, 16, 64, 256)
MODES = ("temperature", "top-k", "top-p", "min-p", "top-k top-p")
TOPS = (0, 5, 20)
_verified = _only(0, len(VerifyOutput._fields))

TOKENS = [
    _ours(by_name(sample_tokens), compare=_only(0, 1)),
    Candidate("flashinfer", sampling.flashinfer_sample, compare=sampling.are_kept),
    Candidate("torch", by_name(sampling.torch_sample), compare=sampling.are_kept),
]
PENALTIES = [
    _ours(by_name(adjust_scores)),
    Candidate("torch", by_name(lambda logits, state, slots: sampling.penalized(logits.float(), state, slots))),
]
LOGPROBS = [
    _ours(by_name(token_logprobs)),
    Candidate("torch", by_name(sampling.torch_logprobs), compare=sampling.in_any_order),
]
VERIFICATION = [
    _ours(by_name(verify), compare=_verified),
    Candidate("flashinfer", sampling.flashinfer_chain, compare=sampling.are_possible, takes=_on(tree=(False,))),
    Candidate("torch", sampling.torch_chain, compare=sampling.are_possible, takes=_on(tree=(False,))),
    Candidate("torch", by_name(sampling.torch_tree), compare=_verified, reads_on_host=True, takes=_on(tree=(True,))),
]
NGRAMS = [
    _ours(by_name(partial(find_ngrams, k=sampling.DRAFTED))),
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
        Group(LINEAR, [linear.product(name, 256, 128, 3, backward=True) for name in ("nf4", "int8")],
              [linear.product(name, *matrix, rows, backward=True)
               for names, matrices in ((("nf4",), MATRICES), (("int4", "int8", "fp8"), MATRICES[1:2]))
               for rows, name, matrix in product((2048, 8192), names, matrices)])),
    "quantized_fused": Part(
        "NF4 products with the adapters of 1, 8 or 64 users in a batch of 64 rows; gate and up as one product.",
        Group(ADAPTERS, [linear.adapted(256, 128, 4, 3)],
              [linear.adapted(*matrix, 64, users) for matrix in MATRICES[:3] for users in (1, 8, 64)]),
        Group(GATED, [linear.gated(256, 128, 3)], [linear.gated(4096, 28_672, rows) for rows in (1, 16, 64)])),
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
        Group(TOKENS, [sampling.tokens(mode, 2, 300) for mode in MODES],
              [sampling.tokens(mode, batch, WORDS) for mode in MODES for batch in BATCHES]),
        Group(PENALTIES, [sampling.penalties(2, 300)], [sampling.penalties(batch, WORDS) for batch in BATCHES]),
        Group(LOGPROBS, [sampling.logprobs(top, 2, 300) for top in TOPS],
              [sampling.logprobs(top, batch, WORDS) for top in TOPS for batch in BATCHES])),
    "sampling_drafts": Part(
        "Verification of drafted chains and trees against the target's distributions; drafts from the text itself.",
        Group(VERIFICATION, [sampling.drafted(False, 4, 2, 300), sampling.drafted(True, 8, 2, 300)], [
            *(sampling.drafted(False, 4, batch, WORDS) for batch in BATCHES),
            *(sampling.drafted(True, 8, batch, WORDS) for batch in (1, 16, 64))]),
        Group(NGRAMS, [sampling.texts(100, 2)], [sampling.texts(8192, batch) for batch in BATCHES])),
    "sampling_routing": Part(
        "Find the selected tokens, gather them, multiply as many as they are, add them back: a mixture of depths.",
        *(Group(ROUTED[verb], [routed(verb, 64, 8, 48)], [routed(verb, 256, 32, 4096), routed(verb, 8192, 1024, 4096)])
          for verb in ROUTED),
        Group(LEADING, [linear.leading(48, 96, 64, 8)],
              [linear.leading(4096, 28_672, 2048, used) for used in (256, 1024, 2048)])),
    "experts": Part(
        "Multiply tokens with the weights of the experts that they chose: gate and up of Mixtral and of Qwen3-30B-A3B.",
        Group(EXPERTS, [experts.experts(48, 96, 4, 2, 8)],
              [experts.experts(*shape, rows) for shape in ((4096, 28_672, 8, 2), (2048, 1536, 128, 8))
               for rows in (1, 16, 256, 4096)])),
}
# fmt: on


def parts_named(wanted: str) -> list[str]:
    """The part of this name, else all whose names begin with it and an underscore: `quantized` means six."""
    return parts_of_family(wanted, PARTS, "_")
