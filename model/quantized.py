"""A linear layer whose weight is frozen in one of the formats of `model.formats`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from model.formats.base import QuantizedMatrix, WeightFormat
from model.lora import Lora

_BLOCK_ELEMENTS = 1 << 22


class QuantizedLinear(nn.Module):
    """`x [T, in] -> [T, out]` with a weight in `format`, which has no gradient and no place among the parameters.

    Products run in the dtype of x, or of autocast. `model.to(dtype)` leaves the weight as it is. The first product
    prepares the weight for its device; what is then held twice is released.
    """

    def __init__(self, weight: Any, format: WeightFormat[Any], bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.format = format.of(weight)
        self.bias = bias
        self.lora: Lora | None = None
        self._weight = weight
        self._prepared: Any = None

    @property
    def weight(self) -> QuantizedMatrix:
        """The weight as files hold it."""
        return self._weight if self._prepared is None else self.format.restore(self._weight, self._prepared)

    @weight.setter
    def weight(self, weight: QuantizedMatrix) -> None:
        self._weight, self._prepared = weight, None

    @property
    def prepared_weight(self) -> Any:
        """The weight as `format.product` reads it."""
        if self._prepared is None:
            self._prepared = self.format.prepare(self._weight)
            self._weight = self.format.release(self._weight)
        return self._prepared

    @property
    def device(self) -> torch.device:
        return next(iter(self.format.tensors(self._weight).values())).device

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.format.num_bytes((self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = self.format.product(x, self.prepared_weight, self.bias)
        return y if self.lora is None else self.lora(x, y, self)

    @torch.no_grad()
    def times(self, x: Tensor) -> Tensor:
        """See `model.lora.AdaptedLinear`."""
        return self.format.product(x, self.prepared_weight)

    def row_squares(self) -> Tensor:
        """See `model.lora.AdaptedLinear`."""
        weight, step = self.weight, max(1, _BLOCK_ELEMENTS // self.in_features)
        starts = range(0, self.out_features, step)
        blocks = (weight.dequantize(rows=slice(start, start + step)) for start in starts)
        return torch.cat([block.square().sum(1) for block in blocks])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Follows `model.to(device)`; a change of dtype is none of the weight's business."""
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device
        if device != self.device:
            self.weight = self.format.moved(self.weight, device)
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, format={self.format.name}"


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The layers with quantized weights, by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def quantized_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Codes and scales of the model's quantized weights, as files hold them, each with a name."""
    for name, layer in quantized_layers(model).items():
        for kind, tensor in layer.format.tensors(layer.weight).items():
            yield f"{name}.{kind}", tensor


def set_quantized(model: nn.Module, name: str, weight: QuantizedMatrix, format: WeightFormat[Any]) -> None:
    """Gives a linear layer of the model this weight; its bias stays."""
    layer: Any = model.get_submodule(name)
    model.set_submodule(name, QuantizedLinear(weight, format, layer.bias))
