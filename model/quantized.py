"""Linear layers and embeddings whose weight is frozen in one of the formats of `model.formats`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from model.formats.base import QuantizedMatrix, WeightFormat
from model.lora import EmbeddingLora, Lora
from model.packed import Packing

_BLOCK_ELEMENTS = 1 << 22


class QuantizedLayer(nn.Module):
    """A weight [N, K] in `format`, which has no gradient and, until it is packed, no place among the parameters.

    `model.to(dtype)` leaves the weight as it is. Its first use prepares it for its device; what is then held twice is
    released.
    """

    packed: nn.Parameter | None
    """All bytes of the weight, u8 [R, 64], behind `pack`; the layer can be used where they are whole."""

    def __init__(self, weight: Any, format: WeightFormat[Any]) -> None:
        super().__init__()
        self.shape: tuple[int, int] = weight.shape
        self.format = format.of(weight)
        self._weight = weight
        self._prepared: Any = None
        self._packing: Packing | None = None
        self.register_parameter("packed", None)

    @property
    def weight(self) -> QuantizedMatrix:
        """The weight as files hold it."""
        if self.packed is not None:
            return self.unpacked(self.packed)
        return self._weight if self._prepared is None else self.format.restore(self._weight, self._prepared)

    @weight.setter
    def weight(self, weight: QuantizedMatrix) -> None:
        self._weight, self._prepared = weight, None

    def pack(self) -> None:
        """Makes one frozen parameter, `packed`, of all that the layer holds, prepared for its device."""
        held = self.prepared_weight, self._weight
        self._packing = Packing(held)
        self.packed = nn.Parameter(self._packing.pack(held), requires_grad=False)
        self._weight = self._prepared = None

    def unpacked(self, packed: Tensor) -> QuantizedMatrix:
        """The weight as files hold it, in the memory of the bytes of `packed`, on whatever device they are."""
        prepared, weight = self._packing.unpack(packed)  # type: ignore[union-attr]
        return self.format.restore(weight, prepared)

    @property
    def prepared_weight(self) -> Any:
        """The weight as `format.product` reads it."""
        if self.packed is not None:
            return self._packing.unpack(self.packed)[0]  # type: ignore[union-attr]
        if self._prepared is None:
            self._prepared = self.format.prepare(self._weight)
            self._weight = self.format.release(self._weight, self._prepared)
        return self._prepared

    def empty(self) -> None:
        """Leaves shapes alone: tensors of one element."""
        hollow = {name: t.new_zeros(()).expand(t.shape) for name, t in self.format.tensors(self._weight).items()}
        self.weight = replace(self._weight, **hollow)

    @property
    def device(self) -> torch.device:
        if self.packed is not None:
            return self.packed.device
        return next(iter(self.format.tensors(self._weight).values())).device

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.format.num_bytes(self.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follows `model.to(device)`; a change of dtype is none of the weight's business."""
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device
        if device != self.device:
            self.weight = self.format.moved(self.weight, device)
        return self


class QuantizedLinear(QuantizedLayer):
    """`x [T, in] -> [T, out]`, a product in the dtype of x, or of autocast."""

    def __init__(self, weight: Any, format: WeightFormat[Any], bias: nn.Parameter | None = None) -> None:
        super().__init__(weight, format)
        self.out_features, self.in_features = self.shape
        self.bias = bias
        self.lora: Lora | None = None

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = self.format.product(x, self.prepared_weight, self.bias)
        return y if self.lora is None else self.lora(x, y, self)

    @torch.no_grad()
    def times(self, x: Tensor) -> Tensor:
        """See `model.lora.AdaptedLinear`."""
        return self.format.times(x, self.prepared_weight)

    def row_squares(self) -> Tensor:
        """See `model.lora.AdaptedLinear`."""
        weight, step = self.weight, max(1, _BLOCK_ELEMENTS // self.in_features)
        starts = range(0, self.out_features, step)
        blocks = (weight.dequantize(rows=slice(start, start + step)) for start in starts)
        return torch.cat([block.square().sum(1) for block in blocks])

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, format={self.format.name}"


class QuantizedEmbedding(QuantizedLayer):
    """`tokens [T] int64 -> [T, D]` in `dtype`, which follows `model.to(dtype)`; plus an adapter if it carries one."""

    def __init__(self, weight: Any, format: WeightFormat[Any], dtype: torch.dtype) -> None:
        super().__init__(weight, format)
        self.num_embeddings, self.embedding_dim = self.shape
        self.dtype = dtype
        self.lora: EmbeddingLora | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.format.rows(tokens, self.prepared_weight, self.dtype)
        return y if self.lora is None else self.lora(tokens, y)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.name}"


def quantized_layers(model: nn.Module, prefix: str = "") -> dict[str, QuantizedLayer]:
    """The layers with quantized weights, by name, in the model's order; `prefix` begins all names."""
    named = model.named_modules(prefix=prefix)
    return {name: module for name, module in named if isinstance(module, QuantizedLayer)}


def round_activations(model: nn.Module) -> None:
    """Has products of the model's quantized layers round activations to 8 bits; ValueError where one cannot."""
    for name, layer in quantized_layers(model).items():
        try:
            layer.format = layer.format.rounded(layer.shape[1])
        except ValueError as reason:
            raise ValueError(f"{name}: {reason}") from None


def quantized_tensors(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Codes and scales of the model's quantized weights, as files hold them, each with a name."""
    for name, layer in quantized_layers(model, prefix).items():
        for kind, tensor in layer.format.tensors(layer.weight).items():
            yield f"{name}.{kind}", tensor


def set_quantized(model: nn.Module, name: str, weight: QuantizedMatrix, format: WeightFormat[Any]) -> None:
    """Gives a linear layer or the embedding of a Transformer this weight; a bias stays, of a quantized one all else."""
    layer: Any = model.get_submodule(name)
    if isinstance(layer, QuantizedLayer):
        layer.weight, layer.format = weight, format.of(weight)
    elif isinstance(layer, nn.Embedding | QuantizedEmbedding):
        dtype: Any = model.dtype
        model.set_submodule(name, QuantizedEmbedding(weight, format, dtype))
    else:
        model.set_submodule(name, QuantizedLinear(weight, format, layer.bias))
