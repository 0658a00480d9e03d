"""Weights in files as AWQ checkpoints of the kind "gemm" hold them (AutoAWQ), for vLLM, transformers and others.

    LAYER.qweight    i32 [K, N/8]: levels packed along N, in the order below
    LAYER.qzeros     i32 [G, N/8]: levels of 0, packed alike; absent if symmetric, where all are 8
    LAYER.scales     f16 [G, N]

From the lowest bits a word holds the outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight. Source: casper-hansen/AutoAWQ.

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
from model.formats.words import check_scales, check_stored, pack_words, stored_scales, unpack_words

_METHOD, _KIND = "awq", "gemm"
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = len(_ORDER)


@dataclass(frozen=True)
class Awq(IntegerFormat):
    """4 bits in groups or rows, with zeros unless symmetric."""

    name: ClassVar[str] = "awq"
    bits: ClassVar[int] = 4
    holds_embeddings: ClassVar[bool] = False
    others_need_zeros: ClassVar[bool] = True

    group: int | None = 128
    symmetric: bool = False

    @classmethod
    def from_config(cls, entry: dict[str, Any]) -> Self | None:
        if entry.get("quant_method") != _METHOD or entry.get("bits") != cls.bits:
            return None
        if str(entry.get("version", _KIND)).lower() != _KIND:
            return None
        group = entry.get("group_size", 128)
        try:
            return cls(None if group == -1 else group, not entry.get("zero_point", True))
        except ValueError:
            return None

    @classmethod
    def describe(cls, entry: dict[str, Any]) -> str | None:
        if entry.get("quant_method") != _METHOD:
            return None
        return f"awq, {entry.get('version', _KIND)}, {entry.get('bits')} bits in groups of {entry.get('group_size')}"

    def config_entry(self, dtype: torch.dtype, dense: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": _METHOD,
            "bits": self.bits,
            "group_size": self.group or -1,
            "zero_point": not self.symmetric,
            "version": _KIND,
            "modules_to_not_convert": sorted(dense) or None,
        }

    def stored_names(self, name: str) -> list[str]:
        layer = name.removesuffix("weight")
        return [layer + part for part in ("qzeros", "scales", "qweight")]

    def to_files(self, name: str, weight: IntegerWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        if weight.shape[0] % _PER_WORD:
            raise CheckpointError(f"{name} has {weight.shape[0]} rows; {self.title} holds them in eights.")
        levels, scales, zeros = self.unpack(self.moved(weight, "cpu"))
        qzeros, stored, qweight = self.stored_names(name)
        tensors = {stored: stored_scales(scales.t(), torch.float16), qweight: self._packed(levels)}
        return tensors if zeros is None else tensors | {qzeros: self._packed(zeros)}

    def from_files(self, name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> IntegerWeight:
        rows, columns = shape
        groups, (qzeros, stored, qweight) = self.groups_of(name, columns), self.stored_names(name)
        scales = read(stored)
        check_scales(stored, scales, [groups, rows])
        zeros = None if self.symmetric else self._unpacked(qzeros, [groups, rows], read)
        return self.pack(self._unpacked(qweight, [columns, rows], read), scales.t().float().contiguous(), zeros)

    def _packed(self, levels: Tensor) -> Tensor:
        """u8 [N, X] -> i32 [X, N/8]."""
        ordered = levels.t().unflatten(1, (-1, _PER_WORD))[..., _ORDER].flatten(1)
        return pack_words(ordered, self.bits)

    def _unpacked(self, name: str, shape: list[int], read: Callable[[str], Tensor]) -> Tensor:
        """u8 [N, X] of the words [X, N/8] under this name."""
        columns, rows = shape
        words = read(name)
        check_stored(name, words, torch.int32, [columns, rows // _PER_WORD])
        ordered = unpack_words(words, self.bits, rows).unflatten(1, (-1, _PER_WORD))
        places = torch.tensor(_ORDER).argsort()
        return ordered[..., places].flatten(1).t().contiguous()
