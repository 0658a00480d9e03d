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
    """Return (cos, sin) for `apply_rotary`, each [T, 1, d] fp32, of positions [T] int64 and inv_freq [d/2] fp32.

    Both halves of a row hold the same angles; sin is negative in the first, where it is subtracted.
    """
    angles = positions[:, None, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary` in its plainest form: a product of complex numbers."""
    half = q.shape[-1] // 2
    turn = torch.complex(cos[..., half:], sin[..., half:])

    def rotate(x: Tensor) -> Tensor:
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries [T, Hq, d] and keys [T, Hkv, d] of one dtype, by `rotary_tables`, in fp32; differentiable.

    The results have the dtype of q and share memory with nothing but each other.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _Rotary.apply(q, k, cos, sin)
    return _rotate(q, k, cos, sin)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    heads = torch.cat((q, k), dim=1)
    wide = heads.to(torch.promote_types(heads.dtype, cos.dtype))
    turned = torch.addcmul(wide * cos, wide.roll(heads.shape[-1] // 2, dims=-1), sin).to(heads.dtype)
    return turned[:, : q.shape[1]], turned[:, q.shape[1] :]


class _Rotary(torch.autograd.Function):
    """The gradient of a rotation is turned back by the same angles; q and k need not be kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_rotate(grad_q, grad_k, cos, -sin), None, None
