"""Distillation loss of two output projections, without ever holding all logits.

p is the teacher's distribution and q the student's, both at temperature τ; z are the student's logits:

    kind                   D                                                          m
    forward_kl             KL(p ‖ q)
    reverse_kl             KL(q ‖ p)
    jsd                    α KL(p ‖ m) + (1 − α) KL(q ‖ m)                            α p + (1 − α) q
    skewed_forward_kl      KL(p ‖ m)                                                  α p + (1 − α) q
    skewed_reverse_kl      KL(q ‖ m)                                                  (1 − α) p + α q

    loss = (1 − hard_weight) τ² D + hard_weight · cross-entropy

jsd with α = 0 is forward_kl and with α = 1 reverse_kl: both are its limits after division by α or 1 − α.
τ² keeps the gradient's size when τ changes: it is τ (q − p) for forward_kl. For the others it is
τ q ∘ (g − Σ q g) with g = ∂D/∂q. Everything follows from p, q and the log-ratio log p − log q:
log m − log q = logaddexp(log-ratio + ln(weight of p), ln(weight of q)).
Sources: https://arxiv.org/abs/1503.02531 (τ²), https://arxiv.org/abs/2306.13649 (jsd),
https://arxiv.org/abs/2402.03898 (skewed).

Legend: T tokens, n rows with a label, r rows of a block, Ds and Dt hidden sizes of student and teacher, V vocabulary.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels._projection import (
    IGNORE_LABEL,
    ProjectionGradients,
    attach_gradients,
    log_normalizer,
    product_dtype,
    rows_per_block,
    rows_per_chunk,
    slices,
    statistics_dtype,
)

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl"]


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


class _Objective(NamedTuple):
    kind: DivergenceKind
    temperature: float
    alpha: float
    hard_weight: float


def _objective(kind: DivergenceKind, temperature: float, alpha: float, hard_weight: float) -> _Objective:
    if kind not in get_args(DivergenceKind):
        raise ValueError(f"unknown divergence {kind!r}; known are {', '.join(get_args(DivergenceKind))}")
    if temperature <= 0:
        raise ValueError(f"the temperature of distillation must be positive, not {temperature}")
    if not (0 <= alpha <= 1 and 0 <= hard_weight <= 1):
        raise ValueError(f"alpha and hard_weight must lie in [0, 1], not {alpha} and {hard_weight}")
    if kind == "jsd" and alpha in (0, 1):
        kind = "forward_kl" if alpha == 0 else "reverse_kl"
    return _Objective(kind, temperature, alpha, hard_weight)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the summed KL(p ‖ q) of probabilities; a token of p = 0 counts 0."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum()


def _divergence_reference(p: Tensor, q: Tensor, kind: DivergenceKind, alpha: float) -> Tensor:
    if kind == "forward_kl":
        return _kl(p, q)
    if kind == "reverse_kl":
        return _kl(q, p)
    if kind == "jsd":
        m = alpha * p + (1 - alpha) * q
        return alpha * _kl(p, m) + (1 - alpha) * _kl(q, m)
    if kind == "skewed_forward_kl":
        return _kl(p, alpha * p + (1 - alpha) * q)
    return _kl(q, (1 - alpha) * p + alpha * q)


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
    kind, temperature, alpha, hard_weight = _objective(kind, temperature, alpha, hard_weight)
    valid = labels != IGNORE_LABEL
    vocabulary = min(student_weight.shape[0], teacher_weight.shape[0])
    student = student_hidden[valid] @ student_weight[:vocabulary].t()
    teacher = (teacher_hidden[valid] @ teacher_weight[:vocabulary].t()).detach()
    student, teacher = (logits.to(statistics_dtype(logits.dtype)) for logits in (student, teacher))
    soft = _divergence_reference(
        torch.softmax(teacher / temperature, -1), torch.softmax(student / temperature, -1), kind, alpha
    )
    cross_entropy = F.cross_entropy(student, labels[valid], reduction="sum")
    p, q = torch.softmax(teacher, -1), torch.softmax(student.detach(), -1)
    return DistillationSums(
        loss=(1 - hard_weight) * temperature**2 * soft + hard_weight * cross_entropy,
        kl=_kl(p, q),
        cross_entropy=cross_entropy.detach(),
        total_variation=0.5 * (p - q).abs().sum(),
        agreement=(teacher.gather(1, student.argmax(-1, keepdim=True))[:, 0] == teacher.amax(-1)).sum().to(p.dtype),
    )


def linear_distillation(
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
    """Return the distillation loss and metrics, summed over the rows whose label is not -100.

    student_hidden [T, Ds]; student_weight [V, Ds]; teacher_hidden [T, Dt]; teacher_weight [V', Dt]; labels [T] int64.
    Where V ≠ V', tokens from min(V, V') on (padding of the vocabulary) have no probability in either model.
    The loss is differentiable in the student's tensors, once; the teacher never receives a gradient.
    Raises ValueError for an unknown kind, a temperature ≤ 0, or alpha or hard_weight outside of [0, 1].
    """
    objective = _objective(kind, temperature, alpha, hard_weight)
    dtype = product_dtype(student_hidden)
    valid = (labels != IGNORE_LABEL).nonzero()[:, 0]
    vocabulary = min(student_weight.shape[0], teacher_weight.shape[0])
    student, teacher = (
        (hidden.detach()[valid].to(dtype), weight.detach()[:vocabulary].to(dtype))
        for hidden, weight in ((student_hidden, student_weight), (teacher_hidden, teacher_weight))
    )
    gradients = None
    if torch.is_grad_enabled() and (student_hidden.requires_grad or student_weight.requires_grad):
        gradients = ProjectionGradients(
            *student, full_vocabulary=student_weight.shape[0], of_projection=student_weight.requires_grad
        )
    with torch.no_grad():
        sums = DistillationSums(*_summed(student, teacher, labels[valid], objective, gradients))
    if gradients is None:
        return sums
    return sums._replace(loss=attach_gradients(sums.loss, student_hidden, student_weight, valid, gradients))


def _summed(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    labels: Tensor,
    objective: _Objective,
    gradients: ProjectionGradients | None,
) -> Tensor:
    """Return the fields of DistillationSums, [5]; student, teacher: rows [n, D] and projection [V, D]."""
    num_rows, vocabulary = student[0].shape[0], student[1].shape[0]
    chunk_rows, block_rows = rows_per_chunk(num_rows, vocabulary), rows_per_block(num_rows, vocabulary)
    buffers = student[0].new_empty(2, chunk_rows, vocabulary)
    workspace = buffers.new_empty(5, block_rows, vocabulary, dtype=statistics_dtype(buffers.dtype))
    sums = workspace.new_zeros(5)
    for chunk in slices(num_rows, chunk_rows):
        z_student, z_teacher = (
            torch.mm(rows[chunk], projection.t(), out=buffer[: chunk.stop - chunk.start])
            for (rows, projection), buffer in zip((student, teacher), buffers, strict=True)
        )
        for block in slices(z_student.shape[0], block_rows):
            logits = _Logits(z_student[block], z_teacher[block])
            sums += _block_sums(logits, labels[chunk][block], objective, workspace, gradients is not None)
        if gradients is not None:
            gradients.add(chunk, z_student)
    return sums


class _Logits(NamedTuple):
    student: Tensor
    teacher: Tensor


class _Distributions(NamedTuple):
    """Of a block, [r, V]."""

    p: Tensor
    q: Tensor
    log_ratio: Tensor
    """log p − log q, finite."""


def _block_sums(
    logits: _Logits, labels: Tensor, objective: _Objective, workspace: Tensor, into_gradient: bool
) -> Tensor:
    """Return the fields of DistillationSums, [5], for a block; on demand turn its student logits into the gradient."""
    kind, temperature, alpha, hard_weight = objective
    p, q, log_ratio, scratch, hard_gradient = workspace[:, : labels.shape[0]]
    for z in logits:
        # A logit of −inf is probability 0; finite, its differences are no NaN.
        z.clamp_(min=max(-1e30, torch.finfo(z.dtype).min))
    labels = labels[:, None]
    student_normalizer = _fill_distributions(logits, 1.0, _Distributions(p, q, log_ratio))
    kl = torch.linalg.vecdot(p, log_ratio).sum()
    total_variation = 0.5 * torch.sub(p, q, out=scratch).abs_().sum()
    cross_entropy = (student_normalizer - logits.student.gather(1, labels)[:, 0]).sum()
    agreement = logits.teacher.gather(1, logits.student.max(-1).indices[:, None])[:, 0] == logits.teacher.amax(-1)
    if into_gradient and hard_weight:
        torch.mul(q, hard_weight, out=hard_gradient)
        hard_gradient.scatter_add_(1, labels, hard_gradient.new_full(labels.shape, -hard_weight))
    if temperature != 1:
        _fill_distributions(logits, temperature, _Distributions(p, q, log_ratio))
    soft, soft_gradient = _divergence(_Distributions(p, q, log_ratio), kind, alpha, scratch)
    if into_gradient:
        soft_gradient.mul_((1 - hard_weight) * temperature)
        logits.student.copy_(soft_gradient.add_(hard_gradient) if hard_weight else soft_gradient)
    loss = (1 - hard_weight) * temperature**2 * soft + hard_weight * cross_entropy
    return torch.stack((loss, kl, cross_entropy, total_variation, agreement.sum().to(p.dtype)))


def _fill_distributions(logits: _Logits, temperature: float, out: _Distributions) -> Tensor:
    """Compute both distributions at a temperature; return the log-normalizer of the student's, [r]."""
    normalizers = []
    for z, probabilities in ((logits.teacher, out.p), (logits.student, out.q)):
        scaled = z if temperature == 1 else out.log_ratio.copy_(z).mul_(1 / temperature)
        torch.softmax(scaled, dim=-1, dtype=probabilities.dtype, out=probabilities)
        normalizers.append(log_normalizer(scaled, probabilities))
    out.log_ratio.copy_(logits.teacher).sub_(logits.student)
    if temperature != 1:
        out.log_ratio.mul_(1 / temperature)
    out.log_ratio.sub_((normalizers[0] - normalizers[1])[:, None])
    return normalizers[1]


