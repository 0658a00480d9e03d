"""Distillation loss of two output projections, without ever holding all logits.

p is the teacher's distribution and q the student's, both at temperature τ; z are the student's logits:

    kind                   D                                                          m
    forward_kl             KL(p ‖ q)
    reverse_kl             KL(q ‖ p)
    jsd                    α KL(p ‖ m) + (1 − α) KL(q ‖ m)                            α p + (1 − α) q
    skewed_forward_kl      KL(p ‖ m)                                                  α p + (1 − α) q
    skewed_reverse_kl      KL(q ‖ m)                                                  (1 − α) p + α q
    total_variation        TV = ½ Σ |p − q|
    acceptance             λ KL(p ‖ q) + (1 − λ) TV, λ = exp(−3 (1 − TV)) a constant

    loss = (1 − hard_weight) τ² D + hard_weight · cross-entropy

jsd with α = 0 is forward_kl and with α = 1 reverse_kl: both are its limits after division by α or 1 − α.
τ² keeps the gradient's size when τ changes: it is τ (q − p) for forward_kl. For the others it is
τ q ∘ (g − Σ q g) with g = ∂D/∂q, which for TV is ½ sign(q − p). 1 − TV is the rate at which a draft's tokens are
accepted; where it is low, its gradient is small, and KL leads. Everything follows from p, q and the log-ratio
log p − log q:
log m − log q = logaddexp(log-ratio + ln(weight of p), ln(weight of q)).
Under a soft cap z is c · tanh(h Wᵀ / c), and dz is multiplied with the slope of that (kernels/common/soft_cap.py).
On a GPU one walk over the vocabulary finds the normalizers, one the divergence and dz
(kernels/losses/_streamed_projection.py); Σ q g of a mixture and of TV needs one more before that.
Sources: https://arxiv.org/abs/1503.02531 (τ²), https://arxiv.org/abs/2306.13649 (jsd),
https://arxiv.org/abs/2402.03898 (skewed), https://arxiv.org/abs/2310.08461 (TV of drafts),
https://github.com/sgl-project/SpecForge (λ).

Legend: T tokens, Ds and Dt hidden sizes of student and teacher, V vocabulary; in a program a tile of ROWS x COLUMNS
logits of each.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.soft_cap import check_soft_cap, soft_cap_slopes_tile, soft_capped
from kernels.common.triton import tl, triton
from kernels.common.triton_support import in_fp32, runs_triton
from kernels.losses._divergence import (
    NO_CAPS,
    SHARE_DECAY,
    DistillationSums,
    DivergenceKind,
    Objective,
    SoftCaps,
    make_objective,
)
from kernels.losses._linear_distillation_cpu import linear_distillation_cpu
from kernels.losses._projection import IGNORE_LABEL, attach_gradients, product_dtype, statistics_dtype
from kernels.losses._streamed_projection import (
    GradientSums,
    Source,
    gradient_windows,
    logits_tile,
    make_head,
    plan_walk,
    program_tiles,
    rescaled_sum,
    sources,
    wants_gradients,
)

__all__ = ["DistillationSums", "DivergenceKind", "linear_distillation", "linear_distillation_reference"]


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
    if kind in ("total_variation", "acceptance"):
        variation = 0.5 * (p - q).abs().sum(-1)
        if kind == "total_variation":
            return variation.sum()
        share = torch.exp(-SHARE_DECAY * (1 - variation.detach()))
        return (share * (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1) + (1 - share) * variation).sum()
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
    soft_caps: SoftCaps = NO_CAPS,
) -> DistillationSums:
    """`linear_distillation` in its plainest form, with all logits at once."""
    kind, temperature, alpha, hard_weight = make_objective(kind, temperature, alpha, hard_weight)
    valid = labels != IGNORE_LABEL
    vocabulary = min(student_weight.shape[0], teacher_weight.shape[0])
    student = student_hidden[valid] @ student_weight[:vocabulary].t()
    teacher = (teacher_hidden[valid] @ teacher_weight[:vocabulary].t()).detach()
    student, teacher = (
        soft_capped(logits.to(statistics_dtype(logits.dtype)), cap)
        for logits, cap in zip((student, teacher), soft_caps, strict=True)
    )
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


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "tiles_per_range"])
def _statistics_kernel(
    p_student, p_student_weight, p_teacher, p_teacher_weight, p_labels, p_statistics,
    num_rows, vocabulary, num_tiles, tiles_per_range, student_row, student_weight_row, teacher_row, teacher_weight_row,
    inverse_temperature, least,
    KIND: tl.constexpr, DS: tl.constexpr, DT: tl.constexpr, TEMPERED: tl.constexpr,
    STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """What a range of the vocabulary contributes to each row, [ranges, 9, T]: maxima of the logits of student and
    teacher, sums of exponentials, the same tempered, Σ exp(z/τ) (z − teacher's z) for reverse_kl, the label's logit,
    and the teacher's logit where the student's is largest.
    """
    row_tile, part = program_tiles(num_rows, tl.cdiv(num_tiles, tiles_per_range), ROWS, GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    m_rows = rows < num_rows
    b_labels = tl.load(p_labels + rows, mask=m_rows, other=-100)
    inverse_temperature = in_fp32(inverse_temperature)
    b_max_s = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    b_max_t = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    b_zero = tl.zeros([ROWS], dtype=tl.float32)
    b_sum_s, b_sum_t, b_tempered_s, b_tempered_t = b_zero, b_zero, b_zero, b_zero
    b_chosen, b_slope, b_teacher_at = b_zero, b_zero, b_max_t
    first = part * tiles_per_range
    for tile in range(first, tl.minimum(first + tiles_per_range, num_tiles)):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        b_s = logits_tile(
            p_student, p_student_weight, rows, columns, num_rows, vocabulary, student_row, student_weight_row, least,
            DS, DEPTH, INTERPRETED, STUDENT_CAP,
        )  # fmt: skip
        b_t = logits_tile(
            p_teacher, p_teacher_weight, rows, columns, num_rows, vocabulary, teacher_row, teacher_weight_row, least,
            DT, DEPTH, INTERPRETED, TEACHER_CAP,
        )  # fmt: skip
        b_tile_max = tl.max(b_s, axis=1)
        b_at = tl.max(tl.where(b_s == b_tile_max[:, None], b_t, float("-inf")), axis=1)
        b_at = tl.where(b_tile_max == b_max_s, tl.maximum(b_at, b_teacher_at), b_at)
        b_teacher_at = tl.where(b_tile_max >= b_max_s, b_at, b_teacher_at)
        b_new_s = tl.maximum(b_max_s, b_tile_max)
        b_new_t = tl.maximum(b_max_t, tl.max(b_t, axis=1))
        b_sum_s = rescaled_sum(b_s, b_max_s, b_new_s, b_sum_s, 1.0)
        b_sum_t = rescaled_sum(b_t, b_max_t, b_new_t, b_sum_t, 1.0)
        if TEMPERED:
            b_tempered_s = rescaled_sum(b_s, b_max_s, b_new_s, b_tempered_s, inverse_temperature)
            b_tempered_t = rescaled_sum(b_t, b_max_t, b_new_t, b_tempered_t, inverse_temperature)
        if KIND == "reverse_kl":
            b_slopes = tl.exp((b_s - b_new_s[:, None]) * inverse_temperature) * (b_s - b_t)
            b_slope = b_slope * tl.exp((b_max_s - b_new_s) * inverse_temperature) + tl.sum(b_slopes, axis=1)
        b_max_s, b_max_t = b_new_s, b_new_t
        b_chosen += tl.sum(tl.where(columns[None, :] == b_labels[:, None], b_s, 0.0), axis=1)
    p_statistics += part.to(tl.int64) * 9 * num_rows + rows
    tl.store(p_statistics, b_max_s, mask=m_rows)
    tl.store(p_statistics + num_rows, b_max_t, mask=m_rows)
    tl.store(p_statistics + 2 * num_rows, b_sum_s, mask=m_rows)
    tl.store(p_statistics + 3 * num_rows, b_sum_t, mask=m_rows)
    tl.store(p_statistics + 4 * num_rows, b_tempered_s if TEMPERED else b_sum_s, mask=m_rows)
    tl.store(p_statistics + 5 * num_rows, b_tempered_t if TEMPERED else b_sum_t, mask=m_rows)
    tl.store(p_statistics + 6 * num_rows, b_slope, mask=m_rows)
    tl.store(p_statistics + 7 * num_rows, b_chosen, mask=m_rows)
    tl.store(p_statistics + 8 * num_rows, b_teacher_at, mask=m_rows)


@triton.jit
def _divergence_tile(
    b_p, b_q, b_log_ratio, b_share, alpha, log_weight_p, log_weight_q, weight_q, KIND: tl.constexpr
):  # fmt: skip
    """Each token's part of the divergence, and the divergence's derivative by q up to a constant a row; without that
    of the share of KL in `acceptance`.
    """
    if KIND == "forward_kl":
        b_divergence, b_slope = b_p * b_log_ratio, b_log_ratio
    elif KIND == "reverse_kl":
        b_divergence, b_slope = -b_q * b_log_ratio, -b_log_ratio
    elif KIND == "total_variation" or KIND == "acceptance":
        b_divergence = 0.5 * tl.abs(b_p - b_q)
        b_slope = tl.where(b_q > b_p, 0.5, tl.where(b_q < b_p, -0.5, 0.0))
        if KIND == "acceptance":
            b_divergence = b_share * b_p * b_log_ratio + (1.0 - b_share) * b_divergence
            b_slope = (1.0 - b_share) * b_slope
    else:
        b_log_p = b_log_ratio + log_weight_p
        b_top = tl.maximum(b_log_p, log_weight_q)
        # log q − log m, then log p − log m
        b_log_q_m = -b_top - tl.log(tl.exp(b_log_p - b_top) + tl.exp(log_weight_q - b_top))
        b_log_p_m = b_log_ratio + b_log_q_m
        if KIND == "skewed_forward_kl":
            b_divergence, b_slope = b_p * b_log_p_m, -weight_q * tl.exp(b_log_p_m)
        elif KIND == "skewed_reverse_kl":
            b_divergence, b_slope = b_q * b_log_q_m, b_log_q_m - weight_q * tl.exp(b_log_q_m)
        else:
            b_divergence, b_slope = alpha * b_p * b_log_p_m + weight_q * b_q * b_log_q_m, weight_q * b_log_q_m
    return b_divergence, b_slope


@triton.jit(do_not_specialize=["num_rows", "first_tile", "num_tiles", "tiles_per_range"])
def _divergence_kernel(
    p_student, p_student_weight, p_teacher, p_teacher_weight, p_labels, p_normalizers, p_sums, p_gradient,
    num_rows, vocabulary, first_tile, num_tiles, tiles_per_range,
    student_row, student_weight_row, teacher_row, teacher_weight_row, gradient_row,
    inverse_temperature, least, alpha, log_weight_p, log_weight_q, weight_q, soft_scale, hard_scale,
    KIND: tl.constexpr, DS: tl.constexpr, DT: tl.constexpr, TEMPERED: tl.constexpr,
    STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store in p_sums [ranges, 4, T] what a range of a window of the vocabulary contributes to KL and total variation
    at temperature 1, to the divergence and to Σ q g; and dz of the range, unless p_gradient is None.

    p_normalizers [6, T]: log-normalizers of student and teacher at temperature 1, then tempered, then Σ q g, then λ.
    """
    row_tile, part = program_tiles(num_rows, tl.cdiv(num_tiles, tiles_per_range), ROWS, GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    m_rows = rows < num_rows
    b_labels = tl.load(p_labels + rows, mask=m_rows, other=-100)[:, None]
    inverse_temperature, alpha = in_fp32(inverse_temperature), in_fp32(alpha)
    log_weight_p, log_weight_q, weight_q = in_fp32(log_weight_p), in_fp32(log_weight_q), in_fp32(weight_q)
    soft_scale, hard_scale = in_fp32(soft_scale), in_fp32(hard_scale)
    p_normalizers += rows
    b_norm_s = tl.load(p_normalizers, mask=m_rows, other=0.0)[:, None]
    b_norm_t = tl.load(p_normalizers + num_rows, mask=m_rows, other=0.0)[:, None]
    b_tempered_s = tl.load(p_normalizers + 2 * num_rows, mask=m_rows, other=0.0)[:, None]
    b_tempered_t = tl.load(p_normalizers + 3 * num_rows, mask=m_rows, other=0.0)[:, None]
    b_mean = tl.load(p_normalizers + 4 * num_rows, mask=m_rows, other=0.0)[:, None]
    b_share = tl.load(p_normalizers + 5 * num_rows, mask=m_rows, other=0.0)[:, None]
    p_sums += part.to(tl.int64) * 4 * num_rows + rows
    b_zero = tl.zeros([ROWS], dtype=tl.float32)
    b_kl, b_variation, b_divergence, b_new_mean = b_zero, b_zero, b_zero, b_zero
    first = part * tiles_per_range
    for tile in range(first, tl.minimum(first + tiles_per_range, num_tiles)):
        offsets = tile * COLUMNS + tl.arange(0, COLUMNS)
        columns = first_tile * COLUMNS + offsets
        b_s = logits_tile(
            p_student, p_student_weight, rows, columns, num_rows, vocabulary, student_row, student_weight_row, least,
            DS, DEPTH, INTERPRETED, STUDENT_CAP,
        )  # fmt: skip
        b_t = logits_tile(
            p_teacher, p_teacher_weight, rows, columns, num_rows, vocabulary, teacher_row, teacher_weight_row, least,
            DT, DEPTH, INTERPRETED, TEACHER_CAP,
        )  # fmt: skip
        b_q, b_p = tl.exp(b_s - b_norm_s), tl.exp(b_t - b_norm_t)
        b_log_ratio = (b_t - b_s) - (b_norm_t - b_norm_s)
        b_kl += tl.sum(b_p * b_log_ratio, axis=1)
        b_variation += 0.5 * tl.sum(tl.abs(b_p - b_q), axis=1)
        b_hard = hard_scale * (b_q - tl.where(columns[None, :] == b_labels, 1.0, 0.0))
        if TEMPERED:
            b_q = tl.exp(b_s * inverse_temperature - b_tempered_s)
            b_p = tl.exp(b_t * inverse_temperature - b_tempered_t)
            b_log_ratio = (b_t - b_s) * inverse_temperature - (b_tempered_t - b_tempered_s)
        b_parts, b_slope = _divergence_tile(
            b_p, b_q, b_log_ratio, b_share, alpha, log_weight_p, log_weight_q, weight_q, KIND=KIND
        )
        b_divergence += tl.sum(b_parts, axis=1)
        b_new_mean += tl.sum(b_q * b_slope, axis=1)
        if p_gradient is not None:
            b_soft = b_q - b_p if KIND == "forward_kl" else (b_slope - b_mean) * b_q
            if KIND == "acceptance":
                b_soft += b_share * (b_q - b_p)
            b_gradient = soft_scale * b_soft + b_hard
            if STUDENT_CAP is not None:
                b_gradient *= soft_cap_slopes_tile(b_s, STUDENT_CAP)
            b_gradient = tl.where(b_labels != -100, b_gradient, 0.0)
            o_gradient = rows.to(tl.int64)[:, None] * gradient_row + offsets[None, :]
            mask = m_rows[:, None] & (columns < vocabulary)[None, :]
            tl.store(p_gradient + o_gradient, b_gradient.to(p_gradient.dtype.element_ty), mask=mask)
    tl.store(p_sums, b_kl, mask=m_rows)
    tl.store(p_sums + num_rows, b_variation, mask=m_rows)
    tl.store(p_sums + 2 * num_rows, b_divergence, mask=m_rows)
    tl.store(p_sums + 3 * num_rows, b_new_mean, mask=m_rows)


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
    soft_caps: SoftCaps = NO_CAPS,
) -> DistillationSums:
    """Return the distillation loss and metrics, summed over the rows whose label is not -100.

    student_hidden [T, Ds]; student_weight [V, Ds]; teacher_hidden [T, Dt]; teacher_weight [V', Dt]; labels [T] int64.
    `soft_caps`: what logits of student and teacher tend to, if anything.
    Where V ≠ V', tokens from min(V, V') on (padding of the vocabulary) have no probability in either model.
    The loss is differentiable in the student's tensors, once; the teacher never receives a gradient.
    Raises ValueError for an unknown kind, a temperature ≤ 0, or alpha or hard_weight outside of [0, 1]. On CUDA the
    floating-point inputs are fp32, bf16 or fp16 and contiguous in the last dimension, or this raises ValueError too; a
    label outside of the vocabulary makes the loss NaN.
    """
    objective = make_objective(kind, temperature, alpha, hard_weight)
    for cap in soft_caps:
        check_soft_cap(cap)
    if not runs_triton(student_hidden):
        return linear_distillation_cpu(
            student_hidden, student_weight, teacher_hidden, teacher_weight, labels, objective, soft_caps
        )
    labels, dtype = labels.contiguous(), product_dtype(student_hidden)
    vocabulary = min(len(student_weight), len(teacher_weight))
    heads = [
        make_head(hidden, weight, labels, vocabulary=vocabulary, dtype=dtype, soft_cap=cap)
        for hidden, weight, cap in zip(
            (student_hidden, teacher_hidden), (student_weight, teacher_weight), soft_caps, strict=True
        )
    ]
    gradients = None
    if wants_gradients(student_hidden, student_weight):
        gradients = GradientSums(heads[0], student_hidden, student_weight)
    sums = torch.zeros(5, dtype=torch.float32, device=labels.device)
    for chunk, (student, teacher) in sources(heads, trains=gradients is not None):
        sums += _Walks(student, teacher, labels[chunk], objective).sums(chunk, gradients)
    results = DistillationSums(*sums)
    if gradients is None:
        return results
    return results._replace(loss=attach_gradients(results.loss, student_hidden, student_weight, None, gradients))


class _Rows(NamedTuple):
    """What the first walk finds out about each row."""

    normalizers: Tensor
    """[6, T]: log-normalizers of student and teacher at temperature 1, then tempered, then Σ q g and λ if known."""
    cross_entropy: Tensor
    agreement: Tensor


class _Walks(NamedTuple):
    """Over the vocabulary, for a chunk of rows: launches of the kernels, and what follows from the ranges' results."""

    student: Source
    teacher: Source
    labels: Tensor
    objective: Objective

    def sums(self, chunk: slice, gradients: GradientSums | None) -> Tensor:
        """Return the fields of DistillationSums, [5]; add to the gradients."""
        rows, kind = self._statistics(), self.objective.kind
        if kind == "acceptance":
            variation = self._replace(objective=self.objective._replace(kind="total_variation"))
            found = variation._walk(rows.normalizers)
            rows.normalizers[5] = torch.exp(-SHARE_DECAY * (1 - found[2]))
            rows.normalizers[4] = (1 - rows.normalizers[5]) * found[3]
        if gradients is None:
            return self._results(rows, self._walk(rows.normalizers))
        if kind not in ("forward_kl", "reverse_kl", "acceptance"):
            rows.normalizers[4] = self._walk(rows.normalizers)[3]
        sums = rows.normalizers.new_zeros(4, len(self.labels))
        for window, grad_logits in gradient_windows(self.student):
            sums += self._walk(rows.normalizers, window, grad_logits)
            gradients.add(chunk, window, grad_logits)
        return self._results(rows, sums)

    def _statistics(self) -> _Rows:
        plan, temperature = plan_walk(self.student), self.objective.temperature
        found = torch.empty(plan.num_ranges, 9, len(self.labels), dtype=torch.float32, device=self.labels.device)
        _statistics_kernel[(plan.num_programs,)](
            *self._inputs(), found, len(self.labels), self.student.vocabulary, plan.num_tiles, plan.tiles_per_range,
            *self.student.strides, *self.teacher.strides, 1 / temperature, self.student.least_logit,
            **self._options(),
        )  # fmt: skip
        max_s, max_t, sum_s, sum_t, tempered_s, tempered_t, slope, chosen, teacher_at = found.unbind(1)
        top_s, top_t = max_s.amax(0), max_t.amax(0)
        weight_s, weight_t = torch.exp((max_s - top_s) / temperature), torch.exp((max_t - top_t) / temperature)
        normalizers = torch.stack(
            (
                top_s + (sum_s * torch.exp(max_s - top_s)).sum(0).log(),
                top_t + (sum_t * torch.exp(max_t - top_t)).sum(0).log(),
                top_s / temperature + (tempered_s * weight_s).sum(0).log(),
                top_t / temperature + (tempered_t * weight_t).sum(0).log(),
                (slope * weight_s).sum(0) / (tempered_s * weight_s).sum(0) / temperature,
                torch.zeros_like(top_s),
            )
        )
        normalizers[4] += normalizers[3] - normalizers[2]
        in_vocabulary = (self.labels >= 0) & (self.labels < self.student.vocabulary)
        return _Rows(
            normalizers,
            cross_entropy=torch.where(in_vocabulary, normalizers[0] - chosen.sum(0), torch.nan),
            agreement=torch.where(max_s == top_s, teacher_at, -torch.inf).amax(0) == top_t,
        )

    def _walk(self, normalizers: Tensor, window: slice | None = None, grad_logits: Tensor | None = None) -> Tensor:
        """Return KL and total variation at temperature 1, divergence and Σ q g of a window, [4, R]; store its dz."""
        kind, temperature, alpha, hard_weight = self.objective
        weight_p = 1 - alpha if kind == "skewed_reverse_kl" else alpha
        log_weights = (math.log(weight) if weight else -math.inf for weight in (weight_p, 1 - weight_p))
        plan = plan_walk(self.student, window)
        sums = torch.empty(plan.num_ranges, 4, len(self.labels), dtype=torch.float32, device=self.labels.device)
        _divergence_kernel[(plan.num_programs,)](
            *self._inputs(), normalizers, sums, grad_logits,
            len(self.labels), self.student.vocabulary, plan.first_tile, plan.num_tiles, plan.tiles_per_range,
            *self.student.strides, *self.teacher.strides, 0 if grad_logits is None else grad_logits.stride(0),
            1 / temperature, self.student.least_logit,
            alpha, *log_weights, 1 - weight_p, (1 - hard_weight) * temperature, hard_weight,
            **self._options(),
        )  # fmt: skip
        return sums.sum(0)

    def _results(self, rows: _Rows, sums: Tensor) -> Tensor:
        temperature, hard_weight = self.objective.temperature, self.objective.hard_weight
        kl, total_variation, divergence, _ = sums
        loss = (1 - hard_weight) * temperature**2 * divergence
        if hard_weight:
            loss = loss + hard_weight * rows.cross_entropy
        values = torch.stack((loss, kl, rows.cross_entropy, total_variation, rows.agreement.to(kl.dtype)))
        return torch.where(self.labels != IGNORE_LABEL, values, 0).sum(1)

    def _inputs(self) -> tuple[Tensor | None, ...]:
        return self.student.rows, self.student.weight, self.teacher.rows, self.teacher.weight, self.labels

    def _options(self) -> dict[str, Any]:
        sizes = {"DS": self.student.hidden_size, "DT": self.teacher.hidden_size}
        caps = {"STUDENT_CAP": self.student.soft_cap, "TEACHER_CAP": self.teacher.soft_cap}
        return {
            "KIND": self.objective.kind,
            "TEMPERED": self.objective.temperature != 1,
            **sizes,
            **caps,
            **self.student.options,
        }
