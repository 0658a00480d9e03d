"""What the losses on an output projection share: chunks of rows, buffers, and gradients known before backward.

Such a loss walks over the rows in chunks. For each it multiplies logits z = h Wᵀ into a buffer, turns them in place
into the gradient dz of the loss, and adds dh = dz W and dW = dzᵀ h to the sums; all [T, V] logits never exist.

Legend: T tokens, n rows with a label, r rows of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORE_LABEL = -100
"""Rows with this label do not count."""

# A chunk's logits: large enough that the products run at full speed, small beside the weight gradient.
_LOGITS_PER_CHUNK = 2**24
# Elementwise work goes through a chunk in blocks whose few fp32 buffers stay in the cache.
_LOGITS_PER_BLOCK = 2**18
_VOCABULARY_PER_TILE = 4096


def rows_per_chunk(num_rows: int, vocabulary: int) -> int:
    """Return how many of the rows to multiply with a projection at once."""
    return max(1, min(num_rows, _LOGITS_PER_CHUNK // vocabulary))


def rows_per_block(num_rows: int, vocabulary: int) -> int:
    """Return how many of the rows to work on element by element at once."""
    return max(1, min(num_rows, _LOGITS_PER_BLOCK // vocabulary))


def slices(length: int, step: int) -> Iterator[slice]:
    """Cut a range into slices of `step`, the last one shorter."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype to multiply in: autocast's where it is on, else that of the hidden states."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax and sums: fp32, or fp64 for fp64 products."""
    return torch.promote_types(dtype, torch.float32)


def log_normalizer(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Return logsumexp of each row of logits [r, V] from their softmax, which costs two maxima instead of V exps."""
    return logits.amax(-1).to(probabilities.dtype) - probabilities.amax(-1).log_()


class ProjectionGradients:
    """Sums up the gradients of hidden states [n, D] and projection [V, D] (a part of one of `full_vocabulary` rows)."""

    def __init__(self, hidden: Tensor, projection: Tensor, full_vocabulary: int, *, of_projection: bool) -> None:
        self._rows, self._projection = hidden, projection
        self.hidden = torch.empty_like(hidden)
        self.projection: Tensor | None = None
        if of_projection:
            dtype = statistics_dtype(hidden.dtype)
            self.projection = hidden.new_zeros(full_vocabulary, hidden.shape[1], dtype=dtype)
            self._tile = hidden.new_empty(min(_VOCABULARY_PER_TILE, full_vocabulary), hidden.shape[1])

    def add(self, chunk: slice, grad_logits: Tensor) -> None:
        """Add what the gradient [r, V] of a chunk's logits contributes."""
        torch.mm(grad_logits, self._projection, out=self.hidden[chunk])
        if self.projection is None:
            return
        for tile in slices(grad_logits.shape[1], _VOCABULARY_PER_TILE):
            part = torch.mm(grad_logits[:, tile].t(), self._rows[chunk], out=self._tile[: tile.stop - tile.start])
            self.projection[tile] += part


class Gradients(Protocol):
    """Known gradients of hidden states and a projection [V, D]; None where nobody wants one."""

    @property
    def hidden(self) -> Tensor | None: ...
    @property
    def projection(self) -> Tensor | None: ...


def attach_gradients(
    loss: Tensor, hidden: Tensor, projection: Tensor, valid: Tensor | None, gradients: Gradients
) -> Tensor:
    """Return `loss`, whose backward hands out the gradients, known already, to hidden [T, D] and projection [V, D].

    `valid` [n] int64: the rows of `hidden` that `gradients.hidden` belongs to; the others get zero. None: all rows.
    """
    return _KnownGradients.apply(hidden, projection, loss, valid, gradients)


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, projection: Tensor, loss: Tensor, valid: Tensor | None, gradients: Gradients
    ) -> Tensor:
        ctx.gradients, ctx.valid = gradients, valid
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, projection.dtype)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were handed out already: call backward once")
        grad_hidden = gradients.hidden
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(grad_loss).to(ctx.dtypes[0])
            if ctx.valid is not None:
                grad_hidden = grad_hidden.new_zeros(ctx.shape).index_copy_(0, ctx.valid, grad_hidden)
        grad_projection = gradients.projection
        if grad_projection is not None:
            grad_projection = grad_projection.mul_(grad_loss).to(ctx.dtypes[1])
        return grad_hidden, grad_projection, None, None, None
