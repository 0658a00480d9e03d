"""Products with quantized weights, with adapters, and gate and up as one.

Everybody gets one matrix: the same codes, with scales that are bf16 numbers (NF4: doubly quantized), so that one
reference serves all.

Legend: T tokens, K input features, N output features, S adapters, R rank, I intermediate size.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels.case import BF16, Inputs, Outputs, Shape, normal
from kernels.linear import quantization
from kernels.linear.lora import LoraWeights
from kernels.linear.quantization import NESTED_BLOCK, NF4_BLOCK, NF4Weight, QuantizedWeight
from kernels.swiglu import swiglu_reference

GROUP, RANK = 128, 16
QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "nf4": quantization.quantize_nf4,
    "int4": partial(quantization.quantize_int4, group=GROUP),
    "int8": quantization.quantize_int8,
    "fp8": quantization.quantize_fp8,
}


def weight_bytes(format_name: str, n: int, k: int) -> float:
    """Codes and scales as a file holds them; 16 bits a scale where it is not part of the format."""
    if format_name == "nf4":
        blocks = n * k / NF4_BLOCK
        return n * k / 2 + blocks + 4 * blocks / NESTED_BLOCK
    return n * k / 2 + 2 * n * k / GROUP if format_name == "int4" else n * k + 2 * n


def _random(format_name: str, k: int, n: int, rows: int, device: torch.device) -> dict[str, Any]:
    """x [T, K], weight [N, K]."""
    weight = QUANTIZERS[format_name](normal(n, k, device=device) * k**-0.5)
    if not isinstance(weight, NF4Weight):
        weight = replace(weight, scales=weight.scales.to(BF16).float())
    return {"x": normal(rows, k, device=device), "weight": weight}


def product(format_name: str, k: int, n: int, rows: int, backward: bool = False) -> Shape:
    """Backward: the gradient of x, which does not depend on x, from that of the result, [T, N]."""

    def make(device: torch.device) -> dict[str, Any]:
        grad = {"grad": normal(rows, n, device=device)} if backward else {}
        return _random(format_name, k, n, rows, device) | grad

    return Shape(
        name=f"{f'{format_name} ' if backward else ''}{k}x{n} rows {rows}",
        fields={"format": format_name, "k": k, "n": n, "rows": rows}, make=make,
        reference=_gradient if backward else lambda inputs: (_product(inputs),),
        num_bytes=weight_bytes(format_name, n, k) + 2 * rows * (n + k), flops=2.0 * rows * n * k, leaves=("x",),
        grads=("grad",), mode="backward" if backward else "forward",
    )  # fmt: skip


def _product(inputs: Inputs) -> Tensor:
    return inputs.x.double() @ inputs.weight.dequantize(torch.float64).t()


def _gradient(inputs: Inputs) -> Outputs:
    return (inputs.grad.double() @ inputs.weight.dequantize(torch.float64),)


def adapted(k: int, n: int, rows: int, adapters: int) -> Shape:
    """A product in NF4; adapters, and the one of each row, `slots` [T] int32, −1 for none."""

    def make(device: torch.device) -> dict[str, Any]:
        a = normal(adapters, RANK, k, device=device) * k**-0.5
        b = normal(adapters, n, RANK, device=device) * RANK**-0.5
        weights = LoraWeights(a, b, torch.rand(adapters, device=device) + 0.5)
        slots = torch.randint(-1, adapters, (rows,), dtype=torch.int32, device=device)
        return _random("nf4", k, n, rows, device) | {"adapters": weights, "slots": slots}

    return Shape(
        name=f"{adapters} adapters {k}x{n} rows {rows}",
        fields={"k": k, "n": n, "rows": rows, "adapters": adapters, "rank": RANK}, make=make, reference=_adapted,
        num_bytes=weight_bytes("nf4", n, k) + 2 * (adapters * RANK + rows) * (n + k),
        flops=2.0 * rows * (n * k + RANK * (n + k)), leaves=("x",),
    )  # fmt: skip


def _adapted(inputs: Inputs) -> Outputs:
    """The product with adapters, and without."""
    plain, adapters = _product(inputs), inputs.adapters
    change = torch.zeros_like(plain)
    for number, (a, b, scale) in enumerate(zip(adapters.a, adapters.b, adapters.scales, strict=True)):
        rows = inputs.slots == number
        change[rows] = scale.double() * (inputs.x[rows].double() @ a.double().t() @ b.double().t())
    return plain + change, plain


def gated(k: int, n: int, rows: int) -> Shape:
    """x [T, K], W [N = 2·I, K] in NF4: gate's rows come first."""
    return Shape(
        name=f"gate+up {k}x{n} rows {rows}", fields={"k": k, "n": n, "rows": rows},
        make=partial(_random, "nf4", k, n, rows),
        reference=lambda inputs: (swiglu_reference(*_product(inputs).chunk(2, dim=1)),),
        num_bytes=weight_bytes("nf4", n, k) + 2 * rows * (n // 2 + k), flops=2.0 * rows * n * k, leaves=("x",),
    )  # fmt: skip
