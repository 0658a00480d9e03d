"""Distillation loss of two output projections, without ever holding all logits.

p is the teacher's distribution, q the student's, both at temperature τ:

    forward_kl            KL(p ‖ q)
    reverse_kl            KL(q ‖ p)
    jsd                   α KL(p ‖ m) + (1 − α) KL(q ‖ m),  m = α p + (1 − α) q;  α = 0 is KL(p ‖ q), α = 1 is KL(q ‖ p)
    skewed_forward_kl     KL(p ‖ α p + (1 − α) q)
    skewed_reverse_kl     KL(q ‖ (1 − α) p + α q)

    loss = (1 − hard_weight) τ² D + hard_weight · cross-entropy

Legend: T tokens, Ds and Dt hidden sizes of student and teacher, V vocabulary.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_LABEL = -100

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl"]


class DistillationSums(NamedTuple):
    """Sums over the rows whose label is not -100, fp32 scalars; only `loss` is differentiable."""

    loss: Tensor
    kl: Tensor
    """KL(teacher ‖ student) at temperature 1, nats."""
    cross_entropy: Tensor
    total_variation: Tensor
    """½ Σ |p − q| at temperature 1; 1 − its mean is the acceptance rate of speculative decoding."""
    agreement: Tensor
    """Rows where both models' most probable token is the same."""


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the summed KL(p ‖ q) of probabilities; a token of p = 0 counts 0."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum()


def divergence_reference(p: Tensor, q: Tensor, kind: DivergenceKind, alpha: float) -> Tensor:
    """Return the summed divergence of teacher p and student q, probabilities [T, V]."""
    if kind == "jsd" and alpha == 0:
        kind = "forward_kl"
    if kind == "jsd" and alpha == 1:
        kind = "reverse_kl"
    if kind == "forward_kl":
        return _kl(p, q)
    if kind == "reverse_kl":
        return _kl(q, p)
    if kind == "jsd":
        mixture = alpha * p + (1 - alpha) * q
        return alpha * _kl(p, mixture) + (1 - alpha) * _kl(q, mixture)
    if kind == "skewed_forward_kl":
        return _kl(p, alpha * p + (1 - alpha) * q)
    if kind == "skewed_reverse_kl":
        return _kl(q, (1 - alpha) * p + alpha * q)
    raise ValueError(f"unknown divergence {kind!r}; known are {', '.join(DivergenceKind.__args__)}")


def linear_distillation_reference(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    kind: DivergenceKind = "forward_kl",
    temperature: float = 1.0,
    alpha: float = 0.1,
    hard_weight: float = 0.0,
) -> DistillationSums:
    """`linear_distillation` in its plainest form, with all logits at once."""
    valid = labels != IGNORE_LABEL
    vocabulary = min(student_weight.shape[0], teacher_weight.shape[0])
    student = (student_hidden[valid] @ student_weight[:vocabulary].t()).float()
    teacher = (teacher_hidden[valid] @ teacher_weight[:vocabulary].t()).float().detach()
    soft = divergence_reference(
        torch.softmax(teacher / temperature, -1), torch.softmax(student / temperature, -1), kind, alpha
    )
    cross_entropy = F.cross_entropy(student, labels[valid], reduction="sum")
    loss = (1 - hard_weight) * temperature**2 * soft + hard_weight * cross_entropy
    p, q = torch.softmax(teacher, -1), torch.softmax(student.detach(), -1)
    return DistillationSums(
        loss=loss,
        kl=_kl(p, q),
        cross_entropy=cross_entropy.detach(),
        total_variation=0.5 * (p - q).abs().sum(),
        agreement=(p.argmax(-1) == q.argmax(-1)).sum().float(),
    )


linear_distillation = linear_distillation_reference
