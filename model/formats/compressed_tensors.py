"""INT8 weights in files, as compressed-tensors' "pack-quantized" holds them for transformers and vLLM.

    NAME_packed    i32 [N, ⌈K/4⌉]: value + 128, four a word, the first in the lowest bits
    NAME_scale     [N, 1], in the model's dtype
    NAME_shape     i64 [2]: N and K

NAME is that of the dense weight; activations are not quantized. Source: vllm-project/compressed-tensors.

Legend: N output features, K input features.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.quantization import Int8Weight, quantize_int8
from model.files.safe_io import CheckpointError
from model.formats.base import KernelFormat

_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_METHOD, _LAYOUT = "compressed-tensors", "pack-quantized"
_SCHEME = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_PER_WORD = 4


@dataclass(frozen=True)
class Int8(KernelFormat[Int8Weight]):
    """8 bits a weight, symmetric, and a scale for each row."""

    name: ClassVar[str] = "int8"

    def quantize(self, dense: Tensor) -> Int8Weight:
        return quantize_int8(dense)

    def num_bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) + 4 * shape[0]

    def stack(self, weights: Sequence[Int8Weight]) -> Int8Weight:
        codes, scales = ([getattr(weight, name) for weight in weights] for name in ("codes", "scales"))
        return Int8Weight(torch.cat(codes), torch.cat(scales))

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        groups = list((entry.get("config_groups") or {}).values())
        if entry.get("quant_method") != _METHOD or entry.get("kv_cache_scheme") or not groups:
            return None
        return cls() if all(_is_int8(group, entry.get("format")) for group in groups) else None

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        if entry.get("quant_method") != _METHOD:
            return None
        groups = (entry.get("config_groups") or {}).values()
        schemes = {f"{w.get('num_bits')} bits a {w.get('strategy')}" for w in (g.get("weights") or {} for g in groups)}
        return ", ".join([_METHOD, str(entry.get("format")), *sorted(schemes)])

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": _SCHEME, "input_activations": None, "output_activations": None}
        return {
            "quant_method": _METHOD,
            "format": _LAYOUT,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted(dense),
            "kv_cache_scheme": None,
        }

    def stored_names(self, name: str) -> list[str]:
        return [name + _SCALE, name + _SHAPE, name + _PACKED]

    def to_files(self, name: str, weight: Int8Weight, dtype: torch.dtype) -> dict[str, Tensor]:
        codes = F.pad(weight.codes.cpu().view(torch.uint8) ^ 128, (0, -weight.shape[1] % _PER_WORD))
        wide = weight.scales.cpu()[:, None]
        scales = wide.to(dtype)
        return {
            name + _PACKED: codes.contiguous().view(torch.int32),
            # Scales made of weights in this dtype are numbers of it; others keep their bits.
            name + _SCALE: scales if torch.equal(scales.float(), wide) else wide.contiguous(),
            name + _SHAPE: torch.tensor(weight.shape, dtype=torch.int64),
        }

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> Int8Weight:
        rows, columns = shape
        packed, scales, stored = (read(name + suffix) for suffix in (_PACKED, _SCALE, _SHAPE))
        if stored.tolist() != [rows, columns]:
            raise CheckpointError(f"{name}{_SHAPE} says {stored.tolist()}; config.json calls for {[rows, columns]}.")
        words = [rows, math.ceil(columns / _PER_WORD)]
        if packed.dtype != torch.int32 or list(packed.shape) != words:
            raise CheckpointError(f"{name}{_PACKED} is {packed.dtype} {list(packed.shape)}, not torch.int32 {words}.")
        if not scales.is_floating_point() or list(scales.shape) != [rows, 1]:
            raise CheckpointError(f"{name}{_SCALE} is {scales.dtype} {list(scales.shape)}, not floats {[rows, 1]}.")
        codes = packed.contiguous().view(torch.uint8)[:, :columns] ^ 128
        return Int8Weight(codes.contiguous().view(torch.int8), scales[:, 0].float())


def _is_int8(group: dict[str, Any], layout: str | None) -> bool:
    weights = group.get("weights") or {}
    activations = group.get("input_activations") or group.get("output_activations")
    same = all(weights.get(key, value) == value for key, value in _SCHEME.items())
    layout = group.get("format") or layout
    return same and layout == _LAYOUT and not activations and not weights.get("actorder")
