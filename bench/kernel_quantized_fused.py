"""What is fused into a quantized product, on the benchmark's shapes: adapters of a mixed batch, and the gate.

Ours as one call; beside it the same as several calls of ours, the product without what is fused, and bf16 in PyTorch.

Legend: T tokens, K input features, N output features, S adapters, R rank, I intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_cases import Candidate, Case, Outputs, Run
from bench.kernel_quantized import BF16, MATRICES, LinearInputs, product_reference, weight_bytes
from kernels.linear.lora import LoraWeights, lora_add
from kernels.linear.quantized import prepare_quantized_weight, quantized_linear
from kernels.linear.quantized_swiglu import quantized_swiglu
from kernels.swiglu import swiglu, swiglu_reference

RANK, ADAPTED_ROWS = 16, 64
ADAPTERS = (1, 8, 64)
GATED_ROWS = (1, 16, 64)
INTERMEDIATE = 14_336


def quantized_fused(tiny: bool) -> list[Case]:
    """NF4 products with the adapters of 1, 8 or 64 users in a batch of 64 rows; gate and up as one product."""
    if tiny:
        # Triton's interpreter cuts bf16 off where a GPU rounds; three cuts in a row exceed the bound.
        return [_adapters_case(256, 128, 4, 3), _gated_case(256, 64, 3, with_two_calls=False)]
    return [
        *(_adapters_case(*matrix, ADAPTED_ROWS, adapters) for matrix in MATRICES[:3] for adapters in ADAPTERS),
        *(_gated_case(MATRICES[1][0], INTERMEDIATE, rows) for rows in GATED_ROWS),
    ]


@dataclass
class AdaptedInputs:
    """A product in NF4; adapters, and the one of each row, [T] int32, −1 for none."""

    product: LinearInputs
    adapters: LoraWeights
    slots: Tensor

    @classmethod
    def random(cls, k: int, n: int, rows: int, adapters: int, device: torch.device) -> "AdaptedInputs":
        product = LinearInputs.random("nf4", k, n, rows, device, backward=False)
        a = torch.randn(adapters, RANK, k, device=device, dtype=BF16) * k**-0.5
        b = torch.randn(adapters, n, RANK, device=device, dtype=BF16) * RANK**-0.5
        scales = torch.rand(adapters, device=device) + 0.5
        slots = torch.randint(-1, adapters, (rows,), dtype=torch.int32, device=device)
        return cls(product, LoraWeights(a, b, scales), slots)


def adapted_reference(inputs: AdaptedInputs) -> Outputs:
    """The product with adapters, and without, in fp64."""
    (plain,) = product_reference(inputs.product)
    adapters = inputs.adapters
    change = torch.zeros_like(plain)
    for number, (a, b, scale) in enumerate(zip(adapters.a, adapters.b, adapters.scales, strict=True)):
        rows = inputs.slots == number
        change[rows] = scale.double() * (inputs.product.x[rows].double() @ a.double().t() @ b.double().t())
    return plain + change, plain


def _adapters_case(k: int, n: int, rows: int, adapters: int) -> Case:
    return Case(
        name=f"{adapters} adapters {k}x{n} rows {rows}",
        shape={"k": k, "n": n, "rows": rows, "adapters": adapters, "rank": RANK},
        flops=2.0 * rows * (n * k + RANK * (n + k)),
        num_bytes=weight_bytes("nf4", n, k) + 2 * adapters * RANK * (n + k) + 2 * rows * (n + k),
        make_inputs=partial(AdaptedInputs.random, k, n, rows, adapters),
        reference=adapted_reference,
        candidates=[
            Candidate("potstill", _our_adapters, role="ours", compare=_with_adapters),
            Candidate("two calls", _adapters_after, role="baseline", compare=_with_adapters),
            Candidate("no adapters", _no_adapters, role="baseline", compare=lambda ours, wanted: (ours, wanted[1:])),
            Candidate("cublas", _bf16_adapters, compare=_with_adapters),
        ],
    )


def _with_adapters(outputs: Outputs, expected: Outputs) -> tuple[Outputs, Outputs]:
    return outputs, expected[:1]


def _our_adapters(inputs: AdaptedInputs) -> Run:
    weight, x = prepare_quantized_weight(inputs.product.weight), inputs.product.x
    return lambda: (quantized_linear(x, weight, None, inputs.adapters, inputs.slots),)


def _adapters_after(inputs: AdaptedInputs) -> Run:
    weight, x = prepare_quantized_weight(inputs.product.weight), inputs.product.x
    return lambda: (lora_add(quantized_linear(x, weight), x, inputs.adapters, inputs.slots),)


def _no_adapters(inputs: AdaptedInputs) -> Run:
    weight, x = prepare_quantized_weight(inputs.product.weight), inputs.product.x
    return lambda: (quantized_linear(x, weight),)


def _bf16_adapters(inputs: AdaptedInputs) -> Run:
    """The matrix in bf16, and every row's adapter gathered and multiplied."""
    weight, x, adapters = inputs.product.weight.dequantize(BF16), inputs.product.x, inputs.adapters
    slots = inputs.slots.clamp_min(0).long()
    scales = torch.where(inputs.slots >= 0, adapters.scales[slots], 0.0).to(BF16)[:, None]

    def run() -> tuple[Tensor]:
        low = torch.bmm(adapters.a[slots], x[:, :, None])
        return (F.linear(x, weight) + scales * torch.bmm(adapters.b[slots], low)[:, :, 0],)

    return run


def gated_reference(inputs: LinearInputs) -> tuple[Tensor]:
    """silu(gate) · up in fp64; gate's rows come first in W."""
    (product,) = product_reference(inputs)
    return (swiglu_reference(*product.chunk(2, dim=1)),)


def _gated_case(k: int, intermediate: int, rows: int, *, with_two_calls: bool = True) -> Case:
    n = 2 * intermediate
    two_calls = [Candidate("two calls", _gate_after, role="baseline")] if with_two_calls else []
    return Case(
        name=f"gate+up {k}x{n} rows {rows}",
        shape={"k": k, "n": n, "rows": rows},
        flops=2.0 * rows * n * k,
        num_bytes=weight_bytes("nf4", n, k) + 2 * rows * (intermediate + k),
        make_inputs=lambda device: LinearInputs.random("nf4", k, n, rows, device, backward=False),
        reference=gated_reference,
        candidates=[Candidate("potstill", _our_gate, role="ours"), *two_calls, Candidate("cublas", _bf16_gate)],
    )


def _our_gate(inputs: LinearInputs) -> Run:
    weight = prepare_quantized_weight(inputs.weight)
    return lambda: (quantized_swiglu(inputs.x, weight),)


def _gate_after(inputs: LinearInputs) -> Run:
    weight = prepare_quantized_weight(inputs.weight)
    return _gated(lambda x: quantized_linear(x, weight), inputs)


def _bf16_gate(inputs: LinearInputs) -> Run:
    """The matrix in bf16 by cuBLAS, then our gate."""
    weight = inputs.weight.dequantize(BF16)
    return _gated(lambda x: F.linear(x, weight), inputs)


def _gated(multiply: Callable[[Tensor], Tensor], inputs: LinearInputs) -> Run:
    return lambda: (swiglu(*multiply(inputs.x).chunk(2, dim=1)),)
