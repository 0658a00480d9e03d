"""A soft cap on scores or logits: cap · tanh(x / cap), near x where x is small, and nowhere beyond the cap.

Its slope is 1 − (y / cap)² of the result y. None stands for no cap, and costs nothing anywhere.
Source: https://arxiv.org/abs/2408.00118 (Gemma 2).
"""

import torch
from torch import Tensor

from kernels.common.triton import tl, triton

_TWO_LOG2_E = tl.constexpr(2.8853900817779268)


def soft_capped(x: Tensor, cap: float | None) -> Tensor:
    """`x` of any shape and float dtype under a cap; differentiable."""
    return x if cap is None else cap * torch.tanh(x / cap)


def soft_cap_(x: Tensor, cap: float | None) -> Tensor:
    """The same, in the memory of `x` and without gradients."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def soft_cap_slopes(y: Tensor, cap: float) -> Tensor:
    """The derivative where `soft_capped` has given `y`; 0 where a mask has made that −inf."""
    return (y / cap).clamp_(min=-1).square_().neg_().add_(1)


def check_soft_cap(cap: float | None) -> None:
    """Raise ValueError for a cap that is not positive."""
    if cap is not None and cap <= 0:
        raise ValueError(f"soft_cap must be positive, not {cap}")


@triton.jit
def soft_capped_tile(b_x, CAP: tl.constexpr):
    """`soft_capped` of fp32 numbers. Near 0, where a quotient of exponentials loses digits, it is a series."""
    b_t = b_x * (1.0 / CAP)
    b_square = b_t * b_t
    b_series = b_square * (-17.0 / 315.0 + b_square * (62.0 / 2835.0))
    b_series = b_t + b_t * b_square * (-1.0 / 3.0 + b_square * (2.0 / 15.0) + b_square * b_series)
    b_quotient = 1.0 - 2.0 / (tl.exp2(b_t * _TWO_LOG2_E) + 1.0)
    return tl.where(b_square < 0.0625, b_series, b_quotient) * CAP


@triton.jit
def soft_cap_slopes_tile(b_y, CAP: tl.constexpr):
    """`soft_cap_slopes` of fp32 numbers."""
    b_t = tl.maximum(b_y * (1.0 / CAP), -1.0)
    return 1.0 - b_t * b_t
