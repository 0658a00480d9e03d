"""Weights moved to make up for what rounded layers before them have done to their inputs (error propagation, QEP).

    W* = W + strength · W D (H + λI)⁻¹,   H = Σ x xᵀ,   D = Σ (x° − x) xᵀ,   λ = damping · mean(diag H)

x is what rounded layers before make of a token, x° what the model made of it before rounding. At strength 1, W* x comes
as near to W x° as a linear layer can on these tokens; half of it serves other text better.

Source: https://arxiv.org/abs/2504.09629.

Legend: N output features, K input features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.quantize.gptq import DAMPING
from compress.residual_stream import ResidualStream
from model.layers import DecoderLayer

STRENGTH = 0.5


@torch.no_grad()
def input_shift(
    name: str,
    layer: DecoderLayer,
    streams: Sequence[ResidualStream],
    dense: DecoderLayer,
    dense_streams: Sequence[ResidualStream],
) -> Tensor:
    """D, fp32 [K, K], of the projection `name` of the streams' next layer; `dense` is that layer before rounding."""
    sums: Tensor | None = None
    for stream, dense_stream in zip(streams, dense_streams, strict=True):
        x = stream.inputs(layer, [name])[name].float()
        shift = dense_stream.inputs(dense, [name])[name].float() - x
        sums = shift.T @ x if sums is None else sums.addmm_(shift.T, x)
    if sums is None:
        raise ValueError("there is no text")
    return sums


@torch.no_grad()
def corrected(weight: Tensor, hessian: Tensor, shift: Tensor, strength: float = STRENGTH) -> Tensor:
    """W* fp32 [N, K] of `weight` [N, K]; H and D fp32 [K, K] over the same tokens. ValueError if H is not finite."""
    mean = hessian.diagonal().mean()
    damped = hessian + DAMPING * mean * torch.eye(len(hessian), device=hessian.device)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        raise ValueError("the second moments of the inputs have no Cholesky factor")
    return weight.float() + strength * torch.cholesky_solve((weight.float() @ shift).T, lower).T
