"""How the kernels of flash attention cut their work, on which processor, and what their launches share.

Larger tiles read keys and values less often; the sums of a tile (O, or dK and dV) must stay in registers for that. The
tables hold the largest tiles that fit the shared memory (227 KiB on Hopper, 163 KiB on an A100, 99 KiB on the smallest
processors since Ampere) and whose inner loops spend at most 6 % of their instructions on spilled registers. Without
asynchronous products each warp reads the tile itself: four warps of 32 rows instead of eight of 16 halve what the
shared memory of an A100 delivers, which took longer than its products (`python -m bench.machine_code 80`).
"""

import importlib
import logging
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.ragged_tiles import padded_width, plan_tiles
from kernels.common.triton_support import (
    compute_capability,
    is_interpreted,
    l2_bytes,
    lend_scratch,
    num_processors,
    shared_memory_bytes,
)

log = logging.getLogger(__name__)


class Tile(NamedTuple):
    """How one kernel cuts its work; the best choice depends on head dim, dtype and processor."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    """Load what a loop walks over through tensor descriptors (TMA), where it is aligned to 16 bytes."""


class Tiles(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    grad_queries: Tile
    grad_keys: Tile
    adds_grad_q: bool = True
    """Whether adding up dQ beside dK and dV pays, where its order is free."""
    programs_per_processor: int = 0
    """Programs that walk the items with a fixed stride; 0: one program per item, started as processors become free."""


# By width. fp32 runs without tensor cores.
_LARGE_TILES = {
    64: Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2)),
    128: Tiles(Tile(128, 128, 8, 2), Tile(128, 128, 8, 2), Tile(32, 128, 8, 3)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
}
_MIDDLE_TILES = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 4, 2), Tile(64, 128, 8, 2)),
    128: Tiles(Tile(128, 32, 4, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 3)),
    256: Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), adds_grad_q=False),
}
_SMALL_TILES = {
    64: Tiles(Tile(128, 64, 4, 2), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 3)),
    256: Tiles(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(32, 32, 8, 2), adds_grad_q=False),
}
_FP32_TILES = {
    64: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    128: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


def choose_tiles(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the tiles for fp32, or for 16-bit floats in the shared memory of a Hopper, an A100 or a smaller GPU."""
    width = max(64, padded_width(head_dim))
    if dtype == torch.float32:
        return _FP32_TILES[width]
    shared_bytes = shared_memory_bytes(device)
    if shared_bytes >= 227 * 1024:
        return _LARGE_TILES[width]
    return _MIDDLE_TILES[width] if shared_bytes >= 163 * 1024 else _SMALL_TILES[width]


class Settings(NamedTuple):
    """What a call asks for beside its tensors."""

    causal: bool
    window: int | None
    scale: float
    deterministic: bool
    soft_cap: float | None = None

    @property
    def limit(self) -> float | None:
        """The cap of products of queries and keys before they are scaled."""
        return None if self.soft_cap is None else self.soft_cap / self.scale


class Inputs(NamedTuple):
    """Shapes as in `flash_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> "Inputs":
        return cls(q, k, v, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)


def common_arguments(inputs: Inputs, settings: Settings, tile: Tile) -> dict[str, Any]:
    """Return the arguments that all three kernels take by these names."""
    q, k = inputs.q, inputs.k
    return {
        "window": settings.window or 0,
        "scale": settings.scale,
        "group": q.shape[1] // k.shape[1],
        "CAUSAL": settings.causal,
        "WINDOWED": settings.window is not None,
        "LIMIT": settings.limit,
        "D": q.shape[2],
        "WIDTH": padded_width(q.shape[2]),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "INTERPRETED": is_interpreted(q),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def plan_queries(inputs: Inputs, tile: Tile) -> tuple[Tensor, Tensor]:
    """List the tiles of queries; the last queries of a document see the most keys."""
    bounds = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    return plan_tiles(*bounds, num_rows=inputs.q.shape[0], rows_per_tile=tile.queries, last_first=True)


def grid_of(tiles_listed: Tensor, rows: Tensor, tiles: Tiles) -> tuple[int]:
    """Return the number of programs for as many tiles as there may be of rows [*, heads, d]."""
    num_items = tiles_listed.shape[0] * rows.shape[1]
    if tiles.programs_per_processor == 0:
        return (num_items,)
    return (min(num_items, tiles.programs_per_processor * num_processors(rows.device)),)


def strides_of(inputs: Inputs) -> tuple[int, ...]:
    """Return the strides of tokens and heads."""
    return tuple(stride for x in inputs[:3] for stride in x.stride()[:2])


def section_of(x: Tensor, y: Tensor) -> int:
    """Return how many heads of x and y [*, heads, d], walked over again and again, fill half of the L2 cache."""
    bytes_per_head = (x.shape[0] + y.shape[0]) * x.shape[2] * x.element_size()
    return max(1, min(x.shape[1], l2_bytes(x.device) // 2 // max(1, bytes_per_head)))


def takes_descriptors(tile: Tile, *tensors: Tensor) -> bool:
    """Return whether these tensors go through descriptors; each row of a head must start at a multiple of 16 bytes."""
    if not tile.descriptors:
        return False
    lend_scratch(tensors[0].device)
    return all(offset * x.element_size() % 16 == 0 for x in tensors for offset in (x.storage_offset(), *x.stride()[:2]))


def for_hopper(x: Tensor, name: str) -> ModuleType | None:
    """Return the kernels of this file in Gluon, where they run; torch.compile knows plain Triton alone."""
    if torch.compiler.is_compiling() or is_interpreted(x) or compute_capability(x.device)[0] != 9:
        return None
    return _gluon(name)


@cache
def _gluon(name: str) -> ModuleType | None:
    """Import when first needed: Gluon is an experiment of Triton's, whose names may change."""
    try:
        return importlib.import_module(f"kernels.attention.{name}")
    except ImportError as error:
        log.info("This Triton lacks some of Gluon that %s uses; portable kernels take its place: %s", name, error)
        return None
