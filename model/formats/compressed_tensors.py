"""INT4 and INT8 weights in files, as compressed-tensors' "pack-quantized" holds them for transformers and vLLM.

    NAME_packed        i32 [N, ⌈K·bits/32⌉]: levels, the first in the lowest bits; the level of 0 is 2^(bits−1)
    NAME_scale         [N, G], in the model's dtype
    NAME_zero_point    i32 [⌈N·bits/32⌉, G]: levels of 0, packed along N; not where symmetric
    NAME_shape         i64 [2]: N and K

NAME is that of the dense weight; activations are not quantized. Source: vllm-project/compressed-tensors.

Legend: N output features, K input features, G groups of a row.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.linear.quantization import IntegerWeight
from model.files.safe_io import CheckpointError
from model.formats.base import IntegerFormat
from model.formats.words import num_words, pack_words, unpack_words

_PACKED, _SCALE, _ZERO, _SHAPE = "_packed", "_scale", "_zero_point", "_shape"
_METHOD, _LAYOUT = "compressed-tensors", "pack-quantized"
_FIXED = {"type": "int", "dynamic": False}


class _PackQuantized(IntegerFormat):
    """What the files of all widths share."""

    @property
    def _scheme(self) -> dict[str, Any]:
        strategy = {"strategy": "channel"} if self.group is None else {"strategy": "group", "group_size": self.group}
        return {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, **strategy, "dynamic": False}

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        groups = list((entry.get("config_groups") or {}).values())
        if entry.get("quant_method") != _METHOD or entry.get("kv_cache_scheme") or not groups:
            return None
        found = {cls._of_group(group, entry.get("format")) for group in groups}
        return found.pop() if len(found) == 1 else None

    @classmethod
    def _of_group(cls, group: dict[str, Any], layout: str | None) -> Self | None:
        weights = group.get("weights") or {}
        activations = group.get("input_activations") or group.get("output_activations")
        if (group.get("format") or layout) != _LAYOUT or activations or weights.get("actorder"):
            return None
        if any(weights.get(key, value) != value for key, value in _FIXED.items()):
            return None
        size = weights.get("group_size") if weights.get("strategy") == "group" else None
        try:
            found = cls(size, bool(weights.get("symmetric", True)))
        except ValueError:
            return None
        return found if found._scheme == {key: weights.get(key) for key in found._scheme} else None

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        if entry.get("quant_method") != _METHOD:
            return None
        groups = (entry.get("config_groups") or {}).values()
        schemes = {f"{w.get('num_bits')} bits a {w.get('strategy')}" for w in (g.get("weights") or {} for g in groups)}
        return ", ".join([_METHOD, str(entry.get("format")), *sorted(schemes)])

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": self._scheme, "input_activations": None, "output_activations": None}
        return {
            "quant_method": _METHOD,
            "format": _LAYOUT,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted(dense),
            "kv_cache_scheme": None,
        }

    def stored_names(self, name: str) -> list[str]:
        return [name + _SCALE, name + _ZERO, name + _SHAPE, name + _PACKED]

    def to_files(self, name: str, weight: IntegerWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        levels, wide, zeros = self.unpack(self.moved(weight, "cpu"))
        scales = wide.to(dtype)
        tensors = {
            name + _PACKED: pack_words(levels, self.bits),
            # Scales made of weights in this dtype are numbers of it; others keep their bits.
            name + _SCALE: scales if torch.equal(scales.float(), wide) else wide.contiguous(),
            name + _SHAPE: torch.tensor(weight.shape, dtype=torch.int64),
        }
        if zeros is not None:
            tensors[name + _ZERO] = pack_words(zeros.t(), self.bits).t().contiguous()
        return tensors

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> IntegerWeight:
        rows, columns = shape
        groups = self._groups_of(name, columns)
        packed, scales, stored = (read(name + suffix) for suffix in (_PACKED, _SCALE, _SHAPE))
        if stored.tolist() != [rows, columns]:
            raise CheckpointError(f"{name}{_SHAPE} says {stored.tolist()}; config.json calls for {[rows, columns]}.")
        _check(name + _PACKED, packed, [rows, num_words(columns, self.bits)])
        if not scales.is_floating_point() or list(scales.shape) != [rows, groups]:
            found = f"{scales.dtype} {list(scales.shape)}"
            raise CheckpointError(f"{name}{_SCALE} is {found}, not floats {[rows, groups]}.")
        zeros = None
        if not self.symmetric:
            words = read(name + _ZERO)
            _check(name + _ZERO, words, [num_words(rows, self.bits), groups])
            zeros = unpack_words(words.t(), self.bits, rows).t().contiguous()
        return self.pack(unpack_words(packed, self.bits, columns), scales.float(), zeros)

    def _groups_of(self, name: str, columns: int) -> int:
        try:
            return self.num_groups(columns)
        except ValueError as reason:
            raise CheckpointError(f"{name}: {reason}") from None


@dataclass(frozen=True)
class Int8(_PackQuantized):
    """8 bits a weight, symmetric, and a scale for each row."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(_PackQuantized):
    """4 bits a weight, symmetric or not, and a scale for each group or row."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4

    group: int | None = 32


def _check(name: str, packed: Tensor, shape: list[int]) -> None:
    if packed.dtype != torch.int32 or list(packed.shape) != shape:
        raise CheckpointError(f"{name} is {packed.dtype} {list(packed.shape)}, not torch.int32 {shape}.")
