"""What the losses on an output projection share on a GPU: logits in tiles, and sums of gradients.

A program takes a tile of rows and walks over a range of the vocabulary, a tile of logits z = h Wᵀ at a time. It keeps a
few numbers a row: maximum, sum of exponentials, whatever the loss needs. Ranges are combined afterwards. A second walk,
now that the normalizers are known, stores dz; then cuBLAS adds dz W to dh and dzᵀ h to dW, which is summed in fp32.
There are two sources of logits:

- Evaluation multiplies each tile within the program, in registers: no logit is ever in memory.
- Training, where two walks would multiply everything twice, lets cuBLAS write the logits of a chunk of rows into a
  buffer of bounded size, and dz replaces the student's there. With `_KEPT_LOGITS` = 0 it does multiply twice: then
  dz of one window of the vocabulary is the only buffer.

Kept logits have the dtype of the products, as those of most training in bf16: a logit z is off by up to |z| / 256 and
its probability by that share. In fp32 two walks and dz would move 30 bytes for each pair of them instead of 18.

Nothing waits for the device: rows without a label are masked, not gathered.

Legend: T tokens, R rows of a chunk, D hidden size, V vocabulary; a tile is ROWS x COLUMNS logits, multiplied DEPTH of D
at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.ragged_tiles import dot
from kernels.common.soft_cap import soft_capped_tile
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, in_fp32, is_interpreted, num_processors
from kernels.losses._projection import IGNORE_LABEL, slices

# Logits of a model that training keeps at once; a chunk of rows has to be large enough for a pass over dW.
_KEPT_LOGITS = 2**27
# The same for the gradient of a window of the vocabulary, where no logits are kept.
_LOGITS_PER_WINDOW = 2**26
# Elements of a part of dW before it is added to the sum: small enough for the L2 cache.
_WEIGHTS_PER_PART = 2**22
# More programs than fit at once, so that the last ones to end are a small part.
_WAVES = 16
# Tiles of rows that run side by side: their hidden states, and the weights under them, stay in the L2 cache.
_GROUP = 16


@triton.jit
def program_tiles(num_rows, num_ranges, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Which tile of rows and which range of the vocabulary is this program's."""
    program, tiles = tl.program_id(0), tl.cdiv(num_rows, ROWS)
    first = program // (GROUP * num_ranges) * GROUP
    width = tl.minimum(tiles - first, GROUP)
    index = program % (GROUP * num_ranges)
    return first + index % width, index // width


