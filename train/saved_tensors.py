"""The tensors of a checkpoint, whoever wrote them: whole ones in one file, or rows of them in each of several.

What each file has of a tensor its own header says; put below one another in the order of the files they are the whole.
Moments in 8 bits come in blocks of 256 elements of what one process held. One that holds the same gets the same bits;
another decodes what it needs, and encodes it in blocks of its own.

Legend: N elements that a process holds, B = ⌈N/256⌉ blocks.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.adamw_8bit import BLOCK, Moments, decode, encode
from train.checkpoint import TrainingStateError, part_name

_PART = re.compile(r"-\d{5}-of-(\d{5})\.safetensors")


class Rows(NamedTuple):
    """Some rows of a tensor."""

    start: int
    stop: int
    of: int
    """Rows of the whole."""


def rows_of(parameter: Tensor) -> Rows:
    """What a process holds of a parameter: all rows, unless it says otherwise (`train.sharding.LocalShards`)."""
    return getattr(parameter, "rows", Rows(0, len(parameter), len(parameter)))


class SavedTensors:
    """The tensors of `NAME.safetensors`, or of its parts, on the CPU; open within a `with`."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises TrainingStateError for a file that cannot be read."""
        self.folder, self._stack = folder, ExitStack()
        found = [match for path in folder.glob(f"{name}-*") if (match := _PART.fullmatch(path.name.removeprefix(name)))]
        count = int(found[0][1]) if found else 1
        self._files = [self._open(folder / part_name(name, part, count)) for part in range(count)]
        self._places: dict[str, list[Any]] = {}
        for file in self._files:
            for key in file.keys():  # noqa: SIM118  # it is no mapping
                self._places.setdefault(key, []).append(file)

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
        _, last = list(self.parts(name))[-1]
        return last.stop, *self._places[name][0].get_slice(name).get_shape()[1:]

    def parts(self, name: str) -> Iterator[tuple[Any, Rows]]:
        """The rows that each file has, in order, and what reads them."""
        slices = [file.get_slice(name) for file in self._places[name]]
        lengths = [one.get_shape()[0] for one in slices]
        for number, one in enumerate(slices):
            start = sum(lengths[:number])
            yield one, Rows(start, start + lengths[number], sum(lengths))

    def rows(self, name: str, wanted: Rows) -> Tensor:
        """Those rows of a tensor."""
        parts = list(self.parts(name))
        spans = [(max(wanted.start, there.start), min(wanted.stop, there.stop)) for _, there in parts]
        pieces = [
            part[start - there.start : stop - there.start]
            for (part, there), (start, stop) in zip(parts, spans, strict=True)
            if start < stop
        ]
        return torch.cat(pieces or [parts[0][0][:0]])

    def moments(self, name: str, own: Moments, held: Rows, spans: list[Rows]) -> None:
        """Reads moments in 8 bits into `own`, of the elements `held`; `spans` are those of the files, in order."""
        for codes, absmax, kind in ((own[0], own[1], "exp_avg"), (own[2], own[3], "exp_avg_sq")):
            keys = f"{kind}.{name}", f"{kind}_absmax.{name}"
            blocks = [(file.get_tensor(keys[0]), file.get_tensor(keys[1])) for file in self._places[keys[0]]]
            found = _same_blocks(blocks, held, spans) or _other_blocks(blocks, held, spans, kind == "exp_avg")
            codes.copy_(found[0])
            absmax.copy_(found[1])


Blocks = tuple[Tensor, Tensor]
"""Codes u8 [B, 256], and absmax fp32 [B]."""


def _same_blocks(blocks: list[Blocks], held: Rows, spans: list[Rows]) -> Blocks | None:
    """Those of the elements `held`, to the bit; None where blocks begin elsewhere."""
    if held in spans:
        return blocks[spans.index(held)]
    if any(span.start % BLOCK for span in (held, *spans)):
        return None
    wanted = slice(held.start // BLOCK, -(-held.stop // BLOCK))
    codes, absmax = (torch.cat(parts)[wanted] for parts in zip(*blocks, strict=True))
    return codes, absmax


def _other_blocks(blocks: list[Blocks], held: Rows, spans: list[Rows], signed: bool) -> Blocks:
    pairs = zip(blocks, spans, strict=True)
    values = torch.cat([decode(*pair, signed).flatten()[: span.stop - span.start] for pair, span in pairs])
    values = values[held.start : held.stop]
    return encode(F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK), signed)
