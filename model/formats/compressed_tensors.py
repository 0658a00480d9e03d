"""INT4, INT6, INT8 and FP8 weights in files, as compressed-tensors holds them for transformers and vLLM.

    pack-quantized                         INT4, INT6, and INT8 whose activations are not rounded
    NAME_packed        i32 [N, ⌈K·bits/32⌉]: levels, the first in the lowest bits; the level of 0 is 2^(bits−1)
    NAME_scale         [N, G], in the model's dtype
    NAME_zero_point    i32 [⌈N·bits/32⌉, G]: levels of 0, packed along N; not where symmetric
    NAME_shape         i64 [2]: N and K

    int-quantized, float-quantized         INT8 with rounded activations; FP8
    NAME               i8 or f8_e4m3fn [N, K]
    NAME_scale         [N, 1], or [1] for all rows

NAME is that of the dense weight. Layers of one folder may be in different formats: groups of config.json name them, by
exact names before patterns (`re:`) before classes (`Linear`). What `kv_cache_scheme` says is of caches, not of weights.
Source: vllm-project/compressed-tensors.

Legend: T tokens, N output features, K input features, G groups of a row.
"""

import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from kernels.linear.quantization import SIXES, Fp8Weight, Int8Weight, IntegerWeight, quantize_fp8
from kernels.linear.rounded import Rounding
from model.files.safe_io import CheckpointError
from model.formats.base import (
    FormatOfLayer,
    IntegerFormat,
    KernelFormat,
    WeightFormat,
)
from model.formats.words import check_scales, check_stored, num_words, pack_words, stored_scales, unpack_words

_METHOD, _MIXED = "compressed-tensors", "mixed-precision"
_PACKED, _SCALE, _ZERO, _SHAPE = "_packed", "_scale", "_zero_point", "_shape"
_EMBEDDING = "model.embed_tokens"
_DEFAULTS = {"type": "int", "symmetric": True, "dynamic": False}
_WITHOUT_INDEX = (None, False, "static", "weight")
"""Orders of GPTQ's steps that leave groups in their places."""
W = TypeVar("W", bound=Any)


class _CompressedTensors(KernelFormat[W]):
    """What config.json says of every format here."""

    @classmethod
    def with_options(cls, *, double: bool = True, activations: bool = False, **options: Any) -> Self:
        format = super().with_options(**options)
        return replace(format, rounding=format.usual_rounding) if activations else format  # type: ignore[type-var]

    @property
    @abstractmethod
    def layout(self) -> str:
        """Of the tensors in files."""

    @property
    @abstractmethod
    def scheme(self) -> dict[str, Any]:
        """Of the weights, in config.json."""

    @classmethod
    @abstractmethod
    def of_scheme(cls, weights: dict[str, Any], rounding: Rounding | None) -> Self | None:
        """The format whose `scheme` this may be."""

    # config.json

    @classmethod
    def of_layers(cls, entry: dict[str, Any]) -> FormatOfLayer | None:
        if entry.get("quant_method") != _METHOD:
            return None
        found: dict[str, WeightFormat[Any]] = {}
        for group in (entry.get("config_groups") or {}).values():
            format = _format_of(group, entry.get("format"))
            if format is None:
                return None
            found |= dict.fromkeys(map(_target, group.get("targets") or ()), format)
        return (lambda name: _targeted(name, found)) if found else None

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        layers = cls.of_layers(entry)
        found = None if layers is None else layers("Linear")
        return found if isinstance(found, cls) else None

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        if entry.get("quant_method") != _METHOD:
            return None
        groups = (entry.get("config_groups") or {}).values()
        schemes = {f"{w.get('num_bits')} bits a {w.get('strategy')}" for w in (g.get("weights") or {} for g in groups)}
        rounded = [a for a in (g.get("input_activations") for g in groups) if a]
        schemes |= {f"activations in {a.get('num_bits')} bits a {a.get('strategy')}" for a in rounded}
        return ", ".join([_METHOD, str(entry.get("format")), *sorted(schemes)])

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        return self.entry_of_layers({"Linear": self}, dtype, dense)

    @classmethod
    def entry_of_layers(
        cls, formats: Mapping[str, WeightFormat[Any]], dtype: torch.dtype, dense: Collection[str]
    ) -> dict[str, Any]:
        groups: dict[_CompressedTensors[Any], list[str]] = {}
        for name, format in formats.items():
            if not isinstance(format, _CompressedTensors):
                raise CheckpointError(f"A folder cannot hold weights in {format.title} and in formats of {_METHOD}.")
            groups.setdefault(format, []).append(name)
        layouts = {format.layout for format in groups}
        usual = Counter(format for name, format in formats.items() if name != _EMBEDDING).most_common(1)
        entries = [
            format.group_entry(names, usual=bool(usual) and format == usual[0][0], mixed=len(layouts) > 1)
            for format, names in groups.items()
        ]
        return {
            "quant_method": _METHOD,
            "format": layouts.pop() if len(layouts) == 1 else _MIXED,
            "quantization_status": "compressed",
            "config_groups": {f"group_{number}": entry for number, entry in enumerate(entries)},
            "ignore": sorted(dense),
            "kv_cache_scheme": None,
        }

    def group_entry(self, names: Sequence[str], *, usual: bool, mixed: bool) -> dict[str, Any]:
        """Of the layers in this format; `usual`: of every linear layer that no other group names."""
        targets = ["Linear", *({_EMBEDDING} & {*names})] if usual else list(names)
        activations = None
        if self.rounding is not None:
            kind, group = "float" if self.rounding.dtype.is_floating_point else "int", self.rounding.group
            strategy = {"strategy": "token"} if group is None else {"strategy": "group", "group_size": group}
            activations = {"num_bits": 8, "type": kind, "symmetric": True, **strategy, "dynamic": True}
        entry = {"targets": targets, "weights": self.scheme, "input_activations": activations}
        # transformers takes anything that rounds activations for int-quantized or float-quantized unless it is told.
        says_layout = mixed or self.rounding is not None
        return entry | {"output_activations": None} | ({"format": self.layout} if says_layout else {})


