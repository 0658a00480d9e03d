"""The tensors of a checkpoint, whoever wrote them: whole ones in one file, or parts of them in each of several.

What each file has of a tensor its own header says; put below one another in the order of the files they are the whole,
or a block of it, which its name then ends with: `NAME@rows-00001` lies below NAME@rows-00000, `NAME@columns-00001` to
the right of NAME@columns-00000.

Moments in 8 bits come in blocks of 256 elements of what one process held. One that holds the same gets the same bits;
another decodes what it needs, and encodes it in blocks of its own.

Legend: N elements that a process holds, B = ⌈N/256⌉ blocks.
"""

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.adamw_8bit import BLOCK, Moments, decode, encode
from train.checkpoint import TrainingStateError, part_name

_PART = re.compile(r"-\d{5}-of-(\d{5})\.safetensors")


class Span(NamedTuple):
    """Some rows of a tensor, or columns."""

    start: int
    stop: int
    of: int
    """Those of the whole."""


class Place(NamedTuple):
    """Where a part lies in the whole tensor."""

    rows: Span
    columns: Span | None = None
    """None: all, of a tensor of any number of dimensions."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part, where the whole has that shape."""
        rows, columns = self
        rest = whole[1:] if columns is None else (columns.stop - columns.start,)
        return rows.stop - rows.start, *rest

    def common(self, other: "Place") -> "Place | None":
        """What both have; None where that is nothing."""
        rows, columns = _common(self.rows, other.rows), self.columns or other.columns
        if self.columns is not None and other.columns is not None:
            columns = _common(self.columns, other.columns)
        is_empty = any(span is not None and span.start >= span.stop for span in (rows, columns))
        return None if is_empty else Place(rows, columns)

    def within(self, outer: "Place") -> tuple[slice, ...]:
        """Where it is in a larger part."""
        rows = slice(self.rows.start - outer.rows.start, self.rows.stop - outer.rows.start)
        if self.columns is None:
            return (rows,)
        first = 0 if outer.columns is None else outer.columns.start
        return rows, slice(self.columns.start - first, self.columns.stop - first)

    def of(self, whole: Tensor) -> Tensor:
        """The part, a view."""
        rows = whole[self.rows.start : self.rows.stop]
        return rows if self.columns is None else rows[:, self.columns.start : self.columns.stop]


def _common(one: Span, other: Span) -> Span:
    return Span(max(one.start, other.start), min(one.stop, other.stop), one.of)


