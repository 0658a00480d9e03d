"""Ternary weights in files, as BitNet b1.58 models hold them for transformers.

    w = (level − 1) · s,   s = mean |W|,   level = clamp(round(W / s), −1, 1) + 1          one s for the matrix

    NAME           u8 [N/4, K]: levels of two bits; from the lowest bits those of the rows n, n + N/4, n + N/2, n + 3N/4
    NAME_scale     [1]: 1 / s; of the linear class autobitlinear s

NAME is that of the dense weight. Activations are rounded to 8 bits, each token by itself, in training as in serving.
Sources: https://arxiv.org/abs/2402.17764; the layout as in transformers.

Legend: T tokens, N output features, K input features.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.linear.dense import linear
from kernels.linear.lora import LoraWeights, Slots, lora_add
from kernels.linear.rounded import Rounding, round_activations
from model.files.safe_io import CheckpointError
from model.formats.base import GridFormat
from model.formats.words import check_scales, check_stored, stored_scales

_METHOD, _SCALE = "bitnet", "_scale"
_PER_BYTE = 4
_SMALLEST_MEAN = 1e-5


@dataclass(frozen=True)
class TernaryWeight:
    """A matrix [N, K] of −s, 0 and s."""

    codes: Tensor
    """u8 [N/4, K], as in files."""
    scale: Tensor
    """s, fp32 [1]."""

    @property
    def shape(self) -> tuple[int, int]:
        return _PER_BYTE * self.codes.shape[0], self.codes.shape[1]

    def levels(self) -> Tensor:
        """0, 1 and 2, u8 [N, K]."""
        return torch.cat([self.codes >> 2 * part & 3 for part in range(_PER_BYTE)])

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | Tensor = slice(None)) -> Tensor:
        """The matrix, or `rows` of it."""
        return ((self.levels()[rows].float() - 1) * self.scale).to(dtype)


@dataclass(frozen=True)
class Ternary(GridFormat[TernaryWeight]):
    """2 bits a weight for −1, 0 and 1, a scale for the matrix, and rounded activations: for research."""

    name: ClassVar[str] = "ternary"
    holds_embeddings: ClassVar[bool] = False
    num_levels: ClassVar[int] = 3

    linear_class: str = "bitlinear"
    """Of the files that it is read from; written is always bitlinear."""

    @property
    def readers(self) -> tuple[str, ...]:
        return ("transformers",)

    def of(self, weight: TernaryWeight) -> Self:
        return type(self)()

    def quantize(self, dense: Tensor) -> TernaryWeight:
        wide = dense.float()
        scale = self.nearest_scales(wide.abs().mean().clamp(min=_SMALLEST_MEAN).view(1), dense.dtype)
        return self.pack(((wide / scale).round().clamp(-1, 1) + 1).to(torch.uint8), scale)

    def num_bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) // _PER_BYTE + 4

    # The grid

    def num_scales(self, shape: Sequence[int]) -> int:
        return 1

    def pack(self, levels: Tensor, scales: Tensor, zeros: Tensor | None = None) -> TernaryWeight:
        if len(levels) % _PER_BYTE:
            raise ValueError(f"{self.title} holds rows in fours, not {len(levels)}")
        parts = levels.chunk(_PER_BYTE)
        return TernaryWeight(parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6, scales.view(1))

    def unpack(self, weight: TernaryWeight) -> tuple[Tensor, Tensor, None]:
        return weight.levels(), weight.scale.view(1, 1), None

    def nearest_scales(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return 1 / (1 / scales).to(dtype).float()

    # Products

    @property
    def rounds_activations(self) -> bool:
        return True

    def product(
        self, x: Tensor, prepared: Any, bias: Tensor | None = None, lora: LoraWeights | None = None, slots: Slots = None
    ) -> Tensor:
        q, scales = round_activations(x, Rounding(torch.int8, narrow=True))
        y = (linear(q, prepared.levels().to(x.dtype) - 1).float() * (scales * prepared.scale)).to(x.dtype)
        y = y if bias is None else y + bias.to(x.dtype)
        return y if lora is None else lora_add(y, x, lora, slots)

    def expanded(self, prepared: Any, dtype: torch.dtype) -> Tensor | None:
        return None

    def times(self, x: Tensor, prepared: Any) -> Tensor:
        return super().product(x, prepared)

    # Files

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        packed = entry.get("quantization_mode", "offline") == "offline" and not entry.get("use_rms_norm")
        return cls(entry.get("linear_class", "bitlinear")) if entry.get("quant_method") == _METHOD and packed else None

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        norm = ", norms before products" if entry.get("use_rms_norm") else ""
        return f"{_METHOD}, {entry.get('quantization_mode')}{norm}" if entry.get("quant_method") == _METHOD else None

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": _METHOD,
            "linear_class": "bitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": sorted(dense),
        }

    def stored_names(self, name: str) -> list[str]:
        return [name, name + _SCALE]

    def to_files(self, name: str, weight: TernaryWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: weight.codes.cpu().contiguous(), name + _SCALE: stored_scales(1 / weight.scale.cpu(), dtype)}

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> TernaryWeight:
        codes, stored = read(name), read(name + _SCALE)
        check_stored(name, codes, torch.uint8, [shape[0] // _PER_BYTE, shape[1]])
        check_scales(name + _SCALE, stored, [1])
        if (codes & codes >> 1 & 0x55).any():
            raise CheckpointError(f"{name} holds a level of 3; there are three, 0 to 2.")
        scale = stored.float()
        return TernaryWeight(codes, 1 / scale if self.linear_class == "bitlinear" else scale)
