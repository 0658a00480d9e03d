"""Work of Triton kernels over ragged batches: tiles of one document's rows, longest work first, grids free of lengths.

A work item is one tile of rows and one head. How many tiles there are depends on lengths, which stay on the device: a
small kernel lists the tiles there, and grids are as large as shapes allow; surplus programs find nothing to do. So no
launch waits for the device, and a CUDA graph serves all lengths of its shapes.

Legend: B documents; document B stands for the rows past the last document; d head dim, WIDTH its next power of two.
"""

import torch
from torch import Tensor

from kernels.common.triton import tl, triton

# What a kernel must know of a tile: where its document starts and how many rows that has, the same on the other side
# of the attention, and the tile's first row in the document.
_NUMBERS_PER_TILE = tl.constexpr(5)


@triton.jit
def dot(b_x, b_y, b_sum, INTERPRETED: tl.constexpr):
    """b_sum + b_x b_y in fp32; the interpreter cannot multiply bf16."""
    if INTERPRETED:
        b_x = b_x.to(tl.float32)
        b_y = b_y.to(tl.float32)
    return tl.dot(b_x, b_y, b_sum, input_precision="ieee")


@triton.jit
def as_operand(b_x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 values as an operand of `dot`; the interpreter, which would cut off bits instead of rounding, keeps fp32."""
    if not INTERPRETED:
        b_x = b_x.to(DTYPE)
    return b_x


@triton.jit
def head_rows(p, start, head, stride_row, stride_head):
    """Where one head of a document's first row lies."""
    return p + tl.cast(start, tl.int64) * stride_row + tl.cast(head, tl.int64) * stride_head


@triton.jit
def tile_pointers(p_rows, first, stride_row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Where the rows first … first + ROWS − 1 of a document lie, [ROWS, WIDTH]."""
    o_row = tl.arange(0, ROWS).to(tl.int64) * stride_row
    return p_rows + tl.cast(first, tl.int64) * stride_row + o_row[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def tile_mask(first, num_rows, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of a tile lie in the document and in the head."""
    return (first + tl.arange(0, ROWS) < num_rows)[:, None] & (tl.arange(0, WIDTH) < D)[None, :]


@triton.jit
def tile_source(
    p_rows, num_rows, stride_row, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTOR: tl.constexpr
):
    """What `load_tile` loads from: a tensor descriptor of one document's rows and one head alone, or their pointer."""
    if DESCRIPTOR:
        source = tl.make_tensor_descriptor(p_rows, [tl.maximum(num_rows, 1), D], [stride_row, 1], [ROWS, WIDTH])
    else:
        source = p_rows
    return source


@triton.jit
def load_tile(
    source,
    first,
    num_rows,
    stride_row,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Load rows of a document, [ROWS, WIDTH], with zeros past column D; MASKED: the tile may end after the last row."""
    if DESCRIPTOR:
        b_tile = source.load([first, 0])
    else:
        pointers = tile_pointers(source, first, stride_row, ROWS, WIDTH)
        if MASKED:
            b_tile = tl.load(pointers, mask=tile_mask(first, num_rows, D, ROWS, WIDTH), other=0.0)
        elif D < WIDTH:
            b_tile = tl.load(pointers, mask=(tl.arange(0, WIDTH) < D)[None, :], other=0.0)
        else:
            b_tile = tl.load(pointers)
    return b_tile


@triton.jit
def store_tile(p_rows, b_tile, first, num_rows, stride_row, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write a tile into a document's rows, no further than its last row and column D."""
    pointers = tile_pointers(p_rows, first, stride_row, ROWS, WIDTH)
    tl.store(pointers, b_tile.to(p_rows.dtype.element_ty), mask=tile_mask(first, num_rows, D, ROWS, WIDTH))


@triton.jit
def load_numbers(p_rows, o_row, num_rows, other, MASKED: tl.constexpr):
    """Load one number a row; `other` past the last row, which only MASKED tiles reach."""
    p_numbers = p_rows + o_row
    return tl.load(p_numbers, mask=o_row < num_rows, other=other) if MASKED else tl.load(p_numbers)


@triton.jit
def _document_rows(p_cu, document, num_documents, end):
    """Where a document's rows start and how many they are; document B has those from the last document to `end`."""
    start = tl.load(p_cu + tl.minimum(document, num_documents))
    stop = tl.load(p_cu + tl.minimum(document + 1, num_documents))
    return start, tl.where(document < num_documents, stop, end) - start


@triton.jit(do_not_specialize=("num_documents", "num_rows"))
def _plan_kernel(
    p_cu, p_cu_other, p_tiles, p_count, num_documents, num_rows,
    ROWS: tl.constexpr, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the tiles of one document, behind those of all documents with more rows on the other side."""
    document = tl.program_id(0)
    end_other = tl.load(p_cu_other + num_documents)
    start, length = _document_rows(p_cu, document, num_documents, num_rows)
    start_other, length_other = _document_rows(p_cu_other, document, num_documents, end_other)
    b_all = tl.zeros([BLOCK], tl.int32)
    b_before = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, num_documents + 1, BLOCK):
        o_document = first + tl.arange(0, BLOCK)
        _, b_rows = _document_rows(p_cu, o_document, num_documents, num_rows)
        _, b_work = _document_rows(p_cu_other, o_document, num_documents, end_other)
        b_tiles = tl.where(o_document <= num_documents, tl.cdiv(b_rows, ROWS), 0)
        m_before = (b_work > length_other) | ((b_work == length_other) & (o_document < document))
        b_all += b_tiles
        b_before += tl.where(m_before, b_tiles, 0)
    tl.store(p_count, tl.sum(b_all, 0), mask=document == 0)
    before = tl.sum(b_before, 0)
    num_tiles = tl.cdiv(length, ROWS)
    for first in tl.range(0, num_tiles, BLOCK):
        o_tile = first + tl.arange(0, BLOCK)
        m_tile = o_tile < num_tiles
        p_numbers = p_tiles + (before + o_tile) * _NUMBERS_PER_TILE
        tl.store(p_numbers, start, mask=m_tile)
        tl.store(p_numbers + 1, length, mask=m_tile)
        tl.store(p_numbers + 2, start_other, mask=m_tile)
        tl.store(p_numbers + 3, length_other, mask=m_tile)
        tl.store(p_numbers + 4, (num_tiles - 1 - o_tile if LAST_FIRST else o_tile) * ROWS, mask=m_tile)


@triton.jit
def work_item(item, p_tiles, num_tiles, section, num_heads):
    """Return the head of a work item and the five numbers of its tile.

    All tiles for the first `section` heads come first, then all tiles for the next; the heads of a tile are neighbours.
    """
    first_head = item // (num_tiles * section) * section
    heads_here = tl.minimum(section, num_heads - first_head)
    item_of_section = item - first_head * num_tiles
    p_numbers = p_tiles + item_of_section // heads_here * _NUMBERS_PER_TILE
    start, length = tl.load(p_numbers), tl.load(p_numbers + 1)
    start_other, length_other = tl.load(p_numbers + 2), tl.load(p_numbers + 3)
    first_row = tl.load(p_numbers + 4)
    return first_head + item_of_section % heads_here, start, length, start_other, length_other, first_row


def plan_tiles(
    cu_seqlens: Tensor, cu_seqlens_other: Tensor, *, num_rows: int, rows_per_tile: int, last_first: bool
) -> tuple[Tensor, Tensor]:
    """List the tiles of all rows, documents with the most rows on the other side first; no wait for the device.

    cu_seqlens, cu_seqlens_other [B+1] int32; `last_first`: a document's last tile comes first. Returns the tiles,
    [most_tiles, 5] int32 (start and length of the document, the same on the other side, the first row in it), and how
    many they are, [1] int32.
    """
    num_documents = cu_seqlens.shape[0] - 1
    most = most_tiles(num_rows, num_documents, rows_per_tile)
    tiles = torch.empty(most, _NUMBERS_PER_TILE.value, dtype=torch.int32, device=cu_seqlens.device)
    count = torch.empty(1, dtype=torch.int32, device=cu_seqlens.device)
    _plan_kernel[(num_documents + 1,)](
        *(cu_seqlens, cu_seqlens_other, tiles, count, num_documents, num_rows),
        ROWS=rows_per_tile,
        LAST_FIRST=last_first,
        BLOCK=128,
        num_warps=1,
    )
    return tiles, count


def most_tiles(num_rows: int, num_documents: int, rows_per_tile: int) -> int:
    """Return an upper bound of the number of tiles, whatever the lengths."""
    return num_rows // rows_per_tile + num_documents + 1


def padded_width(head_dim: int) -> int:
    """Return the width of a tile: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
