"""Attention on the benchmark's shapes: ours, who computes the same beside it, and what it is compared with."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import kernel_peers as peers
from bench.kernel_cases import Candidate, Case, Outputs, Run, gradients
from bench.kernel_shapes import (
    PAGE,
    AttentionInputs,
    AttentionShape,
    PagedInputs,
    PagedShape,
    attention_reference,
    paged_reference,
)
from kernels.attention.flash import flash_attention
from kernels.attention.paged import paged_attention, plan_paged_attention

HIDDEN, TOKENS = 2048, 16_384
HEADS, HEAD_DIM = 32, 128


def flash_forward(tiny: bool) -> list[Case]:
    """Causal attention of 16k tokens in documents of 2k to 16k, hidden size 2048, as in the FlashAttention papers."""
    return [_attention_case(shape, "forward") for shape in _attention_shapes(tiny)]


def flash_forward_backward(tiny: bool) -> list[Case]:
    """The same shapes, forward and backward together: what a training step pays."""
    return [_attention_case(shape, "forward+backward") for shape in _attention_shapes(tiny)]


def flash_backward(tiny: bool) -> list[Case]:
    """The same shapes, backward alone."""
    return [_attention_case(shape, "backward") for shape in _attention_shapes(tiny)]


def decode(tiny: bool) -> list[Case]:
    """One new token a sequence over pages: bound by reading keys and values."""
    if tiny:
        return [_decode_case(PagedShape(3, 1, 40, 4, 2, 64)), _decode_case(PagedShape(3, 1, 40, 4, 1, 64, ragged=True))]
    shapes = [
        PagedShape(batch, 1, context, HEADS, HEADS // group, HEAD_DIM)
        for context in (8192, 32_768, 2048)
        for group in (4, 8)
        for batch in (32, 128, 8, 1)
    ]
    return [_decode_case(shape) for shape in [*shapes, PagedShape(32, 1, 32_768, HEADS, 8, HEAD_DIM, ragged=True)]]


def decode_8bit(tiny: bool) -> list[Case]:
    """Decode over pages in int8 and fp8 with a scale per token and head: half the bytes."""
    dtypes = (torch.int8, torch.float8_e4m3fn)
    if tiny:
        return [_decode_8bit_case(PagedShape(2, 1, 40, 4, 2, 64, page_dtype=dtype)) for dtype in dtypes]
    return [
        _decode_8bit_case(PagedShape(batch, 1, context, HEADS, 8, HEAD_DIM, page_dtype=dtype))
        for dtype in dtypes
        for batch, context in ((32, 8192), (128, 8192), (8, 8192), (32, 32_768), (1, 32_768))
    ]


def verify(tiny: bool) -> list[Case]:
    """The drafted tokens of speculative decoding: 4 or 8 rows a sequence, beside plain decode over the same keys."""
    if tiny:
        return [_verify_case(PagedShape(2, 4, 40, 4, 2, 64))]
    return [
        _verify_case(PagedShape(batch, rows, context, HEADS, 8, HEAD_DIM))
        for context in (8192, 32_768)
        for rows in (4, 8)
        for batch in (1, 8, 32)
    ]


def prefill_paged(tiny: bool) -> list[Case]:
    """A chunk of a prompt over the pages of everything before it."""
    if tiny:
        return [_paged_case(PagedShape(2, 20, 40, 4, 2, 64), peers.flashinfer_prefill)]
    sizes = ((1, 2048, 8192), (1, 2048, 32_768), (1, 512, 32_768), (4, 512, 8192), (8, 256, 2048))
    shapes = [PagedShape(batch, rows, context, HEADS, 8, HEAD_DIM) for batch, rows, context in sizes]
    return [_paged_case(shape, peers.flashinfer_prefill) for shape in shapes]


# Dense attention


def _attention_shapes(tiny: bool) -> list[AttentionShape]:
    if tiny:
        return [AttentionShape(2, 40, 2, 1, 64)]
    return [
        AttentionShape(TOKENS // length, length, HIDDEN // d, HIDDEN // d // group, d)
        for d in (128, 64)
        for length in (4096, 8192, 16_384, 2048)
        for group in (1, 4)
    ]


def _attention_case(shape: AttentionShape, mode: str) -> Case:
    wrap = {"forward": _forward, "backward": _backward, "forward+backward": _forward_and_backward}[mode]
    flops = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}[mode] * shape.forward_flops()
    num_bytes = (mode != "backward") * shape.forward_bytes() + (mode != "forward") * shape.backward_bytes()
    return Case(
        name=f"{shape.name} {mode}",
        shape={**vars(shape), "mode": mode},
        flops=flops,
        num_bytes=num_bytes,
        make_inputs=partial(AttentionInputs.random, shape, gradients=mode != "forward"),
        reference=partial(attention_reference, output=mode != "backward"),
        candidates=[
            Candidate("potstill", wrap(_our_attention), role="ours"),
            *(
                []
                if mode == "forward"
                else [Candidate("any order", wrap(_our_attention_in_any_order), role="baseline")]
            ),
            *(Candidate(backend, wrap(peers.sdpa(backend))) for backend in peers.BACKENDS),
            Candidate("fa3", wrap(peers.fa3)),
            Candidate("flex", wrap(peers.flex), compiles=True),
        ],
    )


def _our_attention(inputs: AttentionInputs) -> peers.Forward:
    return lambda q, k, v: flash_attention(q, k, v, inputs.cu_seqlens)


def _our_attention_in_any_order(inputs: AttentionInputs) -> peers.Forward:
    """Without the promise of the same bits each time, which most peers do not give."""
    return lambda q, k, v: flash_attention(q, k, v, inputs.cu_seqlens, deterministic=False)


Adapter = Callable[[AttentionInputs], peers.Forward | None]
Prepare = Callable[[Any], Run | None]


def _forward(adapt: Adapter) -> Prepare:
    def prepare(inputs: AttentionInputs) -> Run | None:
        attend = adapt(inputs)
        return None if attend is None else lambda: (attend(inputs.q, inputs.k, inputs.v),)

    return prepare


def _forward_and_backward(adapt: Adapter) -> Prepare:
    def prepare(inputs: AttentionInputs) -> Run | None:
        attend = adapt(inputs)
        if attend is None:
            return None
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

        def run() -> Outputs:
            out = attend(*leaves)
            return out.detach(), *gradients((out,), leaves, (inputs.grad,))

        return run

    return prepare


def _backward(adapt: Adapter) -> Prepare:
    def prepare(inputs: AttentionInputs) -> Run | None:
        attend = adapt(inputs)
        if attend is None:
            return None
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = attend(*leaves)
        return lambda: gradients((out,), leaves, (inputs.grad,))

    return prepare


# Attention over pages


def _paged_case(shape: PagedShape, flashinfer: Prepare) -> Case:
    return Case(
        name=shape.name,
        shape={**vars(shape), "page_dtype": str(shape.page_dtype)},
        flops=shape.flops(),
        num_bytes=shape.num_bytes(),
        make_inputs=partial(PagedInputs.random, shape),
        reference=paged_reference,
        candidates=[
            Candidate("potstill", _our_paged_attention, role="ours"),
            Candidate("with plan", _our_first_layer, role="baseline"),
            Candidate("fa3", peers.fa3_paged),
            Candidate("vllm_fa3", peers.vllm_fa3),
            Candidate("vllm_triton", peers.vllm_triton),
            *(Candidate(f"contiguous_{backend}", peers.contiguous_sdpa(backend)) for backend in peers.BACKENDS),
            Candidate("flashinfer", flashinfer),
            Candidate("contiguous_flex", peers.contiguous_flex, compiles=True),
        ],
    )


def _decode_case(shape: PagedShape) -> Case:
    return _paged_case(shape, peers.flashinfer_decode)


def _verify_case(shape: PagedShape) -> Case:
    """The last of the drafted rows sees what a decoded token would see: the same result, from one row."""
    case = _paged_case(shape, peers.flashinfer_prefill)
    last = Candidate(
        "decode",
        lambda inputs: _our_paged_attention(inputs.last_rows()),
        role="baseline",
        compare=lambda outputs, expected: (outputs, (expected[0].unflatten(0, (-1, shape.rows))[:, -1],)),
    )
    return replace(case, candidates=[*case.candidates, last])


def _decode_8bit_case(shape: PagedShape) -> Case:
    return Case(
        name=shape.name,
        shape={**vars(shape), "page_dtype": str(shape.page_dtype)},
        flops=shape.flops(),
        num_bytes=shape.num_bytes(),
        make_inputs=partial(PagedInputs.random, shape),
        reference=paged_reference,
        candidates=[
            Candidate("potstill", _our_paged_attention, role="ours"),
            Candidate("bf16 pages", lambda inputs: _our_paged_attention(inputs.in_16_bits()), role="baseline"),
        ],
    )


def _our_paged_attention(inputs: PagedInputs) -> Run:
    """Planned once, outside of what is timed: all layers of a step share a plan."""
    plan = _plan(inputs)
    _attend(inputs, plan)  # a plan lists its work when it is first used
    return lambda: _attend(inputs, plan)


def _our_first_layer(inputs: PagedInputs) -> Run:
    """With the plan in it: what a step pays once."""
    return lambda: _attend(inputs, _plan(inputs))


def _plan(inputs: PagedInputs) -> Any:
    return plan_paged_attention(inputs.block_tables, inputs.cu_seqlens, inputs.kv_lengths, PAGE)


def _attend(inputs: PagedInputs, plan: Any) -> tuple[Tensor]:
    pages = (inputs.k_pages, inputs.v_pages, inputs.block_tables, inputs.cu_seqlens, inputs.kv_lengths)
    return (paged_attention(inputs.q, *pages, plan=plan, k_scales=inputs.k_scales, v_scales=inputs.v_scales),)
