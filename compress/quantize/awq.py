"""AWQ: columns that large inputs go through are scaled up before rounding, so that they lose less.

    s = mean|x|^α, over √(max s · min s);   α of 0, 1/20 … 19/20: where the outputs err least

    error = Σ over the layers that read x of tr(Δ H Δᵀ),   Δ = round(W · s) / s − W,   H = Σ x xᵀ

α = 0 is plain rounding, so the error on the calibration text never grows. The scales are folded into what makes x
(scaling.py).

Source: https://arxiv.org/abs/2306.00978.

Legend: N output features, K input features.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compress.quantize.gptq import output_error
from compress.quantize.inputs import InputMoments

_STEPS = 20
_SMALLEST = 1e-4
"""Beside the mean feature: what calibration never excites is not scaled away."""

Reader = tuple[Tensor, Callable[[Tensor], Tensor]]
"""A weight [N, K], and what rounding makes of such a matrix."""


@torch.no_grad()
def awq_scales(readers: Sequence[Reader], moments: InputMoments, magnitudes: Tensor | None = None) -> Tensor:
    """The best s, fp32 [K]; ones where no scaling helps.

    readers: all that are rounded of those that read the input. `magnitudes` [K] stand in for Σ|x| where features must
    be scaled alike.
    """
    mean = (moments.magnitudes if magnitudes is None else magnitudes) / max(moments.tokens, 1)
    mean = mean.clamp(min=_SMALLEST * mean.mean())
    best, least = torch.ones_like(mean), torch.inf
    for step in range(_STEPS):
        scales = _normalized(mean, step / _STEPS)
        error = sum(
            output_error(weight, rounded(weight.float() * scales) / scales, moments.hessian)
            for weight, rounded in readers
        )
        if error < least:
            best, least = scales, error
    return best


def _normalized(mean: Tensor, exponent: float) -> Tensor:
    scales = mean.pow(exponent)
    return scales / (scales.max() * scales.min()).sqrt()
