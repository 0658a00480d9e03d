"""Products of tokens with the weights of the experts that were chosen for them, of all experts in one launch.

    y[r, n] = Σ_k x[source(r), k] · W[expert(r), n, k]      rows r of one expert are neighbours: `arrange_rows`

Each program has a tile of one expert's rows and some outputs. How many rows an expert has stays on the device (as in
`kernels.common.ragged_tiles`): no launch waits, and a CUDA graph serves whatever the router chooses. Weights are dense
or quantized, of every format that `quantized_linear` takes, and tiles of them are decoded as they are there.

For inference: nothing here has a gradient. (Grouped products: Gale et al., MegaBlocks, arXiv 2211.15841.)

Legend: T tokens, k experts of a token, S = T · k rows, E experts, K input features, N output features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.ragged_tiles import dot, plan_tiles
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, is_interpreted, runs_triton
from kernels.linear._quantized_tiles import TiledWeight, load_table
from kernels.linear.dense import PreparedWeight
from kernels.linear.quantized import Tiles, constants_of, decodes_in_pairs, tensors_of, tile_product

_STACKED = ("words", "scales", "zeros", "minima")
"""What a tiled weight is made of."""
_DECODE_ROWS = 16
"""Of an expert, on average: up to here a smaller tile wastes less."""
_TILES = {True: Tiles(16, 128, 4, 4), False: Tiles(64, 128, 8, 3)}
_FP32_TILES = {True: Tiles(16, 64, 4, 2), False: Tiles(32, 64, 8, 2)}
_DENSE_TILE = 64


class RowsByExpert(NamedTuple):
    """Rows of tokens in the order of the experts that they chose."""

    sources: Tensor
    """int64 [S]: the token of each row."""
    back: Tensor
    """int64 [T, k]: the row of each choice of a token."""
    sizes: Tensor
    """int64 [E]: how many rows each expert has."""


class ExpertRows(NamedTuple):
    """Which rows each expert computes."""

    sources: Tensor
    """int32 [S]: the token of each row."""
    back: Tensor
    """int64 [T, k]: the row of each choice of a token."""
    tiles: Tensor
    num_tiles: Tensor
    """As `plan_tiles` returns them; a tile's start on the other side is the number of its expert."""
    is_decode: bool


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of one shape and format, one for each expert; `stack_experts` makes them."""

    stacked: Tensor | TiledWeight
    """Dense [E, N, K], or a tiled weight of which each tensor has a dimension more, the first."""
    shape: tuple[int, int]

    def __getitem__(self, expert: int) -> PreparedWeight | TiledWeight:
        """One of them, in the same memory."""
        if isinstance(self.stacked, Tensor):
            return PreparedWeight(self.stacked[expert])
        tensors = {name: getattr(self.stacked, name) for name in _STACKED}
        mine: dict[str, Any] = {name: None if x is None else x[expert] for name, x in tensors.items()}
        return replace(self.stacked, **mine)


def stack_experts(weights: Sequence[PreparedWeight | TiledWeight]) -> ExpertWeights | None:
    """Copies of prepared weights [N, K]; None where they are not alike, or not on a device that Triton runs on."""
    dense = [weight.held for weight in weights if isinstance(weight, PreparedWeight) and not weight.packed]
    tensors = [one for one in dense if isinstance(one, Tensor)]
    if len(tensors) == len(weights):
        alike = runs_triton(tensors[0]) and len({(one.shape, one.dtype) for one in tensors}) == 1
        n, k = tensors[0].shape
        return ExpertWeights(torch.stack(tensors), (n, k)) if alike else None
    tiled = [weight for weight in weights if isinstance(weight, TiledWeight)]
    if len(tiled) < len(weights) or len({_kind(one) for one in tiled}) > 1:
        return None
    columns = {name: [getattr(one, name) for one in tiled] for name in _STACKED}
    stacked: dict[str, Any] = {name: None if c[0] is None else torch.stack(c) for name, c in columns.items()}
    return ExpertWeights(replace(tiled[0], **stacked), tiled[0].shape)


def _kind(weight: TiledWeight) -> tuple[object, ...]:
    """What tiled weights share that one launch can multiply with."""
    forms = [None if x is None else (x.shape, x.dtype) for x in (getattr(weight, name) for name in _STACKED)]
    return (weight.format, weight.tile, weight.group, weight.zero, *forms)


def sort_by_expert(chosen: Tensor, num_experts: int) -> RowsByExpert:
    """Of the experts chosen by each token, int64 [T, k]; nothing waits for the device."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    sizes = torch.zeros(num_experts, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return RowsByExpert(order // chosen.shape[1], back.view_as(chosen), sizes)


def arrange_rows(chosen: Tensor, num_experts: int, dtype: torch.dtype) -> ExpertRows:
    """The rows of `expert_products` for the experts chosen by each token, int64 [T, k]; `dtype` of the tokens."""
    sources, back, sizes = sort_by_expert(chosen, num_experts)
    starts = F.pad(sizes.cumsum(0), (1, 0)).int()
    numbers = torch.arange(num_experts + 1, dtype=torch.int32, device=sizes.device)
    is_decode = len(sources) <= _DECODE_ROWS * num_experts
    rows = _tiles(dtype, is_decode=is_decode).rows
    tiles, num_tiles = plan_tiles(starts, numbers, num_rows=len(sources), rows_per_tile=rows, last_first=False)
    return ExpertRows(sources.int(), back, tiles, num_tiles, is_decode)


def _tiles(dtype: torch.dtype, *, is_decode: bool) -> Tiles:
    return (_FP32_TILES if dtype == torch.float32 else _TILES)[is_decode]


