"""The one comparator for numbers: the RMS of the error over the RMS of the expected values, bounded by dtype.

A bound per element would have to be as loose as the worst element; the RMS of a whole tensor is not, so a factor of
1.01 or a handful of wrong rows fails in every dtype. The bounds are the same on every machine.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS(actual − expected) / RMS(expected); 0 for two tensors of zeros, and for empty ones."""
    error, size = (
        (x.double().square().mean().sqrt().item() if x.numel() else 0.0) for x in (actual - expected, expected)
    )
    return error / size if size else error


def check_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, what: str = "result") -> None:
    """Raise AssertionError unless `actual` equals `expected` up to the rounding of `dtype` (default: of `actual`)."""
    assert actual.shape == expected.shape, f"{what} has the shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert bool(actual.isfinite().all()), f"{what} is not finite"
    bound = BOUNDS[actual.dtype if dtype is None else dtype]
    error = relative_rms(actual.double(), expected.double())
    assert error <= bound, f"{what} is off by {error:.2e} of its RMS, allowed are {bound:.0e}"


def check_all_close(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, dtype: torch.dtype | None = None
) -> None:
    """`check_close` for each pair."""
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        check_close(one, other, dtype=dtype, what=f"result {number}")


def check_slopes(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    """Check the gradient of a scalar function of fp64 tensors against its slope in random directions.

    As torch.autograd.gradcheck, for functions whose backward works once.
    """
    grads = torch.autograd.grad(function(*inputs), inputs)
    for number, grad in enumerate(grads):
        for _ in range(3):
            step = torch.zeros_like(grad).normal_()
            step *= 1e-5 / step.norm()
            ahead, behind = (
                function(*(x + sign * step if i == number else x for i, x in enumerate(inputs))) for sign in (1, -1)
            )
            slope, expected = (ahead - behind).item() / 2e-5, (grad * step).sum().item() / 1e-5
            assert abs(slope - expected) <= 1e-7 * max(1, grad.norm().item()), f"slope {slope}, gradient {expected}"
