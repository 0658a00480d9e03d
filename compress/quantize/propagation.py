"""Weights moved to make up for what rounded layers before them have done to their inputs (error propagation, QEP).

    W* = W + strength · W D (H + λI)⁻¹,   H = Σ x xᵀ,   D = Σ (x° − x) xᵀ,   λ as in `gptq.py`

x is what rounded layers before make of a token, x° what the model made of it before rounding. At strength 1, W* x comes
as near to W x° as a linear layer can on these tokens; half of it serves other text better.

Source: https://arxiv.org/abs/2504.09629.

Legend: T tokens, N output features, K input features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.quantize.gptq import Compensation
from compress.quantize.inputs import InputMoments, projection
from compress.residual_stream import ResidualStream
from model.collectives import ALONE, Group
from model.layers import DecoderLayer

STRENGTH = 0.5


@torch.no_grad()
def moments_and_shift(
    name: str, layer: DecoderLayer, streams: Sequence[ResidualStream], dense: Sequence[Tensor], group: Group = ALONE
) -> tuple[InputMoments, Tensor]:
    """What the projection `name` of the streams' next layer reads, and D, fp32 [K, K].

    dense: x° [T, K] for each stream. group: as in `input_moments`.
    """
    linear = projection(layer, name)
    moments = InputMoments(linear.in_features, linear.device)
    shift = torch.zeros_like(moments.hessian)
    for stream, before in zip(streams, dense, strict=True):
        x = stream.inputs(layer, [name])[name].float()
        moments.add(x)
        shift.addmm_((before.float() - x).T, x)
    moments.add_up(group)
    return moments, group.sum(shift)


@torch.no_grad()
def corrected(weight: Tensor, shift: Tensor, compensation: Compensation, strength: float = STRENGTH) -> Tensor:
    """W* fp32 [N, K] of `weight` [N, K]; D fp32 [K, K] over the tokens of the compensation's H."""
    return weight.float() + strength * compensation.divide(weight.float() @ shift)
