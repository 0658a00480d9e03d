"""`linear_sparse_distillation` without Triton: the logits of a chunk of rows at a time, once.

Each chunk's logits turn in place into their gradient (kernels/losses/_projection.py), to which a row's listed tokens
add a few numbers.

Legend: T tokens, n rows with a label, r rows of a block, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from kernels.common.soft_cap import soft_cap_, soft_cap_slopes
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
from kernels.losses._sparse_targets import Entries, SparseDistillationSums, SparseTargets, bounds_of, entries


def linear_sparse_distillation_cpu(
    hidden: Tensor, weight: Tensor, labels: Tensor, targets: SparseTargets, hard_weight: float, soft_cap: float | None
) -> SparseDistillationSums:
    """`linear_sparse_distillation` of any device and dtype."""
    dtype = product_dtype(hidden)
    valid = (labels != IGNORE_LABEL).nonzero()[:, 0]
    rows, projection = hidden.detach()[valid].to(dtype), weight.detach().to(dtype)
    gradients = None
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        gradients = ProjectionGradients(rows, projection, weight.shape[0], of_projection=weight.requires_grad)
    with torch.no_grad():
        work = _Work(labels, targets, valid, len(weight), hard_weight, soft_cap)
        cross, cross_entropy = work.sums(rows, projection, gradients)
        kl = cross - targets.entropies[valid].sum()
        loss = (1 - hard_weight) * kl + hard_weight * cross_entropy
    if gradients is not None:
        loss = attach_gradients(loss, hidden, weight, valid, gradients)
    return SparseDistillationSums(loss, kl, cross_entropy)


class _Work:
    """What is asked of each of the n rows."""

    def __init__(
        self,
        labels: Tensor,
        targets: SparseTargets,
        valid: Tensor,
        vocabulary: int,
        hard_weight: float,
        soft_cap: float | None,
    ) -> None:
        self.labels, self.hard_weight, self.soft_cap = labels[valid, None], hard_weight, soft_cap
        self.rest = None if targets.rest is None else targets.rest[valid, None]
        numbers = torch.full_like(labels, -1)
        numbers[valid] = torch.arange(len(valid), device=labels.device)
        listed = entries(targets, vocabulary)
        numbers = numbers[listed.rows]
        kept = numbers >= 0
        self.entries = Entries(numbers[kept], listed.ids[kept], listed.weights[kept])
        self.bounds = bounds_of(self.entries.rows, len(valid))

    def sums(self, rows: Tensor, projection: Tensor, gradients: ProjectionGradients | None) -> Tensor:
        """Return KL without the entropy, and cross-entropy, [2], of rows [n, D]; add to the gradients."""
        (num_rows, _), (vocabulary, _) = rows.shape, projection.shape
        chunk_rows, block_rows = rows_per_chunk(num_rows, vocabulary), rows_per_block(num_rows, vocabulary)
        buffer = rows.new_empty(chunk_rows, vocabulary)
        workspace = buffer.new_empty(3, block_rows, vocabulary, dtype=statistics_dtype(buffer.dtype))
        sums = workspace.new_zeros(2)
        for chunk in slices(num_rows, chunk_rows):
            logits = torch.mm(rows[chunk], projection.t(), out=buffer[: chunk.stop - chunk.start])
            for block in slices(len(logits), block_rows):
                own = slice(chunk.start + block.start, chunk.start + block.stop)
                sums += self._block_sums(logits[block], own, workspace, into_gradient=gradients is not None)
            if gradients is not None:
                gradients.add(chunk, logits)
        return sums

    def _block_sums(self, products: Tensor, rows: slice, workspace: Tensor, *, into_gradient: bool) -> Tensor:
        """`sums` of a block; on demand turn what its logits were made of, [r, V], into the gradient of the loss."""
        probabilities, others, of_others = workspace[:, : len(products)]
        labels, listed = self.labels[rows], self.entries.of(self.bounds, rows)
        at, weights = (listed.rows, listed.ids), listed.weights.to(workspace.dtype)
        logits = products if self.soft_cap is None else soft_cap_(products.to(workspace.dtype), self.soft_cap)
        torch.softmax(logits, dim=-1, dtype=probabilities.dtype, out=probabilities)
        normalizer = log_normalizer(logits, probabilities)
        cross = normalizer.sum() - (weights * logits[at]).sum()
        cross_entropy = (normalizer - logits.gather(1, labels)[:, 0]).sum()
        soft = 1 - self.hard_weight
        if into_gradient:
            probabilities.index_put_(at, weights * -soft, accumulate=True)
            probabilities.scatter_add_(1, labels, probabilities.new_full(labels.shape, -self.hard_weight))
        if self.rest is not None:
            rest = self.rest[rows]
            # The least number instead of -inf: where nothing else is left, and no rest, 0 times that is 0.
            others.copy_(logits).index_put_(at, others.new_tensor(torch.finfo(others.dtype).min))
            torch.softmax(others, dim=-1, out=of_others)
            cross -= (rest[:, 0] * log_normalizer(others, of_others)).sum()
            if into_gradient:
                probabilities.addcmul_(of_others, rest, value=-soft)
        if into_gradient:
            if self.soft_cap is not None:
                probabilities.mul_(soft_cap_slopes(logits, self.soft_cap))
            products.copy_(probabilities)
        return torch.stack((cross, cross_entropy))
