"""Slots of a fused model, into which adapters are written while it serves.

The tables of every product (model/fused_adapters.py) are made once and written in place, so that captured graphs stay
valid. A slot holds one adapter, without DoRA: its factors need the weights of the layers apart.

Legend: S slots, N output features and K input features of one layer, r rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.linear.lora import LoraWeights


class Factors(Protocol):
    """The adapter of one layer."""

    @property
    def a(self) -> Tensor:
        """fp32 [r, K]."""
        ...

    @property
    def b(self) -> Tensor:
        """fp32 [N, r]."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """Where the slots of one layer lie among those of its product."""

    weights: LoraWeights
    rows: slice
    """Of the product's outputs."""
    columns: slice
    """Of its ranks."""

    @property
    def in_features(self) -> int:
        return self.weights.a.shape[2]

    @property
    def out_features(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def write(self, slot: int, factors: Factors) -> None:
        """Writes a slot whose ranks are zeros."""
        columns = slice(self.columns.start, self.columns.start + len(factors.a))
        self.weights.a[slot, columns].copy_(factors.a)
        self.weights.b[slot, self.rows, columns].copy_(factors.b)


class AdapterSlots:
    """All slots of a model; made by `Transformer.fuse`."""

    def __init__(
        self, places: Mapping[str, AdapterPlace], *, num_slots: int, max_rank: int, dtype: torch.dtype
    ) -> None:
        """`places`: by the layers' names in checkpoints."""
        self.places = places
        self.num_slots, self.max_rank, self.dtype = num_slots, max_rank, dtype

    @property
    def most_values(self) -> int:
        """Numbers of the largest adapter that fits."""
        return self.max_rank * sum(place.in_features + place.out_features for place in self.places.values())

    @torch.no_grad()
    def write(self, slot: int, layers: Mapping[str, Factors], scale: float) -> None:
        """Has tokens that name the slot go through this adapter from here on; its layers are among `places`.

        What has been launched before still sees the old one: the device works in order.
        """
        for place in self.places.values():
            for table in (place.weights.a, place.weights.b):
                table[slot].zero_()
            place.weights.scales[slot] = scale
        for name, factors in layers.items():
            self.places[name].write(slot, factors)