@triton.jit
def logits_tile(
    p_hidden, p_weight, rows, columns, num_rows, vocabulary, hidden_row, weight_row, least,
    D: tl.constexpr, DEPTH: tl.constexpr, INTERPRETED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Logits [rows, columns] in fp32, under their cap: at least `least`, which is finite, and -1e30 past the
    vocabulary.

    They are products of p_hidden [T, D] and p_weight [V, D], or lie at p_hidden [T, V] if p_weight is None. Hidden
    states and weights that do not exist are the last ones that do, so that their loads need no mask.
    """
    ROWS: tl.constexpr = rows.shape[0]
    COLUMNS: tl.constexpr = columns.shape[0]
    o_hidden = tl.minimum(rows, num_rows - 1).to(tl.int64) * hidden_row
    if p_weight is None:
        # Rows of the buffer are padded to 64 columns, so that every load is wide.
        m_columns = (columns < tl.cdiv(vocabulary, 64) * 64)[None, :]
        b_logits = tl.load(p_hidden + o_hidden[:, None] + columns[None, :], mask=m_columns, other=0.0).to(tl.float32)
    else:
        depth = tl.arange(0, DEPTH)
        p_hidden += o_hidden[:, None] + depth[None, :]
        p_weight += (tl.minimum(columns, vocabulary - 1).to(tl.int64) * weight_row)[None, :] + depth[:, None]
        b_logits = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, D, DEPTH):
            if D % DEPTH == 0:
                b_hidden, b_weight = tl.load(p_hidden + start), tl.load(p_weight + start)
            else:
                b_hidden = tl.load(p_hidden + start, mask=(start + depth < D)[None, :], other=0.0)
                b_weight = tl.load(p_weight + start, mask=(start + depth < D)[:, None], other=0.0)
            if b_hidden.dtype == tl.float32:
                # Each of D additions is rounded to fp32, which leaves a logit off by 2.5e-8 √(D/2) of its size. Sums of
                # DEPTH products, added up, are off by a quarter of that for D of 640 to 1000. As a plain addition it
                # would not stay: Triton makes one long sum of it.
                b_part = dot(b_hidden, b_weight, tl.zeros([ROWS, COLUMNS], dtype=tl.float32), INTERPRETED)
                b_logits = tl.fma(b_part, 1.0, b_logits)
            else:
                b_logits = dot(b_hidden, b_weight, b_logits, INTERPRETED)
    if CAP is not None:
        b_logits = soft_capped_tile(b_logits, CAP)
    least = in_fp32(least)
    # Not a maximum, which would hide NaN.
    b_logits = tl.where(b_logits < least, least, b_logits)
    return tl.where((columns < vocabulary)[None, :], b_logits, -1e30)


@triton.jit
def rescaled_sum(b_logits, b_max, b_new_max, b_sum, scale):
    """Sum of exp(scale · (logit − maximum)) after another tile of logits, which may have moved the maximum."""
    b_more = tl.sum(tl.exp((b_logits - b_new_max[:, None]) * scale), axis=1)
    return b_sum * tl.exp((b_max - b_new_max) * scale) + b_more


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, *, kept: bool) -> Tile:
    """Return the tile of logits: kept ones are read once, others are shaped for tensor cores.

    Two 128 x 128 tiles of fp32 fill half of the registers of 8 warps; operands take 96 KiB of shared memory.
    """
    if kept:
        return Tile(8, 512, 16, warps=8, stages=2)
    return Tile(128, 128, 64, warps=8, stages=3) if dtype.itemsize == 2 else Tile(64, 64, 32, warps=4, stages=2)


class Head(NamedTuple):
    """Hidden states and a projection, as products take them."""

    hidden: Tensor
    """[T, D], zero in rows without a label."""
    weight: Tensor
    """[V, D]"""
    soft_cap: float | None
    """Of the logits."""


class Source(NamedTuple):
    """Where kernels find a model's logits of a chunk of rows."""

    rows: Tensor
    """Hidden states [R, D]; the logits [R, V] themselves if `weight` is None."""
    weight: Tensor | None
    vocabulary: int
    soft_cap: float | None

    @property
    def tile(self) -> Tile:
        return tile_of(self.rows.dtype, kept=self.weight is None)

    @property
    def strides(self) -> tuple[int, int]:
        return self.rows.stride(0), 0 if self.weight is None else self.weight.stride(0)

    @property
    def hidden_size(self) -> int:
        return 0 if self.weight is None else self.weight.shape[1]

    @property
    def least_logit(self) -> float:
        """What stands for −inf: a probability of 0 whose differences are no NaN and fit the dtype."""
        return max(-1e30, torch.finfo(self.rows.dtype).min)

    @property
    def options(self) -> dict[str, Any]:
        """Constants of every kernel that walks."""
        tile = self.tile
        return {
            "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": _GROUP,
            "INTERPRETED": is_interpreted(self.rows), "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip


def make_head(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocabulary: int, dtype: torch.dtype, soft_cap: float | None
) -> Head:
    """Raises ValueError for what the kernels cannot take."""
    check_rows(hidden=hidden, weight=weight)
    if hidden.shape[1] != weight.shape[1] or hidden.shape[:1] != labels.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden, weight, labels))
        raise ValueError(f"hidden [T, D], weight [V, D] and labels [T] do not fit each other: {shapes}")
    rows = hidden.detach().to(dtype).masked_fill(labels[:, None] == IGNORE_LABEL, 0)
    return Head(rows, weight.detach()[:vocabulary].to(dtype), soft_cap)


