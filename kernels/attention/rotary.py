"""Rotary position embedding (RoPE) in the half-split layout of Hugging Face's Llama.

Feature pair (i, i + d/2) of a head is rotated by the angle position · inv_freq[i]:

    first'  = first · cos − second · sin
    second' = second · cos + first · sin

The Triton kernel rotates q and k in one launch: a program takes some heads of one token, and the backward pass is the
same kernel with the angles negated.

Source: https://arxiv.org/abs/2104.09864. Legend: T tokens, Hq query heads, Hkv key/value heads, d head dim.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.attention._rotary_cpu import make_tables, makes_tables
from kernels.common.triton import tl, triton
from kernels.common.triton_support import check_rows, runs_triton


def rope_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None = None) -> Tensor:
    """Return the angle per position of each feature pair, [d/2] fp32.

    `scaling` is the block `rope_scaling` (newer: `rope_parameters`) of a Hugging Face config: None or rope_type
    "default", "linear", "llama3" or "longrope" (of texts as long as in the first training). Raises ValueError for any
    other type.
    """
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if scaling is None or kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / scaling["factor"]
    if kind == "llama3":
        return _llama3_frequencies(inv_freq, scaling)
    if kind == "longrope":
        return inv_freq / torch.tensor(scaling["short_factor"], dtype=torch.float32)
    known = "'default', 'linear', 'llama3' and 'longrope'"
    raise ValueError(f"rope scaling {kind!r} is not supported; supported are {known}")


def _llama3_frequencies(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Slow down only the wavelengths that the original context could not hold (Llama 3.1)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    rotations = scaling["original_max_position_embeddings"] / wavelength
    # 1 keeps the frequency (many rotations within the original context), 0 divides it by the factor.
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / scaling["factor"] + keep * inv_freq


def rope_magnitude(scaling: dict[str, Any] | None, num_positions: int) -> float:
    """What cosine and sine are multiplied by: 1, but for LongRoPE (https://arxiv.org/abs/2402.13753).

    `num_positions` is what the configuration says of the longest text.
    """
    if scaling is None or scaling["rope_type"] != "longrope":
        return 1.0
    original = scaling["original_max_position_embeddings"]
    stretch = scaling.get("factor") or num_positions / original
    return scaling.get("attention_factor") or math.sqrt(1 + max(0.0, math.log(stretch)) / math.log(original))


def partial_frequencies(inv_freq: Tensor, head_dim: int) -> Tensor:
    """Frequencies [d/2] of heads as `halves_apart` orders them, of those [r/2] of the r features that are rotated."""
    return torch.cat((inv_freq, inv_freq.new_zeros(head_dim // 2 - len(inv_freq))))


def halves_apart(x: Tensor, rotated: int) -> Tensor:
    """Heads [T, H, d] whose first `rotated` features are rotated, in the order in which whole heads are."""
    half, rest = rotated // 2, (x.shape[-1] - rotated) // 2
    first, second, left, right = x.split((half, half, rest, rest), dim=-1)
    return torch.cat((first, left, second, right), dim=-1)


def rotary_tables(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) for `apply_rotary`, each [T, 1, d] fp32, of positions [T] int64 and inv_freq [d/2] fp32.

    Both halves of a row hold the same angles; sin is negative in the first, where it is subtracted.
    """
    if makes_tables(positions, inv_freq):
        return make_tables(positions, inv_freq)
    angles = positions[:, None, None].float() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary` in its plainest form: a product of complex numbers."""
    half = q.shape[-1] // 2
    rotation = torch.complex(cos[..., half:], sin[..., half:])

    def rotate(x: Tensor) -> Tensor:
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        rotated = torch.complex(first, second) * rotation
        return torch.cat((rotated.real, rotated.imag), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


@triton.jit
def rotate(b_first, b_second, b_cos, b_sin):
    """Rotate pairs of features, all fp32. Fused explicitly, so that it rounds alike in every kernel."""
    return tl.fma(b_first, b_cos, -(b_second * b_sin)), tl.fma(b_second, b_cos, b_first * b_sin)


@triton.jit
def _rotate_heads(
    p_in, p_out, in_token, in_head, token, first_head, b_cos, b_sin,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """HEADS of the NUM_HEADS heads of one token; the output is contiguous."""
    heads, pairs = (first_head + tl.arange(0, HEADS))[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (heads < NUM_HEADS) & (pairs < HALF)
    o_in = token * in_token + heads.to(tl.int64) * in_head + pairs
    b_first = tl.load(p_in + o_in, mask=mask, other=0.0).to(tl.float32)
    b_second = tl.load(p_in + o_in + HALF, mask=mask, other=0.0).to(tl.float32)
    b_first, b_second = rotate(b_first, b_second, b_cos, b_sin)
    o_out = (token * NUM_HEADS + heads) * (2 * HALF) + pairs
    tl.store(p_out + o_out, b_first.to(p_out.dtype.element_ty), mask=mask)
    tl.store(p_out + o_out + HALF, b_second.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_kernel(
    p_q, p_k, p_cos, p_sin, p_q_out, p_k_out,
    q_token, q_head, k_token, k_head, cos_token, sin_token,
    BACKWARD: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, block): the first Q_BLOCKS blocks are heads of q, the others of k."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, BLOCK)
    # The second halves of the tables hold the angles as they are.
    b_cos = tl.load(p_cos + token * cos_token + HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    b_sin = tl.load(p_sin + token * sin_token + HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    if BACKWARD:
        b_sin = -b_sin
    if block < Q_BLOCKS:
        _rotate_heads(
            p_q, p_q_out, q_token, q_head, token, block * HEADS, b_cos, b_sin,
            NUM_HEADS=Q_HEADS, HALF=HALF, HEADS=HEADS, BLOCK=BLOCK,
        )  # fmt: skip
    else:
        _rotate_heads(
            p_k, p_k_out, k_token, k_head, token, (block - Q_BLOCKS) * HEADS, b_cos, b_sin,
            NUM_HEADS=KV_HEADS, HALF=HALF, HEADS=HEADS, BLOCK=BLOCK,
        )  # fmt: skip


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries [T, Hq, d] and keys [T, Hkv, d] of one dtype, by `rotary_tables`, in fp32; differentiable.

    The results have the dtype of q and share memory with nothing but each other. On CUDA the inputs are fp32, bf16 or
    fp16 and contiguous in the last dimension, else this raises ValueError.
    """
    if runs_triton(q):
        check_rotary(q, k, cos, sin)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _Rotary.apply(q, k, cos, sin)
    return _apply(q, k, cos, sin, back=False)


def check_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless the Triton kernels can rotate q and k by these tables."""
    check_rows(q=q, k=k)
    tokens, _, d = q.shape
    if k.dtype != q.dtype or k.shape[0] != tokens or k.shape[2] != d:
        raise ValueError(f"q and k differ in more than their heads: {q.shape} {q.dtype}, {k.shape} {k.dtype}")
    for table in (cos, sin):
        if table.dtype != torch.float32 or table.shape != (tokens, 1, d) or table.stride(-1) != 1:
            raise ValueError(f"rotary tables must be as rotary_tables makes them, not {table.shape} {table.dtype}")


def _apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    """Rotate q and k, or rotate them `back` by the same angles."""
    return _launch(q, k, cos, sin, back=back) if runs_triton(q) else _rotate(q, k, cos, -sin if back else sin)


def split_heads(head_dim: int, num_heads: int) -> tuple[int, int, int]:
    """Return (heads of a program, half the power of two of at least `head_dim`, warps): 8 pairs a thread."""
    block = triton.next_power_of_2(head_dim) // 2
    heads = min(triton.next_power_of_2(num_heads), max(1, 1024 // block))
    return heads, block, max(1, heads * block // 256)


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    if back:  # gradients have any strides
        q, k = q.contiguous(), k.contiguous()
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    (tokens, q_heads, d), kv_heads = q.shape, k.shape[1]
    heads, block, warps = split_heads(d, max(q_heads, kv_heads))
    q_blocks = triton.cdiv(q_heads, heads)
    _rotary_kernel[(tokens, q_blocks + triton.cdiv(kv_heads, heads))](
        q, k, cos, sin, q_out, k_out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
        BACKWARD=back, Q_HEADS=q_heads, KV_HEADS=kv_heads, Q_BLOCKS=q_blocks,
        HALF=d // 2, HEADS=heads, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return q_out, k_out


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    heads = torch.cat((q, k), dim=1)
    wide = heads.to(torch.promote_types(heads.dtype, cos.dtype))
    rotated = torch.addcmul(wide * cos, wide.roll(heads.shape[-1] // 2, dims=-1), sin).to(heads.dtype)
    return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]


class _Rotary(torch.autograd.Function):
    """The gradient of a rotation is rotated back by the same angles; q and k need not be kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _apply(q, k, cos, sin, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        return *_apply(grad_q, grad_k, *ctx.saved_tensors, back=True), None, None
