"""NF4 weights in files, under the names and in the form in which bitsandbytes and transformers keep them.

    NAME                                   codes, u8 [⌈N·K/2⌉, 1]; or the same bytes as another dtype
    NAME.absmax                            u8 [B] if doubly quantized, else fp32
    NAME.quant_map                         the 16 values of NF4, fp32
    NAME.nested_absmax                     fp32 [⌈B/256⌉]       if doubly quantized
    NAME.nested_quant_map                  the 256 values of the dynamic code, fp32
    NAME.quant_state.bitsandbytes__nf4     UTF-8 JSON as u8: block sizes, shape, offset

NAME is that of the dense weight. config.json says `quantization_config`.

Legend: N output features, K input features, B blocks of 64.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.linear.quantization import (
    NESTED_BLOCK,
    NF4_BLOCK,
    NF4Weight,
    dynamic_table,
    nf4_table,
    quantize_nf4,
    stack_nf4,
)
from model.files.safe_io import CheckpointError
from model.formats.base import KernelFormat

_STATE = ".quant_state.bitsandbytes__nf4"
_ABSMAX, _TABLE, _NESTED, _NESTED_TABLE = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
_CPU = torch.device("cpu")
_TABLE_TOLERANCE = 1e-6
"""Tables that bitsandbytes computed instead of copying differ by a third of this."""


@dataclass(frozen=True)
class NF4(KernelFormat[NF4Weight]):
    """4 bits a weight, and a scale for 64 of them, in 8 bits again if `double`."""

    name: ClassVar[str] = "nf4"
    holds_embeddings: ClassVar[bool] = False

    double: bool = True

    @classmethod
    def with_options(cls, *, double: bool = True, **options: Any) -> Self:
        return super().with_options(**options) if options else cls(double)

    def of(self, weight: NF4Weight) -> Self:
        return type(self)(weight.nested_absmax is not None)

    def quantize(self, dense: Tensor) -> NF4Weight:
        return quantize_nf4(dense, double=self.double)

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Of codes, scales of blocks, and if double the scales' scales and their offset."""
        size = math.prod(shape)
        blocks = math.ceil(size / NF4_BLOCK)
        scales = blocks + 4 * (math.ceil(blocks / NESTED_BLOCK) + 1) if self.double else 4 * blocks
        return math.ceil(size / 2) + scales

    def prepared_bytes(self, shape: Sequence[int], *, on_gpu: bool) -> int:
        """Scales of blocks in fp32: on a GPU in another order, on a CPU where the weight's own are not."""
        return 4 * math.ceil(math.prod(shape) / NF4_BLOCK) if on_gpu or self.double else 0

    def stack(self, weights: Sequence[NF4Weight]) -> NF4Weight | None:
        return stack_nf4(weights)

    def check_narrow(self, columns: slice, num_columns: int) -> None:
        first, stop, _ = columns.indices(num_columns)
        if num_columns % NF4_BLOCK or first % NF4_BLOCK or stop % NF4_BLOCK:
            raise ValueError(
                f"blocks of {NF4_BLOCK} weights do not divide the {stop - first} that a rank takes of a row"
            )

    def of_parts(self) -> Self:
        """Not doubly quantized: blocks of scales do not follow the part's."""
        return type(self)(double=False)

    def narrow(self, weight: NF4Weight, rows: slice, columns: slice) -> NF4Weight:
        num_columns = weight.shape[1]
        first, stop, _ = columns.indices(num_columns)
        codes = weight.codes.view(weight.shape[0], num_columns // 2)[rows, first // 2 : stop // 2]
        scales = weight.block_scales().view(weight.shape[0], -1)[rows, first // NF4_BLOCK : stop // NF4_BLOCK]
        return NF4Weight(codes.flatten().clone(), scales.flatten().clone(), (len(codes), stop - first))

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        is_nf4 = cls.describe(entry) == "bitsandbytes, nf4"
        return cls(bool(entry.get("bnb_4bit_use_double_quant"))) if is_nf4 else None

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        four_bits = entry.get("load_in_4bit")
        method = entry.get("quant_method") or ("bitsandbytes" if four_bits else None)
        kind = entry.get("bnb_4bit_quant_type") if four_bits else "8 bits"
        return f"{method}, {kind}" if method == "bitsandbytes" else None

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            # transformers reads these two where it finds them.
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": _name_of(dtype),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": sorted(dense),
            "llm_int8_threshold": 6.0,
        }

    def stored_names(self, name: str) -> list[str]:
        return [name, *(name + suffix for suffix in (_ABSMAX, _TABLE, _NESTED, _NESTED_TABLE, _STATE))]

    def to_files(self, name: str, weight: NF4Weight, dtype: torch.dtype) -> dict[str, Tensor]:
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": NF4_BLOCK,
            "dtype": _name_of(dtype),
            "shape": list(weight.shape),
        }
        tensors = {name: weight.codes[:, None], name + _ABSMAX: weight.absmax, name + _TABLE: nf4_table(_CPU).clone()}
        if weight.nested_absmax is not None and weight.offset is not None:
            state |= {
                "nested_blocksize": NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": weight.offset.item(),
            }
            tensors |= {name + _NESTED: weight.nested_absmax, name + _NESTED_TABLE: dynamic_table(_CPU).clone()}
        tensors[name + _STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return {key: tensor.to(_CPU).contiguous() for key, tensor in tensors.items()}

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> NF4Weight:
        state = _read_state(name, read)
        _check_field(name, state, "quant_type", "nf4")
        _check_field(name, state, "blocksize", NF4_BLOCK)
        _check_field(name, state, "shape", list(shape))
        _check_table(name + _TABLE, read, nf4_table(_CPU))
        blocks = math.ceil(shape.numel() / NF4_BLOCK)
        codes = read(name).contiguous().view(-1).view(torch.uint8)
        _check_length(name, codes, math.ceil(shape.numel() / 2), "bytes")
        absmax = read(name + _ABSMAX)
        _check_length(name + _ABSMAX, absmax, blocks, "values")
        matrix = shape[0], shape[1]
        if "nested_offset" not in state:
            return NF4Weight(codes, absmax.float(), matrix)
        _check_field(name, state, "nested_blocksize", NESTED_BLOCK)
        _check_table(name + _NESTED_TABLE, read, dynamic_table(_CPU))
        nested = read(name + _NESTED).float()
        _check_length(name + _NESTED, nested, math.ceil(blocks / NESTED_BLOCK), "values")
        if absmax.dtype != torch.uint8:
            raise CheckpointError(f"{name}{_ABSMAX} is {absmax.dtype}; codes of double quantization are uint8.")
        return NF4Weight(codes, absmax, matrix, nested, torch.tensor(float(state["nested_offset"])))


def _read_state(name: str, read: Callable[[str], Tensor]) -> dict[str, Any]:
    try:
        state = json.loads(bytes(read(name + _STATE).tolist()).decode())
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{name}{_STATE} is not JSON in bytes.") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}{_STATE} must hold a JSON object, not {type(state).__name__}.")
    return state


def _check_field(name: str, state: dict[str, Any], field: str, expected: Any) -> None:
    if state.get(field) != expected:
        raise CheckpointError(f"{name}{_STATE} says {field} {state.get(field)!r}; only {expected!r} can be read.")


def _check_table(name: str, read: Callable[[str], Tensor], expected: Tensor) -> None:
    table = read(name).float()
    if table.shape != expected.shape or not torch.allclose(table, expected, rtol=0, atol=_TABLE_TOLERANCE):
        raise CheckpointError(f"{name} holds another code than the standard one.")


def _check_length(name: str, tensor: Tensor, length: int, unit: str) -> None:
    if tensor.ndim != 1 or len(tensor) != length:
        raise CheckpointError(f"{name} holds {list(tensor.shape)} {unit}; its shape calls for {length}.")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