def sources(heads: Sequence[Head], *, trains: bool) -> Iterator[tuple[slice, list[Source]]]:
    """Yield chunks of rows, and where the logits of each head are; the next chunk overwrites those kept."""
    num_rows, vocabulary = len(heads[0].hidden), len(heads[0].weight)
    if not (trains and _KEPT_LOGITS):
        if num_rows:
            yield slice(0, num_rows), [Source(head.hidden, head.weight, vocabulary, head.soft_cap) for head in heads]
        return
    chunk_rows = max(1, min(num_rows, _KEPT_LOGITS // vocabulary))
    buffers = [_aligned_rows(head.hidden, chunk_rows, vocabulary) for head in heads]
    for chunk in slices(num_rows, chunk_rows):
        logits = (
            torch.mm(head.hidden[chunk], head.weight.t(), out=buffer[: chunk.stop - chunk.start])
            for head, buffer in zip(heads, buffers, strict=True)
        )
        yield chunk, [Source(z, None, vocabulary, head.soft_cap) for z, head in zip(logits, heads, strict=True)]


def _aligned_rows(like: Tensor, num_rows: int, columns: int) -> Tensor:
    """Return an uninitialised tensor [num_rows, columns] whose rows begin at full cache lines."""
    return like.new_empty(num_rows, triton.cdiv(columns, 64) * 64)[:, :columns]


def gradient_windows(source: Source) -> Iterator[tuple[slice, Tensor]]:
    """Yield windows of the vocabulary, and where to store dz, [R, window]: over kept logits."""
    if source.weight is None:
        yield slice(0, source.vocabulary), source.rows
        return
    num_rows, columns = len(source.rows), source.tile.columns
    width = max(1, _LOGITS_PER_WINDOW // (num_rows * columns)) * columns
    buffer = _aligned_rows(source.rows, num_rows, min(width, source.vocabulary))
    for window in slices(source.vocabulary, width):
        yield window, buffer[:, : window.stop - window.start]


class Plan(NamedTuple):
    """How a walk over a window of the vocabulary is cut into programs."""

    first_tile: int
    num_tiles: int
    tiles_per_range: int
    num_ranges: int
    num_programs: int


def plan_walk(source: Source, window: slice | None = None) -> Plan:
    """Cut a window of the vocabulary, by default all of it, into ranges that keep the whole device busy."""
    tile, window = source.tile, window or slice(0, source.vocabulary)
    num_tiles = triton.cdiv(window.stop - window.start, tile.columns)
    row_tiles = triton.cdiv(len(source.rows), tile.rows)
    ranges = min(num_tiles, triton.cdiv(_WAVES * num_processors(source.rows.device), row_tiles))
    tiles_per_range = triton.cdiv(num_tiles, ranges)
    num_ranges = triton.cdiv(num_tiles, tiles_per_range)
    return Plan(window.start // tile.columns, num_tiles, tiles_per_range, num_ranges, row_tiles * num_ranges)


def wants_gradients(hidden: Tensor, weight: Tensor) -> bool:
    return torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)


class GradientSums:
    """Sums up the gradients of hidden [T, D] and weight [V, D] in fp32, as far as they need one."""

    def __init__(self, head: Head, hidden: Tensor, weight: Tensor) -> None:
        self._head = head
        self.hidden = head.hidden.new_zeros(hidden.shape, dtype=torch.float32) if hidden.requires_grad else None
        self.projection = head.hidden.new_zeros(weight.shape, dtype=torch.float32) if weight.requires_grad else None

    def add(self, chunk: slice, window: slice, grad_logits: Tensor) -> None:
        """Add what dz [R, window] of a chunk of rows and a window of the vocabulary contributes."""
        rows, weight = self._head.hidden[chunk], self._head.weight[window]
        if self.hidden is not None:
            self.hidden[chunk] += _wide_product(grad_logits, weight)
        if self.projection is None:
            return
        # Whole cache lines of dz, or cuBLAS would read it slowly.
        for part in slices(len(weight), max(1, _WEIGHTS_PER_PART // (64 * weight.shape[1])) * 64):
            self.projection[window][part] += _wide_product(grad_logits[:, part].t(), rows)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in fp32, never rounded to 16 bits; only CUDA has a product that does."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32)
