"""x Wᵀ of floats x and an INT8 weight by oneDNN's product of bytes (u8 · s8, summed in int32).

Each row of x becomes 16-bit integers times a unit, and these two bytes: x = unit · (256 · (high − 128) + low − 128).
High and low bytes are rows of one product, whose sums are exact, so x loses less than by bf16's own rounding: at most
half of 1/32638 of its row's largest element. It reads half the bytes of a bf16 weight and costs as many cycles.

Legend: T tokens, K input features, N output features.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.quantization import Int8Weight

_MIDDLE = 128
_LARGEST = 32_638
_SHIFTS = torch.tensor([8, 0], dtype=torch.int32)[:, None, None]
_SMALLEST_UNIT = 1e-38
MOST_INPUTS = 1 << 16
"""255 · 128 · K must fit into int32."""


@dataclass(frozen=True, slots=True)
class ByteWeight:
    """An INT8 matrix in oneDNN's layout; the codes lie here only."""

    packed: Tensor
    """s8 [K, N], opaque to everyone but oneDNN."""
    scales: Tensor
    """fp32 [N]."""
    bias: Tensor
    """fp32 [N]: takes away what the 128 in every byte of x adds."""
    zeros: Tensor
    """int32 [N]: the codes that mean 0."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[1], self.packed.shape[0]

    def unpack(self) -> Int8Weight:
        return Int8Weight(self.packed.to_dense().t(), self.scales)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ByteWeight":
        return ByteWeight(self.packed.clone(), self.scales, self.bias, self.zeros)


def pack_bytes(weight: Int8Weight) -> ByteWeight:
    sums = weight.codes.sum(1, dtype=torch.int32)
    packed = torch.ops.onednn.qlinear_prepack(weight.codes.contiguous(), None)
    return ByteWeight(packed, weight.scales, -_MIDDLE * sums * weight.scales, torch.zeros_like(sums))


@cache
def multiplies_bytes() -> bool:
    """Whether this build and processor do it fast, and without saturating as older instructions do."""
    if not (torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()):
        return False
    if not (hasattr(torch.ops.onednn, "qlinear_prepack") and hasattr(torch.ops.onednn, "qlinear_pointwise")):
        return False
    weight = pack_bytes(Int8Weight(torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16)))
    product = _multiply(torch.full((2, 64), 255, dtype=torch.uint8), weight)
    return bool((product == (255 - _MIDDLE) * 127 * 64).all())


def byte_product(x: Tensor, weight: ByteWeight) -> Tensor:
    """x Wᵀ, fp32 [T, N], of x [T, K] in bf16 or fp16."""
    units = (x.abs().amax(1, keepdim=True).float() / _LARGEST).clamp_min_(_SMALLEST_UNIT)
    # Adding the half rounds; 257 · 128 makes both bytes positive.
    integers = (x / units).add_(257 * _MIDDLE + 0.5).to(torch.int32)
    # The conversion to u8 keeps the last 8 bits.
    both = (integers >> _SHIFTS).to(torch.uint8).flatten(0, 1)
    high, low = _multiply(both, weight).split(len(x))
    return torch.add(low, high, alpha=256).mul_(units)


def _multiply(x: Tensor, weight: ByteWeight) -> Tensor:
    """(x − 128) Wᵀ, fp32, of x u8."""
    result: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, weight.packed, weight.scales, weight.zeros, weight.bias, 1.0, 0, torch.float32, "none", [], ""
    )
    return result
