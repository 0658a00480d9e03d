"""Output projection and cross-entropy in one, without ever holding all logits.

    z = h Wᵀ,   loss = Σ_rows (logsumexp(z) − z[label])
    dz = softmax(z) − onehot(label),   dh = dz W,   dW = dzᵀ h

The gradients are known as soon as the normalizers are, so forward computes them and backward only scales them.
Under a soft cap z is c · tanh(h Wᵀ / c), and dz is multiplied with the slope of that (kernels/common/soft_cap.py).
Products run in the dtype of the hidden states or of autocast, softmax and sums in fp32. On a GPU there are two walks
over the vocabulary (kernels/losses/_streamed_projection.py): one for the normalizers, one for dz.

Legend: T tokens, D hidden size, V vocabulary; in a program a tile of ROWS x COLUMNS logits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.soft_cap import check_soft_cap, soft_cap_slopes_tile, soft_capped
from kernels.common.triton import tl, triton
from kernels.common.triton_support import runs_triton
from kernels.losses._linear_cross_entropy_cpu import linear_cross_entropy_cpu
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


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, soft_cap: float | None = None
) -> Tensor:
    """`linear_cross_entropy` in its plainest form, with all logits at once."""
    logits = soft_capped(hidden @ weight.t(), soft_cap)
    return F.cross_entropy(
        logits.to(statistics_dtype(logits.dtype)), labels, ignore_index=IGNORE_LABEL, reduction="sum"
    )


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "tiles_per_range"])
def _statistics_kernel(
    p_hidden, p_weight, p_labels, p_statistics, num_rows, vocabulary, num_tiles, tiles_per_range,
    hidden_row, weight_row, least,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Of a range of the vocabulary, per row: maximum, sum of exponentials, the label's logit; [ranges, 3, T]."""
    row_tile, part = program_tiles(num_rows, tl.cdiv(num_tiles, tiles_per_range), ROWS, GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    m_rows = rows < num_rows
    b_labels = tl.load(p_labels + rows, mask=m_rows, other=-100)
    b_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([ROWS], dtype=tl.float32)
    b_chosen = tl.zeros([ROWS], dtype=tl.float32)
    first = part * tiles_per_range
    for tile in range(first, tl.minimum(first + tiles_per_range, num_tiles)):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        b_logits = logits_tile(
            p_hidden, p_weight, rows, columns, num_rows, vocabulary, hidden_row, weight_row, least,
            D, DEPTH, INTERPRETED, CAP,
        )  # fmt: skip
        b_new_max = tl.maximum(b_max, tl.max(b_logits, axis=1))
        b_sum = rescaled_sum(b_logits, b_max, b_new_max, b_sum, 1.0)
        b_max = b_new_max
        b_chosen += tl.sum(tl.where(columns[None, :] == b_labels[:, None], b_logits, 0.0), axis=1)
    p_statistics += part.to(tl.int64) * 3 * num_rows + rows
    tl.store(p_statistics, b_max, mask=m_rows)
    tl.store(p_statistics + num_rows, b_sum, mask=m_rows)
    tl.store(p_statistics + 2 * num_rows, b_chosen, mask=m_rows)


@triton.jit(do_not_specialize=["num_rows", "first_tile", "num_tiles", "tiles_per_range"])
def _gradient_kernel(
    p_hidden, p_weight, p_labels, p_normalizer, p_gradient,
    num_rows, vocabulary, first_tile, num_tiles, tiles_per_range, hidden_row, weight_row, gradient_row, least,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dz of a range of a window of the vocabulary that starts at `first_tile`; it may replace the logits."""
    row_tile, part = program_tiles(num_rows, tl.cdiv(num_tiles, tiles_per_range), ROWS, GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    m_rows = rows < num_rows
    b_labels = tl.load(p_labels + rows, mask=m_rows, other=-100)[:, None]
    b_normalizer = tl.load(p_normalizer + rows, mask=m_rows, other=0.0)[:, None]
    p_gradient += rows.to(tl.int64)[:, None] * gradient_row
    first = part * tiles_per_range
    for tile in range(first, tl.minimum(first + tiles_per_range, num_tiles)):
        offsets = tile * COLUMNS + tl.arange(0, COLUMNS)
        columns = first_tile * COLUMNS + offsets
        b_logits = logits_tile(
            p_hidden, p_weight, rows, columns, num_rows, vocabulary, hidden_row, weight_row, least,
            D, DEPTH, INTERPRETED, CAP,
        )  # fmt: skip
        b_gradient = tl.exp(b_logits - b_normalizer) - tl.where(columns[None, :] == b_labels, 1.0, 0.0)
        if CAP is not None:
            b_gradient *= soft_cap_slopes_tile(b_logits, CAP)
        b_gradient = tl.where(b_labels != -100, b_gradient, 0.0).to(p_gradient.dtype.element_ty)
        tl.store(p_gradient + offsets[None, :], b_gradient, mask=m_rows[:, None] & (columns < vocabulary)[None, :])


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, soft_cap: float | None = None) -> Tensor:
    """Return the summed cross-entropy, in nats, of the rows whose label is not -100: an fp32 scalar.

    hidden [T, D]; weight [V, D]; labels [T] int64; `soft_cap`: what logits tend to, if anything. Differentiable in
    hidden and weight; backward works once.
    On CUDA hidden and weight are fp32, bf16 or fp16 and contiguous in the last dimension, or this raises ValueError;
    a label outside of the vocabulary makes the result NaN.
    """
    check_soft_cap(soft_cap)
    if not runs_triton(hidden):
        return linear_cross_entropy_cpu(hidden, weight, labels, soft_cap)
    labels = labels.contiguous()
    vocabulary, dtype = len(weight), product_dtype(hidden)
    head = make_head(hidden, weight, labels, vocabulary=vocabulary, dtype=dtype, soft_cap=soft_cap)
    gradients = GradientSums(head, hidden, weight) if wants_gradients(hidden, weight) else None
    loss = torch.zeros((), dtype=torch.float32, device=labels.device)
    for chunk, (source,) in sources((head,), trains=gradients is not None):
        normalizer, chunk_loss = _normalizer_and_loss(source, labels[chunk])
        loss += chunk_loss
        if gradients is not None:
            for window, grad_logits in gradient_windows(source):
                _store_gradient(source, labels[chunk], normalizer, window, grad_logits)
                gradients.add(chunk, window, grad_logits)
    return loss if gradients is None else attach_gradients(loss, hidden, weight, None, gradients)


def _normalizer_and_loss(source: Source, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-normalizer of each row of a chunk, [R], and the summed loss."""
    plan = plan_walk(source)
    statistics = torch.empty(plan.num_ranges, 3, len(labels), dtype=torch.float32, device=labels.device)
    _statistics_kernel[(plan.num_programs,)](
        source.rows, source.weight, labels, statistics,
        len(labels), source.vocabulary, plan.num_tiles, plan.tiles_per_range, *source.strides, source.least_logit,
        D=source.hidden_size, CAP=source.soft_cap, **source.options,
    )  # fmt: skip
    maxima, sums, chosen = statistics.unbind(1)
    maximum = maxima.amax(0)
    normalizer = maximum + (sums * torch.exp(maxima - maximum)).sum(0).log()
    in_vocabulary = (labels >= 0) & (labels < source.vocabulary)
    losses = torch.where(in_vocabulary, normalizer - chosen.sum(0), torch.nan)
    return normalizer, torch.where(labels != IGNORE_LABEL, losses, 0).sum()


def _store_gradient(source: Source, labels: Tensor, normalizer: Tensor, window: slice, grad_logits: Tensor) -> None:
    plan = plan_walk(source, window)
    _gradient_kernel[(plan.num_programs,)](
        source.rows, source.weight, labels, normalizer, grad_logits,
        len(labels), source.vocabulary, plan.first_tile, plan.num_tiles, plan.tiles_per_range,
        *source.strides, grad_logits.stride(0), source.least_logit,
        D=source.hidden_size, CAP=source.soft_cap, **source.options,
    )  # fmt: skip