def _divergence(
    distributions: _Distributions, kind: DivergenceKind, alpha: float, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the summed divergence and its gradient by the scaled logits z/τ, [r, V], in a buffer of the inputs."""
    p, q, log_ratio = distributions
    if kind == "forward_kl":
        divergence = torch.linalg.vecdot(p, log_ratio).sum()
        return divergence, torch.sub(q, p, out=log_ratio)
    if kind == "reverse_kl":
        slope = log_ratio.neg_()
        divergence = torch.linalg.vecdot(q, slope).sum()
    else:
        divergence, slope = _mixture_divergence(distributions, kind, alpha, scratch)
    return divergence, slope.sub_(torch.linalg.vecdot(q, slope)[:, None]).mul_(q)


def _mixture_divergence(
    distributions: _Distributions, kind: DivergenceKind, alpha: float, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the summed divergence from a mixture m of p and q, and its derivative by q up to a constant a row."""
    p, q, log_ratio = distributions
    weight_p = 1 - alpha if kind == "skewed_reverse_kl" else alpha
    weight_q = 1 - weight_p
    log_weight_p, log_weight_q = (math.log(w) if w else -math.inf for w in (weight_p, weight_q))
    # log q − log m, then log p − log m
    log_q_m = torch.logaddexp(
        torch.add(log_ratio, log_weight_p, out=scratch), scratch.new_tensor(log_weight_q), out=scratch
    )
    log_q_m.neg_()
    log_p_m = log_ratio.add_(log_q_m)
    if kind == "skewed_forward_kl":
        return torch.linalg.vecdot(p, log_p_m).sum(), log_p_m.exp_().mul_(-weight_q)
    reverse = torch.linalg.vecdot(q, log_q_m).sum()
    if kind == "jsd":
        return alpha * torch.linalg.vecdot(p, log_p_m).sum() + weight_q * reverse, log_q_m.mul_(weight_q)
    return reverse, log_q_m.sub_(log_p_m.copy_(log_q_m).exp_().mul_(weight_q))
