"""Adapters and the products that take them, for the tests of LoRA and of the quantized layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.linear.lora import LoraWeights
from kernels.linear.quantized import quantized_linear, quantized_linear_reference
from kernels.linear.quantized_swiglu import quantized_swiglu, quantized_swiglu_reference

Device = torch.device | str
Product = tuple[Callable[..., Tensor], Callable[..., Tensor]]
"""A function and its reference."""
PRODUCTS: dict[str, Product] = {
    "linear": (quantized_linear, quantized_linear_reference),
    "swiglu": (quantized_swiglu, quantized_swiglu_reference),
}
BOTH = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def rows(device: Device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(device)


def make_weights(device: Device, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> LoraWeights:
    """Adapters of a shape (S, R, K, N)."""
    s, r, k, n = shape
    a, b = torch.randn(s, r, k) / k**0.5, torch.randn(s, n, r) / r**0.5
    return LoraWeights(a.to(dtype).to(device), b.to(dtype).to(device), 0.5 + torch.rand(s).to(device))


def make_slots(device: Device, tokens: int, adapters: int) -> Tensor:
    """Adapters in any order, and some rows without one."""
    return torch.randint(-1, adapters, (tokens,), dtype=torch.int32).to(device)


def double(weights: LoraWeights) -> LoraWeights:
    return LoraWeights(weights.a.double(), weights.b.double(), weights.scales)
