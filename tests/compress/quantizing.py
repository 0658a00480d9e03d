"""What the tests of quantization share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scheme:
    """How fine a grid is, without a format around it."""

    bits: int = 4
    group: int | None = 32
    symmetric: bool = True


def correlated_inputs(tokens: int, columns: int, seed: int) -> Tensor:
    """Gaussians of which some directions are far stronger than others, as hidden states are; fp32 [T, K]."""
    chance = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=chance) * torch.logspace(0, -1.5, columns)[:, None]
    return torch.randn(tokens, columns, generator=chance) @ mixing
