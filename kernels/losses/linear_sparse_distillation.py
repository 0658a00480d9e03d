"""Output projection and KL from distributions of which a few tokens are listed, as a teacher has left them beside text.

    z = h Wᵀ,   KL(w ‖ q) = Σ_K w log w − Σ_K w z + logsumexp(z)

K are the tokens listed at a position. In place of the first term stands the entropy of the teacher's whole
distribution, so where w was drawn from it, the loss is an unbiased estimate of the dense one, and of one position may
be negative.

Where w leaves a rest r, the loss is the KL over K and one bucket of all other tokens. Its gradient is that of the dense
KL from a teacher which spreads r over them as the student does: the student is left alone where nothing is known. To
the sum comes r log r, in the entropy, and − r log Σ_(not in K) exp z.

Without Triton all of it happens in a chunk's logits (kernels/losses/_linear_sparse_distillation_cpu.py). On a GPU it is
the cross-entropy plus the label's logit less Σ w z, which is a product of the hidden state with rows of W; only under a
soft cap, which is not linear, and for the rest are logits of a few positions multiplied again.

Legend: T tokens, D hidden size, V vocabulary, E listed tokens of all positions, e those of a chunk.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.common.soft_cap import check_soft_cap, soft_capped
from kernels.common.triton_support import runs_triton
from kernels.losses._linear_sparse_distillation_cpu import linear_sparse_distillation_cpu
from kernels.losses._projection import IGNORE_LABEL, rows_per_chunk, slices, statistics_dtype
from kernels.losses._sparse_targets import Entries, SparseDistillationSums, SparseTargets, bounds_of, entries
from kernels.losses.linear_cross_entropy import linear_cross_entropy


def linear_sparse_distillation_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    targets: SparseTargets,
    *,
    hard_weight: float = 0.0,
    soft_cap: float | None = None,
) -> Tensor:
    """The loss of `linear_sparse_distillation` in its plainest form, with all logits at once."""
    logits = soft_capped(hidden @ weight.t(), soft_cap)
    logits = logits.to(statistics_dtype(logits.dtype))
    rows, ids, weights = entries(targets, len(weight))
    w = torch.zeros_like(logits).index_put((rows, ids), weights.to(logits.dtype))
    kl = logits.logsumexp(-1) - (w * logits).sum(-1) - targets.entropies
    if targets.rest is not None:
        others = torch.where(w > 0, -torch.inf, logits).logsumexp(-1)
        kl = kl - torch.where(targets.rest > 0, targets.rest * others, 0.0)
    cross_entropy = F.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum")
    return (1 - hard_weight) * kl[labels != IGNORE_LABEL].sum() + hard_weight * cross_entropy


def linear_sparse_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    targets: SparseTargets,
    *,
    hard_weight: float = 0.0,
    soft_cap: float | None = None,
) -> SparseDistillationSums:
    """Return sums over the rows whose label is not -100, of (1 - hard_weight) KL + hard_weight cross-entropy as a loss.

    hidden [T, D]; weight [V, D]; labels [T] int64; targets of T positions, of which tokens from V on do not count;
    `soft_cap`: what logits tend to, if anything. Differentiable in hidden and weight; backward works once.
    On CUDA hidden and weight are as `linear_cross_entropy` asks; with a soft cap or a rest the host waits for `starts`.
    """
    check_soft_cap(soft_cap)
    if not runs_triton(hidden):
        return linear_sparse_distillation_cpu(hidden, weight, labels, targets, hard_weight, soft_cap)
    cross_entropy = linear_cross_entropy(hidden, weight, labels, soft_cap=soft_cap)
    labelled, logits = labels != IGNORE_LABEL, _Logits(hidden, weight, soft_cap)
    margin = (_margin if soft_cap is None else _capped_margin)(logits, labels, targets)
    kl = cross_entropy + margin - torch.where(labelled, targets.entropies, 0.0).sum()
    if targets.rest is not None:
        kl = kl - _rest_sum(logits, targets, torch.where(labelled, targets.rest, 0.0))
    loss = (1 - hard_weight) * kl + hard_weight * cross_entropy
    return SparseDistillationSums(loss, kl.detach(), cross_entropy.detach())


class _Logits(NamedTuple):
    """What they are made of."""

    hidden: Tensor
    """[T, D]"""
    weight: Tensor
    """[V, D]"""
    soft_cap: float | None


def _margin(logits: _Logits, labels: Tensor, targets: SparseTargets) -> Tensor:
    """Σ of the label's logit over the expected one, where there is a label."""
    hidden, weight, _ = logits
    weights = torch.where(targets.ids < len(weight), targets.weights, 0.0).to(weight.dtype)
    ids = targets.ids.clamp(max=len(weight) - 1)
    expected = F.embedding_bag(ids, weight, targets.starts, mode="sum", per_sample_weights=weights)
    chosen = F.embedding(labels.clamp(min=0), weight)
    return (torch.where((labels != IGNORE_LABEL)[:, None], chosen - expected, 0.0).float() * hidden.float()).sum()


def _capped_margin(logits: _Logits, labels: Tensor, targets: SparseTargets) -> Tensor:
    """The same of logits that are not linear in the weights."""

    def of_chunk(z: Tensor, rows: slice, listed: Entries) -> Tensor:
        own = labels[rows]
        chosen = z.gather(1, own.clamp(min=0)[:, None])[:, 0]
        expected = torch.zeros_like(chosen).index_add(0, listed.rows, listed.weights * z[listed.rows, listed.ids])
        return torch.where(own != IGNORE_LABEL, chosen - expected, 0.0).sum()

    return _sum_over_chunks(logits, targets, of_chunk)


def _rest_sum(logits: _Logits, targets: SparseTargets, rest: Tensor) -> Tensor:
    """Σ r log Σ_(not in K) exp z."""

    def of_chunk(z: Tensor, rows: slice, listed: Entries) -> Tensor:
        others = z.index_put((listed.rows, listed.ids), least)
        return (rest[rows] * others.logsumexp(-1)).sum()

    least = logits.hidden.new_tensor(torch.finfo(torch.float32).min, dtype=torch.float32)
    return _sum_over_chunks(logits, targets, of_chunk)


def _sum_over_chunks(
    logits: _Logits, targets: SparseTargets, part: Callable[[Tensor, slice, Entries], Tensor]
) -> Tensor:
    """Σ of `part` over the positions [T], a few at a time, whose logits, fp32, are computed again backward."""

    def of_chunk(hidden: Tensor, weight: Tensor, rows: slice) -> Tensor:
        z = soft_capped((hidden[rows] @ weight.t()).float(), logits.soft_cap)
        return part(z, rows, listed.of(bounds, rows))

    listed, num_rows = entries(targets, len(logits.weight)), len(targets.starts)
    bounds = bounds_of(listed.rows, num_rows)
    chunks = slices(num_rows, rows_per_chunk(num_rows, len(logits.weight)))
    parts = [checkpoint(of_chunk, logits.hidden, logits.weight, rows, use_reentrant=False) for rows in chunks]
    return torch.stack(cast("list[Tensor]", parts)).sum()
