"""A weight format that exists for tests alone: a bit a weight, the sign, and the mean magnitude of each row."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from model.formats.base import WeightFormat


@dataclass(frozen=True)
class SignWeight:
    """A matrix [N, K] of ±size of its row."""

    signs: Tensor
    sizes: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.signs.shape[0], self.signs.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice = slice(None)) -> Tensor:
        return (torch.where(self.signs[rows], 1.0, -1.0) * self.sizes[rows, None]).to(dtype)


@dataclass(frozen=True)
class Sign(WeightFormat[SignWeight]):
    name: ClassVar[str] = "sign"

    def quantize(self, dense: Tensor) -> SignWeight:
        return SignWeight(dense > 0, dense.float().abs().mean(1))

    def num_bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) + 4 * shape[0]

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        return cls() if entry.get("quant_method") == "sign" else None

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        return {"quant_method": "sign"}

    def stored_names(self, name: str) -> list[str]:
        return [f"{name}.sizes", f"{name}.signs"]

    def to_files(self, name: str, weight: SignWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        return {f"{name}.{part}": tensor.cpu() for part, tensor in self.tensors(weight).items()}

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> SignWeight:
        return SignWeight(read(f"{name}.signs"), read(f"{name}.sizes"))
