"""The gated half of Llama's feed-forward layer with one quantized weight: y = silu(x Wgᵀ + bg) · (x Wuᵀ + bu).

The weight [2·I, K] holds gate's rows, then up's. On CUDA, up to a number of rows, each program multiplies tiles of both
and applies the gate to its fp32 sums: gate and up are never in memory, and y is rounded once. Else `swiglu` follows
`quantized_linear`.

Legend: T tokens, K input features, I intermediate size.
"""

from torch import Tensor

from kernels.linear.lora import LoraWeights, Slots
from kernels.linear.quantization import QuantizedWeight
from kernels.linear.quantized import (
    PreparedQuantizedWeight,
    check_operands,
    fused_product,
    quantized_linear,
    quantized_linear_reference,
)
from kernels.swiglu import swiglu_of_halves, swiglu_reference


def quantized_swiglu_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
) -> Tensor:
    """`quantized_swiglu` in its plainest form."""
    gate, up = quantized_linear_reference(x, weight, bias, lora, slots).chunk(2, dim=1)
    return swiglu_reference(gate, up)


def quantized_swiglu(
    x: Tensor,
    weight: PreparedQuantizedWeight,
    bias: Tensor | None = None,
    lora: LoraWeights | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Return silu(gate) · up, [T, I], of x [T, K], a prepared weight [2·I, K] and bias [2·I] or None.

    `lora`, whose b is [S, 2·I, R], `slots` and gradients as in `quantized_linear`. Two adapters of ranks r and r' are
    one of rank r + r': a stacked, b a block diagonal. Raises ValueError where shapes do not fit.
    """
    check_operands(x, weight, bias, lora, slots)
    if weight.shape[0] % 2:
        raise ValueError(f"a weight of gate and up has an even number of rows, not {weight.shape[0]}")
    fused = fused_product(x, weight, bias, lora, slots, gated=True)
    return swiglu_of_halves(quantized_linear(x, weight, bias, lora, slots)) if fused is None else fused
