"""Weights as GGUF files store them, in ggml's blocks: their levels, scales and minima to the bit.

    NAME_levels     u8 [N, K/2], two levels of four bits a byte, the even one in the low nibble; else i8 [N, K]
    NAME_scale      f16 [N, G]; f32 in Q4_K and Q6_K, whose scales are products of two
    NAME_minimum    as the scales, in Q4_1, Q5_1 and Q4_K

NAME is that of the dense weight; `types` in config.json lists the layers of each type. Bits a weight here, and in GGUF:

    Q4_0 4.5, 4.5    Q4_1 5, 5    Q8_0 8.5, 8.5    Q5_0 8.5, 5.5    Q5_1 9, 6    Q4_K 6, 4.5    Q6_K 10, 6.56

Legend: N output features, K input features, G groups of a row.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.linear.quantization import (
    IntegerWeight,
    integer_levels,
    pack_int4,
    signed_levels,
    stack_integers,
    weight_of_codes,
)
from kernels.linear.rounded import Rounding
from model.files.safe_io import CheckpointError
from model.formats.base import FormatOfLayer, IntegerFormat, KernelFormat, WeightFormat
from model.formats.gguf.blocks import BLOCK_TYPES, SMALL_BLOCK, BlockType, Levels
from model.formats.words import check_stored

_METHOD = "ggml"
_SCALE, _MINIMUM, _LEVELS = "_scale", "_minimum", "_levels"


@dataclass(frozen=True)
class Ggml(KernelFormat[IntegerWeight]):
    """One of ggml's types."""

    name: ClassVar[str] = "ggml"

    type: str = "Q8_0"
    """ggml's name of it, one of BLOCK_TYPES."""
    rounding: Rounding | None = None
    """Files do not say it; llama.cpp rounds always, as `usual_rounding` says."""

    @property
    def readers(self) -> tuple[str, ...]:
        return ()

    @property
    def title(self) -> str:
        return f"GGML {self.type}"

    @property
    def _block(self) -> BlockType:
        return BLOCK_TYPES[self.type]

    @property
    def _has_nibbles(self) -> bool:
        return self._block.bits == 4

    @property
    def _numbers(self) -> torch.dtype:
        """Of scales and minima: a block's own are stored in fp16, those of its parts are products."""
        return torch.float16 if self._block.group == self._block.num_weights else torch.float32

    def rounded(self, num_inputs: int) -> Self:
        return replace(self, rounding=self.usual_rounding)

    def weight_of(self, stored: Tensor) -> IntegerWeight:
        """The weight of a matrix in blocks, u8 [N, bytes of a row]."""
        found: Levels = self._block.unpack(stored)
        scales = found.scales.to(self._numbers)
        minima = None if found.minima is None else found.minima.to(self._numbers)
        codes = pack_int4(found.levels) if self._has_nibbles else (found.levels - found.zero).view(torch.int8)
        return weight_of_codes(codes, scales, minima, columns=found.levels.shape[1], group=self._block.group)

    def blocks_of(self, weight: IntegerWeight) -> Tensor:
        """`weight_of` undone: u8 [N, bytes of a row]. CheckpointError where no blocks of the type hold it."""
        zero = self._block.zero
        levels = integer_levels(weight)[0]
        levels = levels if self._has_nibbles else levels + (zero - 128)  # modulo 256
        minima = self.tensors(weight).get("minima")
        minima = None if minima is None else minima.float()
        return self._block.repack(Levels(levels, weight.scales.float(), minima, zero))

    def quantize(self, dense: Tensor) -> IntegerWeight:
        self.check_row(dense.shape[1])
        return self.weight_of(self._block.quantize(dense))

    def num_bytes(self, shape: Sequence[int]) -> int:
        rows, columns = shape
        numbers = (1 + self._block.has_minimum) * self._numbers.itemsize * (columns // self._block.group)
        return rows * ((columns // 2 if self._has_nibbles else columns) + numbers)

    def stack(self, weights: Sequence[IntegerWeight]) -> IntegerWeight | None:
        return stack_integers(weights)

    @classmethod
    def of_layers(cls, entry: dict[str, Any]) -> FormatOfLayer | None:
        types = entry.get("types") if entry.get("quant_method") == _METHOD else None
        if not isinstance(types, dict) or not types.keys() <= BLOCK_TYPES.keys():
            return None
        return {layer: cls(type) for type, layers in types.items() for layer in layers}.get

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        types = list(entry.get("types") or ()) if cls.of_layers(entry) else []
        return cls(types[0]) if len(types) == 1 else None

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        return f"ggml, {', '.join(entry.get('types') or ())}" if entry.get("quant_method") == _METHOD else None

    @classmethod
    def entry_of_layers(
        cls, formats: Mapping[str, WeightFormat[Any]], dtype: torch.dtype, dense: Collection[str]
    ) -> dict[str, Any]:
        types: dict[str, list[str]] = {}
        for name, format in formats.items():
            if not isinstance(format, Ggml):
                raise CheckpointError(f"A folder cannot hold weights in {format.title} and in ggml's blocks.")
            types.setdefault(format.type, []).append(name)
        return {"quant_method": _METHOD, "types": types}

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        return {"quant_method": _METHOD, "types": {self.type: []}}

    def stored_names(self, name: str) -> list[str]:
        return [name + _SCALE, name + _MINIMUM, name + _LEVELS]

    def to_files(self, name: str, weight: IntegerWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        parts = {_LEVELS: weight.codes, _SCALE: weight.scales, _MINIMUM: self.tensors(weight).get("minima")}
        return {name + suffix: part.cpu().contiguous() for suffix, part in parts.items() if part is not None}

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> IntegerWeight:
        rows, columns = shape
        self.check_row(columns)
        group, numbers = self._block.group, [rows, columns // self._block.group]
        levels, scales = read(name + _LEVELS), read(name + _SCALE)
        minima = read(name + _MINIMUM) if self._block.has_minimum else None
        check_stored(name + _SCALE, scales, self._numbers, numbers)
        if minima is not None:
            check_stored(name + _MINIMUM, minima, self._numbers, numbers)
        dtype, width = (torch.uint8, columns // 2) if self._has_nibbles else (torch.int8, columns)
        check_stored(name + _LEVELS, levels, dtype, [rows, width])
        return weight_of_codes(levels, scales, minima, columns=columns, group=group)

    def check_row(self, num_inputs: int) -> None:
        if num_inputs % (size := self._block.num_weights):
            raise CheckpointError(f"{self.title}: blocks of {size} do not divide rows of {num_inputs} weights.")


def to_ggml(weight: IntegerWeight, format: WeightFormat[Any]) -> tuple[Ggml, IntegerWeight]:
    """The same levels in the type of GGUF that holds them, scales and minima in fp16.

    A weight that is in one stays as it is. ValueError for what no type holds.
    """
    if isinstance(format, Ggml):
        return format, weight
    if not isinstance(format, IntegerFormat):
        raise ValueError(f"{format.title} does not fit into GGUF's blocks of {SMALL_BLOCK} integers on a grid")
    if weight.shape[1] % SMALL_BLOCK:
        raise ValueError(
            f"GGUF's blocks of {SMALL_BLOCK} do not divide rows of {weight.shape[1]} weights; the dense model "
            "that it was made from can be written, with such rows in F16"
        )
    if weight.group % SMALL_BLOCK:
        raise ValueError(
            f"GGUF's blocks of {SMALL_BLOCK} do not divide groups of {weight.group}; they do if it is quantized with "
            f"weights.group: {SMALL_BLOCK}"
        )
    scales, columns = _of_blocks(weight.scales, weight), weight.shape[1]
    if 4 < format.bits < 8:  # less their zeros these levels fit into 8 bits
        return Ggml("Q8_0"), weight_of_codes(signed_levels(weight), scales, None, columns=columns, group=SMALL_BLOCK)
    zeros = integer_levels(weight)[2]
    minima = None if zeros is None else _of_blocks(-(zeros * weight.scales), weight)
    target = Ggml("Q8_0" if format.bits == 8 else "Q4_0" if minima is None else "Q4_1")
    return target, weight_of_codes(weight.codes, scales, minima, columns=columns, group=SMALL_BLOCK)


def _of_blocks(numbers: Tensor, weight: IntegerWeight) -> Tensor:
    """Of groups [N, G], those of each block of 32."""
    of_blocks = numbers.repeat_interleave(weight.group // SMALL_BLOCK, 1)[:, : weight.shape[1] // SMALL_BLOCK].half()
    if not torch.isfinite(of_blocks).all():
        raise ValueError("scales are too large for fp16, in which GGUF keeps them")
    return of_blocks
