"""Hot kernels: how each is called, what its inner loop reads from memory, and what is asked of its machine code."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention.flash import flash_attention
from kernels.attention.paged import paged_attention
from kernels.linear.dense import PreparedWeight
from kernels.linear.experts import arrange_rows, expert_products, stack_experts
from kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from kernels.linear.rounded import Rounding, rounded_linear
from kernels.rms_norm import rms_norm
from kernels.sampling.random import Stream
from kernels.sampling.sample import Filters, sample_tokens
from kernels.swiglu import swiglu

Constants = dict[str, Any]
BytesRead = Callable[[Constants, float], float]
"""What comes from memory, of a kernel's constants and of how many products the loop makes on tensor cores."""
BF16, FP32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
EVERY = (80, 89, 90)
PAGE, PAGES = 16, 64


@dataclass(frozen=True)
class Case:
    """A kernel under one of its loads."""

    name: str
    kernel: str
    """Module and function."""
    call: Callable[[], object]
    """Launches it on CPU tensors, which is intercepted."""
    gpus: tuple[int, ...] = EVERY
    """Ten times the compute capability."""
    bytes_read: BytesRead | None = None
    """None: the products on tensor cores are the bound, not the memory."""
    constants: Constants = field(default_factory=dict)
    """Which variant is meant, where a call launches several."""
    product_rows: int = 0
    """Rows of a product by cuBLAS that follows on the program's result."""
    most_ratio: dict[int, float] = field(default_factory=dict)
    """The goal, by GPU: cycles of the busiest part over those of memory or tensor cores."""
    keeps_registers: bool = False
    """The goal that nothing is spilled."""
    overlaps: bool = False
    """The goal that the exponentials of the main loop run beside asynchronous products."""


def zeros(*shape: int, dtype: torch.dtype = BF16, learns: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=learns)


def backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])


QUANTIZE = {"nf4": quantize_nf4, "int4": quantize_int4, "int8": quantize_int8, "fp8": quantize_fp8}
WEIGHT_BYTES = {"dense": 2.0, "nf4": 0.5 + 4 / 64, "int4": 0.5 + 4 / 128, "int8": 1.0, "fp8": 1.0}
"""Read for each weight, with its share of a scale."""
MOST_RATIO = {"nf4": 1.15, "int4": 1.0, "int8": 1.0, "fp8": 1.0}


def _linear(format: str, rows: int, *, dtype: torch.dtype = BF16, learns: bool = False) -> None:
    weight = prepare_quantized_weight(QUANTIZE[format](zeros(256, 1024, dtype=FP32)))
    y = quantized_linear(zeros(rows, 1024, dtype=dtype, learns=learns), weight)
    if learns:
        backward(y)


def _rounded(format: str, rounded: torch.dtype) -> None:
    weight = prepare_quantized_weight(QUANTIZE[format](zeros(256, 1024, dtype=FP32)))
    rounded_linear(zeros(256, 1024), weight, None, Rounding(rounded))


def _experts(format: str, rows: int) -> None:
    dense = zeros(256, 1024)
    weight = PreparedWeight(dense) if format == "dense" else prepare_quantized_weight(QUANTIZE[format](dense.float()))
    arranged = arrange_rows(torch.zeros(rows, 1, dtype=torch.int64), 8, BF16)
    stacked = stack_experts([weight] * 8)
    expert_products(zeros(rows, 1024), stacked, arranged)  # type: ignore[arg-type]


def _weights(format: str) -> BytesRead:
    return lambda constants, products: products / constants["TOKENS"] * WEIGHT_BYTES[format]


def _written_weights(format: str) -> BytesRead:
    return lambda constants, products: constants["OUTPUTS"] * constants["TILE"] * (WEIGHT_BYTES[format] + 2)


def _linear_cases() -> list[Case]:
    product, expand = "quantized._product_kernel", "quantized._expand_kernel"
    forward = [
        Case(
            f"{format}, {rows} row{'s' * (rows > 1)}", product, partial(_linear, format, rows),
            bytes_read=_weights(format), most_ratio={90: MOST_RATIO[format]} if rows <= 16 else {},
            keeps_registers=True,
        )
        for format in QUANTIZE for rows in (1, 16, 64)
    ]  # fmt: skip
    learned = [
        Case(
            f"{format}, gradients of 4096 rows", expand, partial(_linear, format, 4096, learns=True),
            bytes_read=_written_weights(format), product_rows=4096, most_ratio={90: 1.15}, keeps_registers=True,
        )
        for format in QUANTIZE
    ]  # fmt: skip
    return [
        *forward,
        *learned,
        Case("nf4, gradients of 128 rows", "quantized._grad_input_kernel", partial(_linear, "nf4", 128, learns=True)),
        *(
            Case(f"experts, {format}, {rows} rows", "experts._expert_kernel", partial(_experts, format, rows),
                 bytes_read=_weights(format), keeps_registers=True)
            for format in ("dense", "int4") for rows in (16, 1024)
        ),
        Case("int8 times int8, 256 rows", "_rounded_tiles._codes_kernel", partial(_rounded, "int8", INT8)),
        Case("fp8 times fp8, 256 rows", "_rounded_tiles._codes_kernel", partial(_rounded, "fp8", FP8), (89, 90)),
        *(
            Case(f"{format}, 16 rows, fp32", product, partial(_linear, format, 16, dtype=FP32), (89,))
            for format in ("nf4", "int4")
        ),
        Case(
            "int4, gradients of 128 rows, fp32", "quantized._grad_input_kernel",
            partial(_linear, "int4", 128, dtype=FP32, learns=True), (89,),
        ),
    ]  # fmt: skip


