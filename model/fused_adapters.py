"""Adapters of layers that one matrix product computes, unmerged, for inference: each token goes through one of them.

    y' = y + s·B (A x)                  s, A, B of the token's adapter; y = W x + b of all the layers, side by side
    y' = y + (m/n − 1)·(y − b)          then, where it is DoRA

A is the layers' stacked, B a block diagonal; a layer that an adapter leaves alone has no part in either. See
model/lora.py for the formulas.

Legend: T tokens, S adapters, N output features of all the layers, K input features, R the largest sum of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.linear.lora import LoraWeights
from model.lora import Lora


class AdapterRoom(NamedTuple):
    """Room for adapters that come and go (model/adapter_slots.py)."""

    num_slots: int
    """S: those that one batch can use."""
    max_rank: int


AdapterChoices = Sequence[Mapping[nn.Module, Lora]] | AdapterRoom
"""Adapters that tokens choose from by number: each names the layers that it adapts. Or room for such."""


@dataclass(frozen=True, slots=True)
class FusedAdapters:
    """Made by `fuse_adapters`. Tokens name an adapter by its number; with −1 they have none and keep their bits."""

    weights: LoraWeights
    factors: Tensor | None
    """fp32 [S, N], m/n of DoRA; None if none is DoRA."""

    def rescale(self, y: Tensor, bias: Tensor | None, slots: Tensor) -> Tensor:
        """The outputs [T, N] with DoRA, of `y` with bias and low-rank parts; slots int32 [T]."""
        if self.factors is None:
            return y
        factors = self.factors.index_select(0, slots.clamp_min(0))
        product = y if bias is None else y - bias
        return torch.where(slots[:, None] < 0, y, y + (factors - 1).to(y.dtype) * product)


@torch.no_grad()
def fuse_adapters(parts: Sequence[nn.Module], choices: AdapterChoices, dtype: torch.dtype) -> FusedAdapters | None:
    """The adapters of linear layers with one input, for a product in `dtype`; None if no layer is adapted."""
    if isinstance(choices, AdapterRoom):
        return _empty_slots(parts, choices, dtype)
    chosen = [[adapter.get(part) for part in parts] for adapter in choices]
    present = [lora for loras in chosen for lora in loras if lora is not None]
    if not present:
        return None
    sizes, device = [int(part.out_features) for part in parts], present[0].a.device  # type: ignore[arg-type]
    rank = max(sum(len(lora.a) for lora in loras if lora is not None) for loras in chosen)
    a = torch.zeros(len(chosen), rank, present[0].a.shape[1], dtype=dtype, device=device)
    b = torch.zeros(len(chosen), sum(sizes), rank, dtype=dtype, device=device)
    scales = torch.zeros(len(chosen), device=device)
    factors = torch.ones(len(chosen), sum(sizes), device=device)
    for number, loras in enumerate(chosen):
        row = column = 0
        for part, size, lora in zip(parts, sizes, loras, strict=True):
            if lora is not None:
                rows, columns = slice(row, row + size), slice(column, column + len(lora.a))
                a[number, columns], b[number, rows, columns] = lora.a, lora.b
                scales[number] = lora.scale
                factors[number, rows] = lora.dora_factor(part)  # type: ignore[arg-type]
                column = columns.stop
            row += size
    is_dora = any(lora.magnitude is not None for lora in present)
    return FusedAdapters(LoraWeights(a, b, scales), factors if is_dora else None)


def _empty_slots(parts: Sequence[nn.Module], room: AdapterRoom, dtype: torch.dtype) -> FusedAdapters:
    """Slots of zeros, in which each layer has `max_rank` columns of its own."""
    sizes: list[Any] = [part.out_features for part in parts]
    first: Any = parts[0]
    slots, rank = room.num_slots, room.max_rank * len(parts)
    a = torch.zeros(slots, rank, first.in_features, dtype=dtype, device=first.device)
    b = torch.zeros(slots, sum(sizes), rank, dtype=dtype, device=first.device)
    return FusedAdapters(LoraWeights(a, b, torch.zeros(slots, device=first.device)), factors=None)
