"""What the tests of the losses' Triton kernels share: small tiles, and the ways in which logits come about."""

import pytest
from torch import Tensor

import kernels.losses._streamed_projection as streamed

LOGITS = {
    "kept": {"_KEPT_LOGITS": 2**27},
    "kept in chunks": {"_KEPT_LOGITS": 700, "_WEIGHTS_PER_PART": 300},
    "never kept": {"_KEPT_LOGITS": 0},
    "never kept, in windows": {"_KEPT_LOGITS": 0, "_LOGITS_PER_WINDOW": 700},
}


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = streamed.Tile(16, 16, 16, warps=4, stages=2)
    monkeypatch.setattr(streamed, "tile_of", lambda dtype, *, kept: tile)


def choose_logits(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    for name, value in LOGITS[way].items():
        monkeypatch.setattr(streamed, name, value)


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().double().clone().requires_grad_() for x in tensors)