def _flash(d: int, *, learns: bool = False, **options: Any) -> None:
    q, k, v = (zeros(512, heads, d, learns=learns) for heads in (32, 8, 8))
    out = flash_attention(q, k, v, torch.tensor([0, 512], dtype=torch.int32), **options)
    if learns:
        backward(out)


def _flash_cases() -> list[Case]:
    forward, keys, queries = (f"flash.{name}_kernel" for name in ("_forward", "_grad_keys", "_grad_queries"))
    gluon = "_flash_hopper._forward_kernel", "_flash_hopper_backward._backward_kernel"
    every = []
    for d in (64, 128):
        learned = partial(_flash, d, learns=True)
        fixed = partial(_flash, d, learns=True, deterministic=True)
        every += [
            Case(f"flash, d {d}", forward, partial(_flash, d), (80, 89), most_ratio={80: 1.0}),
            # A window is what the kernels for Hopper do not take.
            Case(f"flash, d {d}, window", forward, partial(_flash, d, window=256), (90,)),
            Case(f"flash for Hopper, d {d}", gluon[0], partial(_flash, d), (90,), keeps_registers=True, overlaps=True),
            Case(f"flash backward, d {d}", keys, learned, EVERY if d == 128 else (80, 89)),
            Case(f"flash backward, d {d}, deterministic: dQ", queries, fixed),
            Case(f"flash backward, d {d}, deterministic: dK, dV", keys, fixed),
        ]
    learned = partial(_flash, 64, learns=True)
    return [
        *every,
        Case("flash backward for Hopper, d 64", gluon[1], learned, (90,), keeps_registers=True, overlaps=True),
    ]


def _paged(tokens: int, *, pages: torch.dtype = BF16, dtype: torch.dtype = BF16) -> None:
    """Two sequences; 32 query heads and 8 of keys, of 128."""
    k_pages, v_pages = torch.zeros(2, PAGES, PAGE, 8, 128).to(pages)
    scales = {name: torch.zeros(PAGES, PAGE, 8) for name in ("k_scales", "v_scales")} if pages != dtype else {}
    tables = torch.arange(PAGES, dtype=torch.int32).view(2, PAGES // 2)
    cu_seqlens = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    lengths = torch.full((2,), PAGES // 2 * PAGE, dtype=torch.int32)
    paged_attention(zeros(tokens, 32, 128, dtype=dtype), k_pages, v_pages, tables, cu_seqlens, lengths, **scales)


def _keys(itemsize: int) -> BytesRead:
    scales = 8 if itemsize == 1 else 0
    return lambda constants, products: (
        products / (2 * constants["ROWS"] * constants["D"]) * (2 * constants["HEAD_DIM"] * itemsize + scales)
    )


def _paged_cases() -> list[Case]:
    kernel = "paged._attend_kernel"
    every = []
    for pages, name, itemsize in ((BF16, "bf16", 2), (INT8, "int8", 1), (FP8, "fp8", 1)):
        gpus = EVERY if pages != FP8 else (89, 90)
        decode, prefill = partial(_paged, 2, pages=pages), partial(_paged, 1024, pages=pages)
        every += [
            Case(f"paged decode, {name} pages", kernel, decode, gpus, bytes_read=_keys(itemsize)),
            Case(f"paged prefill, {name} pages", kernel, prefill, gpus),
        ]
    wide = partial(_paged, 2, pages=INT8, dtype=FP32)
    return [*every, Case("paged decode, int8 pages, fp32", kernel, wide, (89,))]


def _of_rows(itemsize: int, size: str = "SIZE") -> BytesRead:
    return lambda constants, products: constants["ROWS"] * constants[size] * itemsize


def _rms_norm(*, learns: bool) -> None:
    """A bf16 branch and the fp32 residual stream that it joins."""
    x, weight, residual = (
        zeros(*shape, dtype=dtype, learns=learns)
        for shape, dtype in (((64, 4096), BF16), ((4096,), FP32), ((64, 4096), FP32))
    )
    outputs = rms_norm(x, weight, 1e-5, residual)
    if learns:
        backward(*outputs)


def _swiglu() -> None:
    backward(swiglu(*zeros(64, 2 * 14_336, learns=True).chunk(2, dim=-1)))


def _sample() -> None:
    batch, vocabulary = 16, 128_256
    none, one = torch.zeros(batch, dtype=torch.int32), torch.ones(batch)
    sample_tokens(zeros(batch, vocabulary), Filters(one, none, one, one), Stream(none.long(), none, none))


def _other_cases() -> list[Case]:
    def logits(constants: Constants, products: float) -> float:
        return constants["BLOCK"] * 2

    return [
        Case("rms_norm with residual", "rms_norm._forward_kernel", partial(_rms_norm, learns=False),
             bytes_read=_of_rows(12)),
        Case("rms_norm backward", "rms_norm._backward_kernel", partial(_rms_norm, learns=True),
             bytes_read=_of_rows(16)),
        Case("swiglu", "swiglu._forward_kernel", _swiglu, bytes_read=_of_rows(6, "BLOCK")),
        Case("swiglu backward", "swiglu._backward_kernel", _swiglu, bytes_read=_of_rows(10, "BLOCK")),
        Case("sampling: race", "sample._race_kernel", _sample, bytes_read=logits),
        Case("sampling: best score", "_thresholds._extremes_kernel", _sample, bytes_read=logits),
        Case("sampling: pass of top-k", "_thresholds._narrow_kernel", _sample, bytes_read=logits,
             constants={"BY_MASS": False}),
        Case("sampling: pass of top-p", "_thresholds._narrow_kernel", _sample, bytes_read=logits,
             constants={"BY_MASS": True}),
    ]  # fmt: skip


CASES = [*_linear_cases(), *_flash_cases(), *_paged_cases(), *_other_cases()]
