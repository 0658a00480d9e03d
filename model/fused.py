"""The serving form of linear layers that read the same input: as few products as their weights allow.

Dense layers become one product, and so do NF4 layers whose blocks of scales end where a layer ends. Adapters stay
unmerged: those of a product become one, whose rank is the sum of theirs,

    a = [a₁; a₂; …]        b = blockdiag(s₁ b₁, s₂ b₂, …)       DoRA:  y = f∘(W x) + bias + f∘(b a x),  f = m/n

Legend: T tokens, K input features, N output features, r rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.linear import PreparedWeight, linear, prepare_linear_weight
from kernels.lora import LoraWeights, lora_add
from kernels.quantization import stack_nf4
from kernels.quantized_linear import PreparedQuantizedWeight, prepare_quantized_weight, quantized_linear
from kernels.quantized_swiglu import quantized_swiglu
from kernels.swiglu import swiglu
from model.linear import AnyLinear, Linear
from model.lora import Lora
from model.quantized import NF4Linear


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product and what is added to it; all in the dtype of serving."""

    weight: PreparedWeight | PreparedQuantizedWeight
    bias: Tensor | None
    lora: LoraWeights | None
    """The adapters of its layers as one."""
    factor: Tensor | None
    """m/n of DoRA, [N], where a layer has it."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x [T, K] -> [T, N]`."""
        if self.factor is None:
            return self._multiply(x, self.bias, self.lora)
        y = self._multiply(x, None, None)
        y = y * self.factor if self.bias is None else torch.addcmul(self.bias, y, self.factor)
        return y if self.lora is None else lora_add(y, x, self.lora, None)

    def _multiply(self, x: Tensor, bias: Tensor | None, lora: LoraWeights | None) -> Tensor:
        if not isinstance(self.weight, PreparedWeight):
            return quantized_linear(x, self.weight, bias, lora)
        y = linear(x, self.weight, bias)
        return y if lora is None else lora_add(y, x, lora, None)


class FusedLinear(nn.Module):
    """Several linear layers that read the same input, for inference."""

    def __init__(self, parts: Sequence[AnyLinear], dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in parts]
        self.products = _products(parts, dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(product(x) for product in self.products)
        return outputs[0].split(self.sizes, dim=-1) if len(outputs) == 1 else outputs


class FusedGate(nn.Module):
    """`silu(gate(x)) * up(x)` of the layers gate and up, for inference."""

    def __init__(self, gate: AnyLinear, up: AnyLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.both = FusedLinear([gate, up], dtype)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.both.products
        if others or first.factor is not None or isinstance(first.weight, PreparedWeight):
            return swiglu(*self.both(x))
        return quantized_swiglu(x, first.weight, first.bias, first.lora)


def _products(parts: Sequence[AnyLinear], dtype: torch.dtype) -> list[Product]:
    """One product, or one a layer where the weights do not go together."""
    weight = _stacked_weight(parts)
    if weight is None:
        return [product for part in parts for product in _products([part], dtype)]
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    factors = None
    if any(part.lora is not None and part.lora.magnitude is not None for part in parts):
        factors = torch.cat([_factor(part).to(dtype) for part in parts])
    return [Product(weight, torch.cat(biases).to(dtype) if biases else None, _stacked_adapters(parts, dtype), factors)]


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


def _stacked_adapters(parts: Sequence[AnyLinear], dtype: torch.dtype) -> LoraWeights | None:
    adapters = [part.lora for part in parts if part.lora is not None]
    if not adapters:
        return None
    blocks = [_scaled_b(part) for part in parts]
    a = torch.cat([lora.a.detach() for lora in adapters])
    b = torch.block_diag(*blocks)
    return LoraWeights(a.to(dtype)[None], b.to(dtype)[None].contiguous(), torch.ones(1, device=a.device))


def _scaled_b(part: AnyLinear) -> Tensor:
    """[N, r], scaled by s and by DoRA; of no rank where the layer has no adapter."""
    lora: Lora | None = part.lora
    if lora is None:
        return torch.zeros(part.out_features, 0, device=part.device)
    return lora.scale * _factor(part)[:, None] * lora.b.detach().float()


def _factor(part: AnyLinear) -> Tensor:
    if part.lora is None:
        return torch.ones(part.out_features, device=part.device)
    return part.lora.dora_factor(part).detach()