def place_of(parameter: Tensor) -> Place:
    """What a process holds of a parameter: all, unless it says otherwise (`train.sharding.LocalShards`)."""
    return getattr(parameter, "place", Place(Span(0, len(parameter), len(parameter))))


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Of the tensor that it is a part of."""
    rows, columns = place_of(parameter)
    return (rows.of, *parameter.shape[1:]) if columns is None else (rows.of, columns.of)


def block_name(name: str, number: int, *, beside: bool) -> str:
    """What a block of a tensor is called, the first being number 0; `beside`: to the right of others, not below."""
    return f"{name}@{'columns' if beside else 'rows'}-{number:05d}"


class SavedTensors:
    """The tensors of `NAME.safetensors`, or of its parts, on the CPU; open within a `with`."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises TrainingStateError for a file that cannot be read."""
        self.folder, self._stack = folder, ExitStack()
        found = [match for path in folder.glob(f"{name}-*") if (match := _PART.fullmatch(path.name.removeprefix(name)))]
        count = int(found[0][1]) if found else 1
        self._files = [self._open(folder / part_name(name, part, count)) for part in range(count)]
        self._places: dict[str, list[tuple[str, Any]]] = {}
        """By name, under what a file has a part of it, and the file; in the order of blocks, then of files."""
        for file in self._files:
            for key in file.keys():  # noqa: SIM118  # it is no mapping
                self._places.setdefault(key.partition("@")[0], []).append((key, file))
        for found_at in self._places.values():
            found_at.sort(key=lambda place: place[0])

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as reason:
            raise TrainingStateError(f"{path} cannot be read: {reason}.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises TrainingStateError unless there are exactly these tensors; a shape of () may be any."""
        if shapes.keys() != self._places.keys():
            odd = sorted(shapes.keys() ^ self._places.keys())[0]
            where = "there" if odd in self._places else "here"
            raise TrainingStateError(f"{self.folder} is of another model: {odd} is only {where}.")
        for name, needed in shapes.items():
            if needed and (found := self.shape(name)) != needed:
                raise TrainingStateError(f"{self.folder} is of another model: {name} is {found} instead of {needed}.")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        part, (rows, columns) = self.parts(name)[0]
        return (rows.of, *part.get_shape()[1:]) if columns is None else (rows.of, columns.of)

    def parts(self, name: str) -> list[tuple[Any, Place]]:
        """What each file has of it, in order, and where that lies."""
        found = [(key, file.get_slice(key)) for key, file in self._places[name]]
        if "@columns-" not in found[0][0]:
            return [(part, Place(rows)) for part, rows in _below_one_another([part for _, part in found])]
        blocks = [[part for _, part in block] for _, block in groupby(found, key=lambda one: one[0])]
        columns = _spans([block[0].get_shape()[1] for block in blocks])
        return [
            (part, Place(rows, columns=span))
            for block, span in zip(blocks, columns, strict=True)
            for part, rows in _below_one_another(block)
        ]

    def read(self, name: str, wanted: Place) -> Tensor:
        """That part of a tensor."""
        parts = self.parts(name)
        found = torch.empty(wanted.shape(self.shape(name)), dtype=parts[0][0][:0].dtype)
        for part, there in parts:
            if (common := wanted.common(there)) is not None:
                found[common.within(wanted)] = part[common.within(there)]
        return found

    def moments(self, name: str, own: Moments, held: Place, shape: tuple[int, ...], places: list[Place]) -> None:
        """Reads moments in 8 bits into `own`, of the part `held` of a tensor [shape]; `places`: of the files' parts."""
        for codes, absmax, kind in ((own[0], own[1], "exp_avg"), (own[2], own[3], "exp_avg_sq")):
            pairs = zip(self._places[f"{kind}.{name}"], self._places[f"{kind}_absmax.{name}"], strict=True)
            blocks = [(file.get_tensor(key), file.get_tensor(absmax_key)) for (key, file), (absmax_key, _) in pairs]
            found = _same_blocks(blocks, held, shape, places)
            found = found or _other_blocks(blocks, held, shape, places, kind == "exp_avg")
            codes.copy_(found[0])
            absmax.copy_(found[1])


def _spans(sizes: list[int]) -> list[Span]:
    """Of parts that follow one another."""
    ends = list(accumulate(sizes, initial=0))
    return [Span(start, stop, ends[-1]) for start, stop in pairwise(ends)]


def _below_one_another(parts: list[Any]) -> list[tuple[Any, Span]]:
    return list(zip(parts, _spans([part.get_shape()[0] for part in parts]), strict=True))


Blocks = tuple[Tensor, Tensor]
"""Codes u8 [B, 256], and absmax fp32 [B]."""


def _same_blocks(blocks: list[Blocks], held: Place, shape: tuple[int, ...], places: list[Place]) -> Blocks | None:
    """Those of the elements `held`, to the bit; None where blocks begin elsewhere."""
    if held in places:
        return blocks[places.index(held)]
    size = math.prod(shape[1:])
    if any(place.columns is not None or place.rows.start * size % BLOCK for place in (held, *places)):
        return None
    wanted = slice(held.rows.start * size // BLOCK, -(-held.rows.stop * size // BLOCK))
    codes, absmax = (torch.cat(parts)[wanted] for parts in zip(*blocks, strict=True))
    return codes, absmax


def _other_blocks(
    blocks: list[Blocks], held: Place, shape: tuple[int, ...], places: list[Place], signed: bool
) -> Blocks:
    whole = torch.empty(shape)
    for pair, place in zip(blocks, places, strict=True):
        part = place.of(whole)
        part.copy_(decode(*pair, signed).flatten()[: part.numel()].view_as(part))
    values = held.of(whole).flatten()
    return encode(F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK), signed)
