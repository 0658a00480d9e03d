"""Rotary position embedding (RoPE) in the half-split layout of Hugging Face's Llama.

Feature pair (i, i + d/2) of a head is turned by the angle position · inv_freq[i]:

    first'  = first · cos − second · sin
    second' = second · cos + first · sin

Source: https://arxiv.org/abs/2104.09864. Legend: T tokens, Hq query heads, Hkv key/value heads, d head dim.
"""

import math
from typing import Any

import torch
from torch import Tensor


def rope_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None = None) -> Tensor:
    """Return the angle per position of each feature pair, [d/2] fp32.

    `scaling` is the block `rope_scaling` (newer: `rope_parameters`) of a Hugging Face config: None or rope_type
    "default", "linear" or "llama3". Raises ValueError for any other type.
    """
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if scaling is None or kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / scaling["factor"]
    if kind == "llama3":
        return _llama3_frequencies(inv_freq, scaling)
    raise ValueError(f"rope scaling {kind!r} is not supported; supported are 'default', 'linear' and 'llama3'")


def _llama3_frequencies(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Slow down only the wavelengths that the original context could not hold (Llama 3.1)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    rotations = scaling["original_max_position_embeddings"] / wavelength
    # 1 keeps the frequency (many rotations within the original context), 0 divides it by the factor.
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / scaling["factor"] + keep * inv_freq


def rotary_tables(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [T, d/2] fp32, of positions [T] int64 and inv_freq [d/2] fp32."""
    angles = positions[:, None].float() * inv_freq
    return angles.cos(), angles.sin()


def apply_rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary` in its plainest form: a product of complex numbers."""
    turn = torch.complex(cos, sin)[:, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries [T, Hq, d] and keys [T, Hkv, d] by the tables [T, d/2]; dtypes are kept; differentiable."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
