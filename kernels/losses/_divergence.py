"""Which divergence a distillation minimizes, and what it returns; formulas in kernels/losses/linear_distillation.py."""

from typing import Literal, NamedTuple, TypeAlias, get_args

from torch import Tensor

DivergenceKind = Literal[
    "forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "total_variation", "acceptance"
]

SHARE_DECAY = 3.0
"""In `acceptance`, how fast KL gives way to total variation as more of the draft is accepted."""

SoftCaps: TypeAlias = tuple[float | None, float | None]
"""Of the student's and the teacher's logits; None: no cap."""
NO_CAPS: SoftCaps = (None, None)


class DistillationSums(NamedTuple):
    """Sums over the rows whose label is not -100: fp32 scalars, of which only `loss` is differentiable."""

    loss: Tensor
    kl: Tensor
    """KL(teacher ‖ student) at temperature 1, nats."""
    cross_entropy: Tensor
    """Of the student, nats."""
    total_variation: Tensor
    """½ Σ |p − q| at temperature 1; 1 − its mean is the acceptance rate of speculative decoding."""
    agreement: Tensor
    """Rows where the student's most probable token is a most probable one of the teacher, too."""


class Objective(NamedTuple):
    kind: DivergenceKind
    temperature: float
    alpha: float
    hard_weight: float


def make_objective(kind: DivergenceKind, temperature: float, alpha: float, hard_weight: float) -> Objective:
    """Raises ValueError for an unknown kind, a temperature ≤ 0, or alpha or hard_weight outside of [0, 1]."""
    if kind not in get_args(DivergenceKind):
        raise ValueError(f"unknown divergence {kind!r}; known are {', '.join(get_args(DivergenceKind))}")
    if temperature <= 0:
        raise ValueError(f"the temperature of distillation must be positive, not {temperature}")
    if not (0 <= alpha <= 1 and 0 <= hard_weight <= 1):
        raise ValueError(f"alpha and hard_weight must lie in [0, 1], not {alpha} and {hard_weight}")
    if kind == "jsd" and alpha in (0, 1):
        kind = "forward_kl" if alpha == 0 else "reverse_kl"
    return Objective(kind, temperature, alpha, hard_weight)
