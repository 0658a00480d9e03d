"""Integer weights of kinds that only files of other programs hold."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.linear.quantization import Int4Weight, Int8Weight, IntegerWeight, pack_int4


def in_halves(weight: IntegerWeight) -> IntegerWeight:
    """With scales in fp16."""
    return replace(weight, scales=weight.scales.half())


def from_minima(weight: Tensor, group: int = 32, bits: int = 4) -> IntegerWeight:
    """Levels above the lowest of each group, scales and minima in fp16; 5 bits are held in 8."""
    n, k = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    minima, scales = wide.amin(-1).half(), ((wide.amax(-1) - wide.amin(-1)) / (2**bits - 1)).half()
    steps = (wide - minima.float()[..., None]) / scales.float()[..., None]
    levels = steps.nan_to_num(0).round().clamp(0, 2**bits - 1).to(torch.uint8).view(n, -1)[:, :k].contiguous()
    if bits == 4:
        return Int4Weight(pack_int4(levels), scales, (n, k), group, minima=minima)
    return Int8Weight(levels.view(torch.int8), scales, group, minima=minima)