class _Integers(_CompressedTensors[IntegerWeight], IntegerFormat):
    """INT4, INT6 and INT8, packed."""

    @property
    def readers(self) -> tuple[str, ...]:
        return super().readers if self.symmetric else ("vLLM",)  # transformers does not load packed zeros

    @property
    def layout(self) -> str:
        return "pack-quantized"

    @property
    def scheme(self) -> dict[str, Any]:
        strategy = {"strategy": "channel"} if self.group is None else {"strategy": "group", "group_size": self.group}
        return {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, **strategy, "dynamic": False}

    def stored_names(self, name: str) -> list[str]:
        return [name + _SCALE, name + _ZERO, name + _SHAPE, name + _PACKED]

    def to_files(self, name: str, weight: IntegerWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        levels, scales, zeros = self.unpack(self.moved(weight, "cpu"))
        tensors = {
            name + _PACKED: pack_words(levels, self.bits),
            name + _SCALE: stored_scales(scales, dtype),
            name + _SHAPE: torch.tensor(weight.shape, dtype=torch.int64),
        }
        if zeros is not None:
            tensors[name + _ZERO] = pack_words(zeros.t(), self.bits).t().contiguous()
        return tensors

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> IntegerWeight:
        rows, columns = shape
        groups = self.groups_of(name, columns)
        packed, scales, stored = (read(name + suffix) for suffix in (_PACKED, _SCALE, _SHAPE))
        if stored.tolist() != [rows, columns]:
            raise CheckpointError(f"{name}{_SHAPE} says {stored.tolist()}; config.json calls for {[rows, columns]}.")
        check_stored(name + _PACKED, packed, torch.int32, [rows, num_words(columns, self.bits)])
        check_scales(name + _SCALE, scales, [rows, groups])
        zeros = None
        if not self.symmetric:
            words = read(name + _ZERO)
            check_stored(name + _ZERO, words, torch.int32, [num_words(rows, self.bits), groups])
            zeros = unpack_words(words.t(), self.bits, rows).t().contiguous()
        return self.pack(unpack_words(packed, self.bits, columns), scales.float(), zeros)


@dataclass(frozen=True)
class Int4(_Integers):
    """4 bits a weight, symmetric or not, and a scale for each group or row."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4

    group: int | None = 32

    @classmethod
    def of_scheme(cls, weights: dict[str, Any], rounding: Rounding | None) -> Self | None:
        size = weights.get("group_size") if weights.get("strategy") == "group" else None
        return cls(size, weights["symmetric"], rounding=rounding)


@dataclass(frozen=True)
class Int6(Int4):
    """6 bits a weight, as INT4 has 4."""

    name: ClassVar[str] = "int6"
    bits: ClassVar[int] = 6

    group: int | None = 64

    def num_bytes(self, shape: Sequence[int]) -> int:
        rows, columns = shape
        return rows * math.ceil(columns / SIXES) * SIXES * self.bits // 8 + self._scale_bytes(shape)


@dataclass(frozen=True)
class Int8(_Integers):
    """8 bits a weight, symmetric, and a scale for each group or row."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    @property
    def usual_rounding(self) -> Rounding:
        return Rounding(torch.int8) if self.group is None else super().usual_rounding

    @property
    def is_w8a8(self) -> bool:
        """As files of W8A8 are elsewhere."""
        return self.group is None and self.rounding is not None

    @property
    def layout(self) -> str:
        return "int-quantized" if self.is_w8a8 else super().layout

    @classmethod
    def of_scheme(cls, weights: dict[str, Any], rounding: Rounding | None) -> Self | None:
        size = weights.get("group_size") if weights.get("strategy") == "group" else None
        return cls(size, rounding=rounding)

    def stored_names(self, name: str) -> list[str]:
        return [name, name + _SCALE] if self.is_w8a8 else super().stored_names(name)

    def to_files(self, name: str, weight: IntegerWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        if not self.is_w8a8:
            return super().to_files(name, weight, dtype)
        return {
            name: weight.codes.cpu().contiguous(),
            name + _SCALE: stored_scales(weight.scales.cpu(), dtype),
        }

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> IntegerWeight:
        if not self.is_w8a8:
            return super().from_files(name, shape, read)
        return Int8Weight(*_codes_and_scales(name, shape, read, torch.int8), shape[1])


@dataclass(frozen=True)
class Fp8(_CompressedTensors[Fp8Weight]):
    """e4m3 weights and a scale for each row."""

    name: ClassVar[str] = "fp8"
    rounding: Rounding | None = None

    @property
    def usual_rounding(self) -> Rounding:
        return Rounding(torch.float8_e4m3fn)

    @property
    def layout(self) -> str:
        return "float-quantized"

    @property
    def scheme(self) -> dict[str, Any]:
        return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}

    @classmethod
    def of_scheme(cls, weights: dict[str, Any], rounding: Rounding | None) -> Self | None:
        return cls(rounding)

    def quantize(self, dense: Tensor) -> Fp8Weight:
        return quantize_fp8(dense)

    def num_bytes(self, shape: Sequence[int]) -> int:
        return shape[0] * (shape[1] + 4)

    def check_narrow(self, columns: slice, num_columns: int) -> None:
        self.check_rounded_whole(columns, num_columns)

    def narrow(self, weight: Fp8Weight, rows: slice, columns: slice) -> Fp8Weight:
        return Fp8Weight(weight.codes[rows, columns].contiguous(), weight.scales[rows].clone())

    def stack(self, weights: Sequence[Fp8Weight]) -> Fp8Weight:
        codes = torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
        return Fp8Weight(codes, torch.cat([weight.scales for weight in weights]))

    def stored_names(self, name: str) -> list[str]:
        return [name, name + _SCALE]

    def to_files(self, name: str, weight: Fp8Weight, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: weight.codes.cpu().contiguous(),
            name + _SCALE: stored_scales(weight.scales.cpu()[:, None], dtype),
        }

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> Fp8Weight:
        codes, scales = _codes_and_scales(name, shape, read, torch.float8_e4m3fn)
        return Fp8Weight(codes, scales[:, 0])


def _format_of(group: dict[str, Any], layout: str | None) -> "_CompressedTensors[Any] | None":
    """The format of a group of config.json; None if it is none of these."""
    weights = _DEFAULTS | {key: value for key, value in (group.get("weights") or {}).items() if value is not None}
    rounded = group.get("input_activations") or {}
    if weights.get("actorder") not in _WITHOUT_INDEX or group.get("output_activations"):
        return None
    if weights.get("strategy") == "tensor" and (group.get("format") or layout) != "pack-quantized":
        weights["strategy"] = "channel"  # one scale for all rows is a scale for each
    for kind in (Int4, Int6, Int8, Fp8):
        try:
            format: Any = kind.of_scheme(weights, _rounding_of(rounded))
        except ValueError:
            continue
        if format is None or format.layout != (group.get("format") or layout):
            continue
        wanted = format.group_entry((), usual=False, mixed=False)["input_activations"]
        same = all(rounded.get(key) == value for key, value in (wanted or {}).items())
        if same and format.scheme == {key: weights.get(key) for key in format.scheme}:
            return format
    return None


def _rounding_of(activations: dict[str, Any]) -> Rounding | None:
    """By `input_activations` of a group of config.json; that it says no more is checked by writing it again."""
    if not activations:
        return None
    group = activations.get("group_size") if activations.get("strategy") == "group" else None
    return Rounding(torch.float8_e4m3fn if activations.get("type") == "float" else torch.int8, group)


def _target(target: str) -> str:
    """The same; raises TypeError or re.error for what names no layers."""
    re.compile(target)
    return target


def _targeted(name: str, formats: Mapping[str, WeightFormat[Any]]) -> WeightFormat[Any] | None:
    """By the most special of the targets that mean the layer."""
    if name in formats:
        return formats[name]
    for target, format in formats.items():
        if target.startswith("re:") and re.match(target.removeprefix("re:"), name):
            return format
    return formats.get("Embedding" if name == _EMBEDDING else "Linear")


def _codes_and_scales(
    name: str, shape: torch.Size, read: Callable[[str], Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    codes, scales = read(name), read(name + _SCALE)
    check_stored(name, codes, dtype, list(shape))
    scales = scales.expand(shape[0], 1) if scales.numel() == 1 else scales
    check_scales(name + _SCALE, scales, [shape[0], 1])
    return codes, scales.float().contiguous()