def expert_products_reference(x: Tensor, weights: Sequence[Tensor], chosen: Tensor) -> Tensor:
    """x [T, K] times dense weights [N, K] of the experts chosen, int64 [T, k]: [T, k, N]."""
    return torch.einsum("tk,tenk->ten", x, torch.stack(list(weights))[chosen])


def expert_products(x: Tensor, weights: ExpertWeights, rows: ExpertRows) -> Tensor:
    """Return y [S, N], the rows of each expert together, of tokens x [T, K] or of such rows x [S, K].

    x is fp32, bf16 or fp16; rows of it need not be neighbours. Raises ValueError where shapes do not fit.
    """
    check_rows(x=x)
    (n, k), num_rows = weights.shape, rows.back.numel()
    if x.ndim != 2 or x.shape[1] != k or len(x) not in (len(rows.back), num_rows):
        raise ValueError(f"x must be [{len(rows.back)} or {num_rows}, {k}] for weights [{n}, {k}], not {list(x.shape)}")
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    if num_rows:
        _launch(x, weights, rows, out)
    return out


def _launch(x: Tensor, weights: ExpertWeights, rows: ExpertRows, out: Tensor) -> None:
    (num_rows, n), k = out.shape, weights.shape[1]
    tiles, stacked = _tiles(x.dtype, is_decode=rows.is_decode), weights.stacked
    tensors: tuple[Tensor | None, ...]
    if isinstance(stacked, Tensor):
        tensors, sizes, constants = (stacked, *[None] * 4), (n * k, 0), _dense_constants(tiles, x)
    else:
        in_pairs = decodes_in_pairs(stacked, x)
        tensors = tensors_of(stacked, x.dtype, in_pairs=in_pairs)
        sizes = stacked.words.stride(0), stacked.scales.stride(0)
        constants = constants_of(stacked, tiles, x) | {"IN_PAIRS": in_pairs}
    most = min(num_rows, len(rows.tiles))  # tiles that are none of any expert's rows find nothing to do
    _expert_kernel[(triton.cdiv(n, tiles.outputs), most)](
        x, rows.sources if len(x) < num_rows else None, rows.tiles, rows.num_tiles, *tensors, out,
        k, n, x.stride(0), *sizes, **constants, TOKENS=tiles.rows, WHOLE=k % constants["TILE"] == 0,
    )  # fmt: skip


def _dense_constants(tiles: Tiles, x: Tensor) -> dict[str, Any]:
    """What `constants_of` tells of a weight in a format."""
    return {
        **{"FORMAT": "dense", "WORDS": 0, "GROUP": 0, "ZERO": 0, "TILE": _DENSE_TILE, "IN_PAIRS": False},
        **{"OUTPUTS": tiles.outputs, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        "INTERPRETED": is_interpreted(x),
    }


@triton.jit
def _expert_kernel(
    p_x, p_sources, p_tiles, p_num_tiles, p_weight, p_table, p_zeros, p_scales, p_minima,
    p_out, num_inputs, num_outputs, stride_x, size_weight, size_scales,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, TILE: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, WHOLE: tl.constexpr, IN_PAIRS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's rows and OUTPUTS of its outputs. `size_…`: elements that lie between two experts'."""
    if tl.program_id(1) >= tl.load(p_num_tiles):
        return
    p_numbers = p_tiles + tl.program_id(1) * 5
    start, length, first = tl.load(p_numbers), tl.load(p_numbers + 1), tl.load(p_numbers + 4)
    expert = tl.load(p_numbers + 2).to(tl.int64)
    o_row = first + tl.arange(0, TOKENS)
    m_t = o_row < length
    o_row += start
    o_source = o_row if p_sources is None else tl.load(p_sources + o_row, mask=m_t, other=0)
    p_rows = p_x + o_source.to(tl.int64)[:, None] * stride_x
    o_n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m_n = o_n < num_outputs
    # What is not there is read as the last output, and not stored: no mask in the loop.
    o_read, m_read = tl.minimum(o_n, num_outputs - 1), tl.full([OUTPUTS], True, tl.int1)
    b_sum = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
    p_weight += expert * size_weight
    if FORMAT == "dense":
        p_weights = p_weight + o_read.to(tl.int64)[:, None] * num_inputs
        for begin in tl.range(0, num_inputs, TILE):
            o_k = begin + tl.arange(0, TILE)[None, :]
            if WHOLE:
                b_x = tl.load(p_rows + o_k, mask=m_t[:, None], other=0.0, eviction_policy="evict_last")
                b_w = tl.load(p_weights + o_k)
            else:
                b_x = tl.load(p_rows + o_k, mask=m_t[:, None] & (o_k < num_inputs), other=0.0)
                b_w = tl.load(p_weights + o_k, mask=o_k < num_inputs, other=0.0)
            b_sum = dot(b_w, tl.trans(b_x), b_sum, INTERPRETED)
    else:
        p_scales += expert * size_scales
        if p_zeros is not None:
            p_zeros += expert * size_scales
        if p_minima is not None:
            p_minima += expert * size_scales
        table = load_table(p_table, FORMAT, WORDS)
        for tile in tl.range(0, tl.cdiv(num_inputs, TILE)):
            b_sum = tile_product(
                b_sum, p_rows, p_weight, table, p_zeros, p_scales, p_minima, tile, o_read, m_read, m_t, num_inputs,
                num_outputs, FORMAT, WORDS, GROUP, ZERO, TILE, WHOLE, IN_PAIRS, INTERPRETED,
            )  # fmt: skip
        if GROUP == 0:
            b_sum *= tl.load(p_scales + o_read)[:, None]
    p_outs = p_out + o_row.to(tl.int64)[None, :] * num_outputs + o_n[:, None]
    tl.store(p_outs, b_sum.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_t[None, :])
