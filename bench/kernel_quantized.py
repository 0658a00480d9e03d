"""Quantized linear layers on the benchmark's shapes: ours, and who multiplies with the same codes beside it.

Everybody gets one matrix: the same codes, with scales that are bf16 numbers (NF4: doubly quantized), so that one
reference serves all. The matrices are those of Llama-3-8B, and the largest of its 70B model.

Legend: T tokens, K input features, N output features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import kernel_quantized_peers as peers
from bench.kernel_cases import Candidate, Case, Run, gradients
from kernels.linear.quantization import (
    NESTED_BLOCK,
    NF4_BLOCK,
    NF4Weight,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear

BF16 = torch.bfloat16
GROUP = 128
MATRICES = ((4096, 4096), (4096, 14_336), (14_336, 4096), (8192, 28_672))
"""(K, N)."""
ROWS = (1, 16, 64, 256, 4, 32, 128, 2, 8)
"""Decode and verification; those with a goal first."""
BACKWARD_ROWS = (2048, 8192)
FORMATS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": quantize_nf4,
    "int4": partial(quantize_int4, group=GROUP),
    "int8": quantize_int8,
    "fp8": quantize_fp8,
}
PEERS: dict[str, Sequence[Candidate]] = {
    "nf4": (Candidate("bitsandbytes", peers.bitsandbytes),),
    "int4": (
        Candidate("torch_int4", peers.torch_int4),
        Candidate("gemlite", peers.gemlite_int4),
        Candidate("torchao", peers.torchao_int4),
        Candidate("marlin", peers.vllm_marlin),
        Candidate("marlin fp16", peers.marlin),
    ),
    "int8": (
        Candidate("torch_int8", peers.torch_int8),
        Candidate("gemlite", peers.gemlite_int8),
        Candidate("torchao", peers.torchao_int8),
        Candidate("marlin", peers.vllm_marlin),
    ),
    "fp8": (Candidate("gemlite", peers.gemlite_fp8), Candidate("torchao", peers.torchao_fp8)),
}


def quantized_nf4(tiny: bool) -> list[Case]:
    """x Wᵀ with W in NF4, doubly quantized, at the numbers of rows of decode and verification."""
    return _forward_cases("nf4", tiny)


def quantized_int4(tiny: bool) -> list[Case]:
    """The same with symmetric INT4 in groups of 128."""
    return _forward_cases("int4", tiny)


def quantized_int8(tiny: bool) -> list[Case]:
    """The same with INT8 and a scale for each output."""
    return _forward_cases("int8", tiny)


def quantized_fp8(tiny: bool) -> list[Case]:
    """The same with FP8 and a scale for each output."""
    return _forward_cases("fp8", tiny)


def quantized_backward(tiny: bool) -> list[Case]:
    """The gradient of x, as QLoRA's backward pass computes it: NF4 on all matrices, the other formats on one."""
    if tiny:
        return [_backward_case(name, 256, 128, 3) for name in ("nf4", "int8")]
    return [
        *(_backward_case("nf4", *matrix, rows) for rows in BACKWARD_ROWS for matrix in MATRICES),
        *(_backward_case(name, *MATRICES[1], rows) for rows in BACKWARD_ROWS for name in ("int4", "int8", "fp8")),
    ]


@dataclass
class LinearInputs:
    """x [T, K], or the gradient of the result, [T, N], for the backward pass; W [N, K]."""

    x: Tensor
    weight: QuantizedWeight

    @classmethod
    def random(
        cls, format_name: str, k: int, n: int, rows: int, device: torch.device, *, backward: bool
    ) -> "LinearInputs":
        weight = FORMATS[format_name](torch.randn(n, k, device=device, dtype=BF16) * k**-0.5)
        if not isinstance(weight, NF4Weight):
            weight = replace(weight, scales=weight.scales.to(BF16).float())
        return cls(torch.randn(rows, n if backward else k, device=device, dtype=BF16), weight)


