"""The serving form of linear layers that read the same input: as few products as their weights allow.

Layers of one format become one product where it can stack their weights. Adapters stay unmerged, and each token goes
through its own (model/fused_adapters.py).

Legend: T tokens, K input features, N output features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.geglu import geglu
from kernels.linear.dense import PreparedWeight
from kernels.linear.leading_rows import linear_of_leading_rows
from kernels.linear.lora import lora_add
from kernels.swiglu import swiglu, swiglu_of_halves
from model.adapter_slots import AdapterPlace
from model.formats.base import ServingForm
from model.fused_adapters import AdapterChoices, FusedAdapters, fuse_adapters
from model.linear import AnyLinear

_MOST_FREE_ROWS = 256
"""Up to here a product's time is that of reading its weight."""


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product and what is added to it; all in the dtype of serving."""

    form: ServingForm[Any]
    weight: Any
    """As `form` prepared it."""
    bias: Tensor | None
    adapters: FusedAdapters | None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is added to it."""
        return self.bias is None and self.adapters is None

    def __call__(self, x: Tensor, slots: Tensor | None, count: Tensor | None = None) -> Tensor:
        """`x [T, K] -> [T, N]`; `slots` and `count` as in `FusedLinear`."""
        y = self._of_leading_rows(x, slots, count)
        if slots is None or self.adapters is None:
            return self.form.product(x, self.weight, self.bias) if y is None else y
        if y is None:
            y = self.form.product(x, self.weight, self.bias, self.adapters.weights, slots)
        return self.adapters.rescale(y, self.bias, slots)

    def swiglu(self, x: Tensor, slots: Tensor | None, count: Tensor | None = None) -> Tensor:
        """`silu(gate) * up` of the two halves of the outputs, without DoRA."""
        if (y := self._of_leading_rows(x, slots, count)) is not None:
            return swiglu_of_halves(y)
        if slots is None or self.adapters is None:
            return self.form.swiglu(x, self.weight, self.bias)
        return self.form.swiglu(x, self.weight, self.bias, self.adapters.weights, slots)

    def _of_leading_rows(self, x: Tensor, slots: Tensor | None, count: Tensor | None) -> Tensor | None:
        """The product with what adapters add; None where all rows count, or are so few that others cost nothing."""
        if count is None or len(x) <= _MOST_FREE_ROWS:
            return None
        weight = self.form.expanded(self.weight, x.dtype)
        if weight is None:
            return None
        y = linear_of_leading_rows(x, weight, self.bias, count)
        return y if slots is None or self.adapters is None else lora_add(y, x, self.adapters.weights, slots)


class FusedTensor(NamedTuple):
    """Where a fused layer's weight or bias lies."""

    whole: PreparedWeight | Tensor
    rows: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.stop - self.rows.start, *self.whole.shape[1:]

    def write(self, values: Tensor) -> None:
        """Replaces it."""
        if isinstance(self.whole, PreparedWeight):
            self.whole.write(self.rows, values)
        else:
            self.whole[self.rows].copy_(values)


class Fused(nn.Module):
    """Several linear layers that read the same input, for inference. It takes their weights: they are empty then."""

    def __init__(self, parts: Mapping[str, AnyLinear], choices: AdapterChoices, dtype: torch.dtype) -> None:
        """`parts`: by the names that they have in their parent, and in checkpoints."""
        super().__init__()
        self.sizes = {name: part.out_features for name, part in parts.items()}
        self.products = _products(list(parts.values()), choices, dtype)
        for part in parts.values():
            # Adapters to choose from name their layers, so layers may outlive this; their weights must not.
            part.weight = part.bias = None  # type: ignore[assignment]

    def outputs(self, x: Tensor, slots: Tensor | None, count: Tensor | None = None) -> tuple[Tensor, ...]:
        """Of each layer, `[T, N]` of `x [T, K]`; `slots` and `count` as in `FusedLinear`."""
        if len(self.products) > 1:
            return tuple([product(x, slots, count) for product in self.products])
        y = self.products[0](x, slots, count)
        return y.split_with_sizes(tuple(self.sizes.values()), -1) if len(self.sizes) > 1 else (y,)

    def tensors(self) -> dict[str, FusedTensor | None]:
        """Where weights and biases of the layers lie, by names such as `q_proj.weight`; None for quantized weights."""
        found: dict[str, FusedTensor | None] = {}
        for name, product, rows in self._layers():
            weight = product.weight
            found[f"{name}.weight"] = FusedTensor(weight, rows) if isinstance(weight, PreparedWeight) else None
            if product.bias is not None:
                found[f"{name}.bias"] = FusedTensor(product.bias, rows)
        return found

    def adapter_places(self, max_rank: int) -> dict[str, AdapterPlace]:
        """Where slots of adapters lie, by the layers' names, if it was fused with room for those of `max_rank`."""
        found = {}
        for number, (name, product, rows) in enumerate(self._layers()):
            if product.adapters is not None:
                first = number * max_rank if len(self.products) == 1 else 0
                found[name] = AdapterPlace(product.adapters.weights, rows, slice(first, first + max_rank))
        return found

    def _layers(self) -> Iterator[tuple[str, Product, slice]]:
        """Each layer's name, product, and rows of that."""
        start = 0
        for number, (name, size) in enumerate(self.sizes.items()):
            if len(self.products) > 1:
                yield name, self.products[number], slice(0, size)
            else:
                yield name, self.products[0], slice(start, start + size)
            start += size


class FusedLinear(Fused):
    """The outputs of the layers."""

    def forward(self, x: Tensor, slots: Tensor | None = None, count: Tensor | None = None) -> tuple[Tensor, ...]:
        """`x [T, K]` -> one output a layer; slots int32 [T]: each token's adapter, −1 for none; None: none has one.

        count: int32 of no dimension, on the device: so many leading rows mean something; None: all do.
        """
        return self.outputs(x, slots, count)


class FusedGate(Fused):
    """`silu(gate(x)) * up(x)` of the layers gate and up, or of one that makes both."""

    uses_gelu = False

    def forward(self, x: Tensor, slots: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        """`x [T, K] -> [T, N]`; `slots` and `count` as in `FusedLinear`."""
        if self.uses_gelu:
            return geglu(*self.outputs(x, slots, count))
        first, *others = self.products
        adapters = None if slots is None else first.adapters
        is_dora = adapters is not None and adapters.factors is not None
        if not others and not is_dora:
            return first.swiglu(x, slots, count)
        made = self.outputs(x, slots, count)
        return swiglu(*made) if len(made) > 1 else swiglu_of_halves(made[0])


def _products(parts: Sequence[AnyLinear], choices: AdapterChoices, dtype: torch.dtype) -> list[Product]:
    """One product, or one a layer where the weights do not go together."""
    weight = parts[0].prepared_weight if len(parts) == 1 else _stacked_weight(parts)
    if weight is None:
        return [product for part in parts for product in _products([part], choices, dtype)]
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    bias = torch.cat(biases).to(dtype) if biases else None
    return [Product(parts[0].format, weight, bias, fuse_adapters(parts, choices, dtype))]


def _stacked_weight(parts: Sequence[AnyLinear]) -> Any:
    """Of several layers, prepared; None where they do not go together."""
    form: ServingForm[Any] = parts[0].format
    stacked = form.stack([part.weight for part in parts]) if all(part.format == form for part in parts) else None
    return None if stacked is None else form.prepare(stacked)
