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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.linear.quantization import NESTED_BLOCK, NF4_BLOCK, NF4Weight, dynamic_table, nf4_table
from model.files.safe_io import CheckpointError

STATE = ".quant_state.bitsandbytes__nf4"
_ABSMAX, _TABLE, _NESTED, NESTED_TABLE = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
_CPU = torch.device("cpu")
_TABLE_TOLERANCE = 1e-6
"""Tables that bitsandbytes computed instead of copying differ by a third of this."""


def is_nf4(folder: Path, raw: dict[str, Any]) -> bool:
    """Whether the contents of a config.json speak of NF4; CheckpointError for any other quantization."""
    if not raw.get("quantization_config"):
        return False
    config = raw["quantization_config"]
    method = config.get("quant_method") or ("bitsandbytes" if config.get("load_in_4bit") else "unknown")
    kind = config.get("bnb_4bit_quant_type") if config.get("load_in_4bit") else "8 bits"
    if method == "bitsandbytes" and kind == "nf4":
        return True
    what = f"{method}, {kind}" if method == "bitsandbytes" else method
    raise CheckpointError(
        f"{folder} is quantized ({what}); only plain floating-point weights and bitsandbytes' nf4 can be read."
    )


def quantization_config(dtype: torch.dtype, *, double: bool, dense: Collection[str]) -> dict[str, Any]:
    """What config.json says of an NF4 model; `dense` are the linear layers that are not quantized."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        # transformers reads these two where it finds them.
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": _name_of(dtype),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": sorted(dense),
        "llm_int8_threshold": 6.0,
    }


def stored_bytes(shape: torch.Size) -> int:
    """About how many bytes a doubly quantized weight takes."""
    numel = shape.numel()
    return numel // 2 + numel // NF4_BLOCK + 4 * (numel // (NF4_BLOCK * NESTED_BLOCK)) + 2048


def to_files(name: str, weight: NF4Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a weight, on the CPU; `dtype` is that to which bitsandbytes will expand it."""
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "dtype": _name_of(dtype),
        "shape": list(weight.shape),
    }
    tensors = {name: weight.codes[:, None], name + _ABSMAX: weight.absmax, name + _TABLE: nf4_table(_CPU).clone()}
    if weight.nested_absmax is not None and weight.offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": weight.offset.item()}
        tensors |= {name + _NESTED: weight.nested_absmax, name + NESTED_TABLE: dynamic_table(_CPU).clone()}
    tensors[name + STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {key: tensor.to(_CPU).contiguous() for key, tensor in tensors.items()}


def pieces(name: str) -> list[str]:
    """The names beside `name` that a weight may have in a file."""
    return [name + ending for ending in (_ABSMAX, _TABLE, _NESTED, NESTED_TABLE, STATE)]


def from_files(name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> NF4Weight:
    """Reads a weight [N, K] by its pieces; CheckpointError naming the piece that is wrong."""
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
    _check_table(name + NESTED_TABLE, read, dynamic_table(_CPU))
    nested = read(name + _NESTED).float()
    _check_length(name + _NESTED, nested, math.ceil(blocks / NESTED_BLOCK), "values")
    if absmax.dtype != torch.uint8:
        raise CheckpointError(f"{name}{_ABSMAX} is {absmax.dtype}; codes of double quantization are uint8.")
    return NF4Weight(codes, absmax, matrix, nested, torch.tensor(float(state["nested_offset"])))


def _read_state(name: str, read: Callable[[str], Tensor]) -> dict[str, Any]:
    try:
        state = json.loads(bytes(read(name + STATE).tolist()).decode())
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{name}{STATE} is not JSON in bytes.") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}{STATE} must hold a JSON object, not {type(state).__name__}.")
    return state


def _check_field(name: str, state: dict[str, Any], field: str, expected: Any) -> None:
    if state.get(field) != expected:
        raise CheckpointError(f"{name}{STATE} says {field} {state.get(field)!r}; only {expected!r} can be read.")


def _check_table(name: str, read: Callable[[str], Tensor], expected: Tensor) -> None:
    table = read(name).float()
    if table.shape != expected.shape or not torch.allclose(table, expected, rtol=0, atol=_TABLE_TOLERANCE):
        raise CheckpointError(f"{name} holds another code than the standard one.")


def _check_length(name: str, tensor: Tensor, length: int, unit: str) -> None:
    if tensor.ndim != 1 or len(tensor) != length:
        raise CheckpointError(f"{name} holds {list(tensor.shape)} {unit}; its shape calls for {length}.")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