def weight_bytes(format_name: str, n: int, k: int) -> float:
    """Codes and scales as a file holds them; 16 bits a scale where it is not part of the format."""
    if format_name == "nf4":
        blocks = n * k / NF4_BLOCK
        return n * k / 2 + blocks + 4 * blocks / NESTED_BLOCK
    return n * k / 2 + 2 * n * k / GROUP if format_name == "int4" else n * k + 2 * n


def product_reference(inputs: LinearInputs) -> tuple[Tensor]:
    """x Wᵀ in fp64."""
    return (inputs.x.double() @ inputs.weight.dequantize(torch.float64).t(),)


def gradient_reference(inputs: LinearInputs) -> tuple[Tensor]:
    """dy W in fp64."""
    return (inputs.x.double() @ inputs.weight.dequantize(torch.float64),)


def _forward_cases(format_name: str, tiny: bool) -> list[Case]:
    if tiny:
        return [_forward_case(format_name, 256, 128, rows) for rows in (1, 3)]
    return [_forward_case(format_name, *matrix, rows) for rows in ROWS for matrix in MATRICES]


def _forward_case(format_name: str, k: int, n: int, rows: int) -> Case:
    gemv = [Candidate("bitsandbytes gemv", peers.bitsandbytes_gemv)] if (format_name, rows) == ("nf4", 1) else []
    return Case(
        name=f"{k}x{n} rows {rows}",
        shape={"format": format_name, "k": k, "n": n, "rows": rows},
        flops=2.0 * rows * n * k,
        num_bytes=weight_bytes(format_name, n, k) + 2 * rows * (n + k),
        make_inputs=lambda device: LinearInputs.random(format_name, k, n, rows, device, backward=False),
        reference=product_reference,
        candidates=[
            Candidate("potstill", _ours, role="ours"),
            Candidate("cublas", _bf16),
            *PEERS[format_name],
            *gemv,
        ],
    )


def _backward_case(format_name: str, k: int, n: int, rows: int) -> Case:
    peers_here = [Candidate("bitsandbytes", _gradient(peers.bitsandbytes_product))] if format_name == "nf4" else []
    return Case(
        name=f"{format_name} {k}x{n} rows {rows}",
        shape={"format": format_name, "k": k, "n": n, "rows": rows},
        flops=2.0 * rows * n * k,
        num_bytes=weight_bytes(format_name, n, k) + 2 * rows * (n + k),
        make_inputs=lambda device: LinearInputs.random(format_name, k, n, rows, device, backward=True),
        reference=gradient_reference,
        candidates=[
            Candidate("potstill", _gradient(_our_product), role="ours"),
            Candidate("cublas", _gradient(_bf16_product)),
            *peers_here,
        ],
    )


def _ours(inputs: LinearInputs) -> Run:
    multiply = _our_product(inputs)
    return lambda: (multiply(inputs.x),)


def _our_product(inputs: LinearInputs) -> peers.Product:
    weight = prepare_quantized_weight(inputs.weight)
    return lambda x: quantized_linear(x, weight)


def _bf16(inputs: LinearInputs) -> Run:
    """The same matrix in bf16: what quantization must beat."""
    multiply = _bf16_product(inputs)
    return lambda: (multiply(inputs.x),)


def _bf16_product(inputs: LinearInputs) -> peers.Product:
    weight = inputs.weight.dequantize(BF16)
    return lambda x: F.linear(x, weight)


def _gradient(adapt: Callable[[Any], peers.Product | None]) -> Callable[[Any], Run | None]:
    """The backward pass alone, of a product of any x: its gradient does not depend on it."""

    def prepare(inputs: LinearInputs) -> Run | None:
        multiply = adapt(inputs)
        if multiply is None:
            return None
        leaf = torch.zeros(len(inputs.x), inputs.weight.shape[1], dtype=BF16, device=inputs.x.device)
        leaf.requires_grad_()
        out = multiply(leaf)
        return lambda: gradients((out,), (leaf,), (inputs.x,))

    return prepare
