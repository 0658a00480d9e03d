"""How the kernels of flash attention cut their work, on which processor.

Larger tiles read keys and values less often; the sums of a tile (O, or dK and dV) must stay in registers for that. The
tables hold the largest tiles whose inner loops spill few registers or none when Triton 3.6 compiles them, and that fit
the shared memory: 227 KiB on Hopper, 99 KiB on the smallest processors since Ampere.
"""

from typing import NamedTuple

import torch

from kernels.common.ragged_tiles import padded_width
from kernels.common.triton_support import shared_memory_bytes


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
_SMALL_TILES = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), adds_grad_q=False),
    128: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), adds_grad_q=False),
    256: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2), adds_grad_q=False),
}
_FP32_TILES = {
    64: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    128: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


def choose_tiles(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the tiles for 16-bit floats on Hopper and its successors, on older processors, or for fp32."""
    width = max(64, padded_width(head_dim))
    if dtype == torch.float32:
        return _FP32_TILES[width]
    return _LARGE_TILES[width] if shared_memory_bytes(device) >= 227 * 1024 else _SMALL_TILES[width]
