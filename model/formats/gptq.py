"""Weights in files as GPTQ checkpoints hold them (AutoGPTQ, GPTQModel), for vLLM, transformers and others.

    LAYER.qweight    i32 [K·bits/32, N]: levels packed along K, the first in the lowest bits
    LAYER.qzeros     i32 [G, N·bits/32]: levels of 0, packed along N; in version 1 less one
    LAYER.scales     f16 [G, N]
    LAYER.g_idx      i32 [K]: the group of each input, here always k // group

Inputs that were sorted by activation (`desc_act`) without staying in their groups are refused: every weight would need
its own scale. Source: ModelCloud/GPTQModel.

Legend: N output features, K input features, G groups of a row.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kernels.linear.quantization import IntegerWeight
from model.files.safe_io import CheckpointError
from model.formats.base import IntegerFormat
from model.formats.words import check_scales, check_stored, pack_words, stored_scales, unpack_words

_METHOD = "gptq"
_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_STEP = 8
"""Rows and columns come in multiples of this."""


@dataclass(frozen=True)
class Gptq(IntegerFormat):
    """4 bits, symmetric or not, or 8 bits, symmetric; in groups or rows."""

    name: ClassVar[str] = "gptq"
    holds_embeddings: ClassVar[bool] = False

    group: int | None = 128
    bits: int = 4
    version: int = 1
    """1 is read by more servers, but cannot hold the level 0 as a zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8):
            raise ValueError(f"{self.title} holds 4 or 8 bits a weight here, not {self.bits}")

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        version = _VERSIONS.get(entry.get("checkpoint_format") or "gptq")
        overrides = [pattern for pattern in entry.get("dynamic") or () if not pattern.startswith("-:")]
        if entry.get("quant_method") != _METHOD or version is None or overrides or entry.get("bits") not in (4, 8):
            return None
        group, symmetric = entry.get("group_size", -1), bool(entry.get("sym", True))
        try:
            return cls(None if group == -1 else group, symmetric, entry["bits"], version)
        except ValueError:
            return None

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        if entry.get("quant_method") != _METHOD:
            return None
        layers = ", layers that differ" if entry.get("dynamic") else ""
        kind = entry.get("checkpoint_format") or "gptq"
        return f"{kind}, {entry.get('bits')} bits in groups of {entry.get('group_size')}{layers}"

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        entry = {
            "quant_method": _METHOD,
            "bits": self.bits,
            "group_size": self.group or -1,
            "desc_act": False,
            "sym": self.symmetric,
            "lm_head": "lm_head" not in dense,
            "checkpoint_format": next(name for name, version in _VERSIONS.items() if version == self.version),
        }
        left = sorted(set(dense) - {"lm_head"})
        return entry | ({"dynamic": {f"-:^{re.escape(name)}$": {} for name in left}} if left else {})

    def stored_names(self, name: str) -> list[str]:
        layer = name.removesuffix("weight")
        return [layer + part for part in ("qzeros", "scales", "g_idx", "qweight")]

    def to_files(self, name: str, weight: IntegerWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        rows, columns = weight.shape
        if rows % _STEP or columns % _STEP:
            raise CheckpointError(f"{name} is {[rows, columns]}; {self.title} holds rows and columns in eights.")
        levels, scales, zeros = self.unpack(self.moved(weight, "cpu"))
        zeros = torch.full_like(scales, 1 << self.bits - 1, dtype=torch.uint8) if zeros is None else zeros
        if self.version == 1:
            if not zeros.all():
                raise CheckpointError(f"{name} has a zero point of 0, which only version 2 of {self.title} can hold.")
            zeros = zeros - 1
        qzeros, stored, index, qweight = self.stored_names(name)
        return {
            qzeros: pack_words(zeros.t(), self.bits),
            stored: stored_scales(scales.t(), torch.float16),
            index: self._index(columns),
            qweight: pack_words(levels, self.bits).t().contiguous(),
        }

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> IntegerWeight:
        rows, columns = shape
        groups, per_word = self.groups_of(name, columns), 32 // self.bits
        names = self.stored_names(name)
        qzeros, scales, index, qweight = (read(part) for part in names)
        check_stored(names[3], qweight, torch.int32, [columns // per_word, rows])
        check_stored(names[0], qzeros, torch.int32, [groups, rows // per_word])
        check_scales(names[1], scales, [groups, rows])
        if not torch.equal(index.long(), self._index(columns).long()):
            raise CheckpointError(f"{names[2]} spreads groups over the row (desc_act); only neighbours can be read.")
        zeros = unpack_words(qzeros, self.bits, rows).t().contiguous()
        zeros = zeros + 1 & (1 << self.bits) - 1 if self.version == 1 else zeros
        if self.symmetric and bool((zeros != 1 << self.bits - 1).any()):
            raise CheckpointError(
                f"{names[0]} holds other zeros than {1 << self.bits - 1}, though config.json says sym."
            )
        levels = unpack_words(qweight.t(), self.bits, columns)
        return self.pack(levels, scales.t().float().contiguous(), None if self.symmetric else zeros)

    def _index(self, columns: int) -> Tensor:
        return torch.arange(columns, dtype=torch.int32) // (self.group or columns)
