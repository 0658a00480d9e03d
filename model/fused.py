"""The serving form of linear layers that read the same input: as few products as their weights allow.

Dense layers become one product, and so do NF4 layers whose blocks of scales end where a layer ends. Adapters stay
unmerged, and each token goes through its own (model/fused_adapters.py).

Legend: T tokens, K input features, N output features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.linear.dense import PreparedWeight, linear, prepare_linear_weight
from kernels.linear.lora import LoraWeights, lora_add
from kernels.linear.quantization import stack_nf4
from kernels.linear.quantized import PreparedQuantizedWeight, prepare_quantized_weight, quantized_linear
from kernels.linear.quantized_swiglu import quantized_swiglu
from kernels.swiglu import swiglu
from model.fused_adapters import AdapterChoices, FusedAdapters, fuse_adapters
from model.linear import AnyLinear, Linear
from model.quantized import NF4Linear


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product and what is added to it; all in the dtype of serving."""

    weight: PreparedWeight | PreparedQuantizedWeight
    bias: Tensor | None
    adapters: FusedAdapters | None

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """`x [T, K] -> [T, N]`; `slots` as in `FusedLinear`."""
        if slots is None or self.adapters is None:
            return self._multiply(x, None, None)
        y = self._multiply(x, self.adapters.weights, slots)
        return self.adapters.rescale(y, self.bias, slots)

    def _multiply(self, x: Tensor, lora: LoraWeights | None, slots: Tensor | None) -> Tensor:
        if not isinstance(self.weight, PreparedWeight):
            return quantized_linear(x, self.weight, self.bias, lora, slots)
        y = linear(x, self.weight, self.bias)
        return y if lora is None else lora_add(y, x, lora, slots)


class FusedLinear(nn.Module):
    """Several linear layers that read the same input, for inference."""

    def __init__(self, parts: Sequence[AnyLinear], choices: AdapterChoices, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in parts]
        self.products = _products(parts, choices, dtype)

    def forward(self, x: Tensor, slots: Tensor | None = None) -> tuple[Tensor, ...]:
        """`x [T, K]` -> one output a layer; slots int32 [T]: each token's adapter, −1 for none; None: none has one."""
        outputs = tuple(product(x, slots) for product in self.products)
        return outputs[0].split(self.sizes, dim=-1) if len(outputs) == 1 else outputs


class FusedGate(nn.Module):
    """`silu(gate(x)) * up(x)` of the layers gate and up, for inference."""

    def __init__(self, gate: AnyLinear, up: AnyLinear, choices: AdapterChoices, dtype: torch.dtype) -> None:
        super().__init__()
        self.both = FusedLinear([gate, up], choices, dtype)

    def forward(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """`x [T, K] -> [T, N]`; `slots` as in `FusedLinear`."""
        first, *others = self.both.products
        adapters = None if slots is None else first.adapters
        is_dora = adapters is not None and adapters.factors is not None
        if others or is_dora or isinstance(first.weight, PreparedWeight):
            return swiglu(*self.both(x, slots))
        if adapters is None:
            return quantized_swiglu(x, first.weight, first.bias)
        return quantized_swiglu(x, first.weight, first.bias, adapters.weights, slots)


def _products(parts: Sequence[AnyLinear], choices: AdapterChoices, dtype: torch.dtype) -> list[Product]:
    """One product, or one a layer where the weights do not go together."""
    weight = _stacked_weight(parts)
    if weight is None:
        return [product for part in parts for product in _products([part], choices, dtype)]
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    return [Product(weight, torch.cat(biases).to(dtype) if biases else None, fuse_adapters(parts, choices, dtype))]


def _stacked_weight(parts: Sequence[AnyLinear]) -> PreparedWeight | PreparedQuantizedWeight | None:
    """None where they do not go together."""
    dense = [part.weight.detach() for part in parts if isinstance(part, Linear)]
    if len(dense) == len(parts):
        return prepare_linear_weight(torch.cat(dense) if len(dense) > 1 else dense[0])
    quantized = [part for part in parts if isinstance(part, NF4Linear)]
    if len(parts) == 1:
        return quantized[0].prepared_weight
    stacked = stack_nf4([part.weight for part in quantized]) if not dense else None
    return None if stacked is None else prepare_quantized_weight(stacked)
