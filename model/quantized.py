"""A linear layer whose weight is frozen in NF4."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kernels.linear.quantization import NF4Weight
from kernels.linear.quantized import (
    PreparedQuantizedWeight,
    nf4_codes,
    prepare_quantized_weight,
    quantized_linear,
)
from model.lora import Lora

_BLOCK_ELEMENTS = 1 << 22


class NF4Linear(nn.Module):
    """`x [T, in] -> [T, out]` with a weight in NF4, which has no gradient and no place among the parameters.

    Products run in the dtype of x, or of autocast. `model.to(dtype)` leaves the weight as it is. The first product
    repacks the weight for its device; on a GPU only the repacked codes are kept then.
    """

    def __init__(self, weight: NF4Weight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.lora: Lora | None = None
        self._weight = weight
        self._prepared: PreparedQuantizedWeight | None = None

    @property
    def weight(self) -> NF4Weight:
        """The weight as bitsandbytes stores it; on a GPU after the first product, its codes are made anew."""
        if len(self._weight.codes) or self._prepared is None:
            return self._weight
        return replace(self._weight, codes=nf4_codes(self._prepared))

    @weight.setter
    def weight(self, weight: NF4Weight) -> None:
        self._weight, self._prepared = weight, None

    @property
    def prepared_weight(self) -> PreparedQuantizedWeight:
        """The weight as `kernels.linear.quantized` reads it."""
        if self._prepared is None:
            self._prepared = prepare_quantized_weight(self._weight)
            if self._weight.codes.is_cuda:
                self._weight = replace(self._weight, codes=self._weight.codes.new_empty(0))
        return self._prepared

    @property
    def device(self) -> torch.device:
        return self._weight.absmax.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes and scales."""
        numel = self.out_features * self.in_features
        scales = (self._weight.absmax, self._weight.nested_absmax, self._weight.offset)
        return -(-numel // 2) + sum(tensor.nbytes for tensor in scales if tensor is not None)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = quantized_linear(x, self.prepared_weight, self.bias)
        return y if self.lora is None else self.lora(x, y, self)

    @torch.no_grad()
    def times(self, x: Tensor) -> Tensor:
        """See `model.lora.AdaptedLinear`."""
        return quantized_linear(x, self.prepared_weight)

    def row_squares(self) -> Tensor:
        """See `model.lora.AdaptedLinear`."""
        weight, step = self.weight, max(1, _BLOCK_ELEMENTS // self.in_features)
        starts = range(0, self.out_features, step)
        blocks = (weight.dequantize(rows=slice(start, start + step)) for start in starts)
        return torch.cat([block.square().sum(1) for block in blocks])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NF4Linear":
        """Follows `model.to(device)`; a change of dtype is none of the weight's business."""
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device
        if device != self.device:
            self.weight = move_nf4(self.weight, device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def nf4_layers(model: nn.Module) -> dict[str, NF4Linear]:
    """The layers with NF4 weights, by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NF4Linear)}


def nf4_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Codes and scales of the model's NF4 weights, as bitsandbytes stores them, each with a name."""
    for name, layer in nf4_layers(model).items():
        weight = layer.weight
        for kind in ("codes", "absmax", "nested_absmax", "offset"):
            tensor = getattr(weight, kind)
            if tensor is not None:
                yield f"{name}.{kind}", tensor


def set_nf4(model: nn.Module, name: str, weight: NF4Weight) -> None:
    """Gives a linear layer of the model this weight; its bias stays."""
    layer: Any = model.get_submodule(name)
    model.set_submodule(name, NF4Linear(weight, layer.bias))


def move_nf4(weight: NF4Weight, device: torch.device) -> NF4Weight:
    """The weight on another device."""
    nested_absmax, offset = (None if x is None else x.to(device) for x in (weight.nested_absmax, weight.offset))
    return NF4Weight(weight.codes.to(device), weight.absmax.to(device), weight.shape, nested_absmax, offset)
