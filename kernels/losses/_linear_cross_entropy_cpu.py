"""Output projection and cross-entropy in one without Triton: the logits of a chunk of rows at a time.

Each chunk's logits turn in place into their gradient (kernels/losses/_projection.py); backward only scales the sums.

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


def linear_cross_entropy_cpu(hidden: Tensor, weight: Tensor, labels: Tensor, soft_cap: float | None = None) -> Tensor:
    """`linear_cross_entropy` of any device and dtype."""
    dtype = product_dtype(hidden)
    valid = (labels != IGNORE_LABEL).nonzero()[:, 0]
    rows, projection = hidden.detach()[valid].to(dtype), weight.detach().to(dtype)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    gradients = None
    if wanted:
        gradients = ProjectionGradients(rows, projection, weight.shape[0], of_projection=weight.requires_grad)
    with torch.no_grad():
        loss = _summed_loss(rows, projection, labels[valid], gradients, soft_cap)
    return loss if gradients is None else attach_gradients(loss, hidden, weight, valid, gradients)


def _summed_loss(
    rows: Tensor, projection: Tensor, labels: Tensor, gradients: ProjectionGradients | None, soft_cap: float | None
) -> Tensor:
    """Return the loss of rows [n, D], all with a label; add to the gradients."""
    (num_rows, _), (vocabulary, _) = rows.shape, projection.shape
    chunk_rows, block_rows = rows_per_chunk(num_rows, vocabulary), rows_per_block(num_rows, vocabulary)
    buffer = rows.new_empty(chunk_rows, vocabulary)
    probabilities = rows.new_empty(block_rows, vocabulary, dtype=statistics_dtype(rows.dtype))
    loss = probabilities.new_zeros(())
    for chunk in slices(num_rows, chunk_rows):
        logits = torch.mm(rows[chunk], projection.t(), out=buffer[: chunk.stop - chunk.start])
        for block in slices(logits.shape[0], block_rows):
            loss += _block_loss(logits[block], labels[chunk][block], probabilities, gradients is not None, soft_cap)
        if gradients is not None:
            gradients.add(chunk, logits)
    return loss


def _block_loss(
    products: Tensor, labels: Tensor, buffer: Tensor, into_gradient: bool, soft_cap: float | None
) -> Tensor:
    """Return the summed loss of a block; on demand turn what it was made of, [r, V], into the gradient."""
    logits = products if soft_cap is None else soft_cap_(products.to(buffer.dtype), soft_cap)
    probabilities = torch.softmax(logits, dim=-1, dtype=buffer.dtype, out=buffer[: logits.shape[0]])
    labels = labels[:, None]
    loss = (log_normalizer(logits, probabilities) - logits.gather(1, labels)[:, 0]).sum()
    if into_gradient:
        probabilities.scatter_add_(1, labels, probabilities.new_full(labels.shape, -1))
        if soft_cap is not None:
            probabilities.mul_(soft_cap_slopes(logits, soft_cap))
        products.copy_(probabilities)
    return loss
