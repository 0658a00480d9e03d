"""A weight as one tensor of bytes, of which a process may hold some rows.

Whoever shards parameters then treats a quantized weight as any other: bytes of different dtypes are cut, gathered and
freed together. The memory of a gathered copy may move and be filled anew; the tensors are views into it.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

ROW = 64
"""Bytes; each tensor begins with a row, which suits every dtype and every load of a kernel."""


class Packing:
    """Where the tensors of an object lie among the bytes; `held`: a tensor, or dataclasses and tuples of such."""

    def __init__(self, held: Any) -> None:
        hollow: dict[int, Any] = {id(tensor): tensor.to("meta") for tensor in _tensors(held)}
        self._places: list[tuple[Tensor, int]] = []
        self.num_rows = 0
        for tensor in hollow.values():
            self._places.append((tensor, self.num_rows))
            self.num_rows += math.ceil(tensor.nbytes / ROW)
        self._held = copy.deepcopy(held, hollow)

    def pack(self, held: Any) -> Tensor:
        """The bytes of what was given at first, u8 [num_rows, ROW]."""
        first = next(_tensors(held))
        packed = torch.zeros(self.num_rows, ROW, dtype=torch.uint8, device=first.device)
        for place, tensor in zip(self._views(packed), {id(t): t for t in _tensors(held)}.values(), strict=True):
            place.copy_(tensor)
        return packed

    def unpack(self, packed: Tensor) -> Any:
        """The object again, made of views into its bytes."""
        views = self._views(packed.detach())
        return copy.deepcopy(self._held, {id(place[0]): view for place, view in zip(self._places, views, strict=True)})

    def _views(self, packed: Tensor) -> Iterator[Tensor]:
        flat = packed.reshape(-1)
        for hollow, row in self._places:
            yield flat[row * ROW :][: hollow.nbytes].view(hollow.dtype).view(hollow.shape)


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif is_dataclass(held):
        for field in fields(held):
            yield from _tensors(getattr(held, field.name))
    elif isinstance(held, tuple):
        for part in held:
            yield from _tensors(part)
