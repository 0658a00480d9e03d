"""Distillation loss of two output projections without Triton: both heads' logits, a chunk of rows at a time.

Each chunk's logits are multiplied into two buffers; the student's turn in place into the gradient
(kernels/losses/_projection.py). Formulas in kernels/losses/linear_distillation.py.

Legend: T tokens, n rows with a label, r rows of a block, Ds and Dt hidden sizes of student and teacher, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.soft_cap import soft_cap_, soft_cap_slopes
from kernels.losses._divergence import NO_CAPS, SHARE_DECAY, DistillationSums, DivergenceKind, Objective, SoftCaps
from kernels.losses._projection import (
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


def linear_distillation_cpu(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    objective: Objective,
    soft_caps: SoftCaps = NO_CAPS,
) -> DistillationSums:
    """`linear_distillation` of any device and dtype."""
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
        sums = DistillationSums(*_summed(student, teacher, labels[valid], objective, gradients, soft_caps))
    if gradients is None:
        return sums
    return sums._replace(loss=attach_gradients(sums.loss, student_hidden, student_weight, valid, gradients))


def _summed(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    labels: Tensor,
    objective: Objective,
    gradients: ProjectionGradients | None,
    soft_caps: SoftCaps,
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
            products = z_student[block], z_teacher[block]
            logits = _Logits(*(_finite_logits(*pair) for pair in zip(products, soft_caps, strict=True)))
            block_sums, gradient = _block_sums(
                logits, labels[chunk][block], objective, workspace, gradients is not None
            )
            sums += block_sums
            if gradient is not None:
                cap = soft_caps[0]
                products[0].copy_(gradient if cap is None else gradient.mul_(soft_cap_slopes(logits.student, cap)))
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


def _finite_logits(products: Tensor, soft_cap: float | None) -> Tensor:
    """Under their cap, and −inf, which is probability 0, as a number whose differences are no NaN."""
    if soft_cap is None:
        return products.clamp_(min=max(-1e30, torch.finfo(products.dtype).min))
    return soft_cap_(products.to(statistics_dtype(products.dtype)), soft_cap)


def _block_sums(
    logits: _Logits, labels: Tensor, objective: Objective, workspace: Tensor, into_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the fields of DistillationSums, [5], for a block; on demand also the gradient of its student's logits."""
    kind, temperature, alpha, hard_weight = objective
    p, q, log_ratio, scratch, hard_gradient = workspace[:, : labels.shape[0]]
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
        if hard_weight:
            soft_gradient.add_(hard_gradient)
    loss = (1 - hard_weight) * temperature**2 * soft + hard_weight * cross_entropy
    sums = torch.stack((loss, kl, cross_entropy, total_variation, agreement.sum().to(p.dtype)))
    return sums, soft_gradient if into_gradient else None


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
    elif kind in ("total_variation", "acceptance"):
        return _variation(distributions, scratch, mixes_kl=kind == "acceptance")
    else:
        divergence, slope = _mixture_divergence(distributions, kind, alpha, scratch)
    return divergence, slope.sub_(torch.linalg.vecdot(q, slope)[:, None]).mul_(q)


def _variation(distributions: _Distributions, scratch: Tensor, *, mixes_kl: bool) -> tuple[Tensor, Tensor]:
    """`_divergence` of total variation, or of that and KL by their shares."""
    p, q, log_ratio = distributions
    variation, kl = 0.5 * torch.sub(q, p, out=scratch).abs().sum(-1), torch.linalg.vecdot(p, log_ratio)
    slope = torch.sign(scratch, out=log_ratio).mul_(0.5)
    gradient = slope.sub_(torch.linalg.vecdot(q, slope)[:, None]).mul_(q)
    if not mixes_kl:
        return variation.sum(), gradient
    share = torch.exp(-SHARE_DECAY * (1 - variation))
    gradient.mul_((1 - share)[:, None]).add_(scratch.mul_(share[:, None]))
    return (share * kl + (1 - share) * variation).sum(), gradient


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
