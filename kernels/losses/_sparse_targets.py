"""What `linear_sparse_distillation` is given and returns."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseTargets:
    """Distributions of T positions, a few tokens of each."""

    ids: Tensor
    """[E] int64, tokens of all positions one after another."""
    weights: Tensor
    """[E] fp32: their probabilities, which are 1 together with the rest at a position that has any."""
    starts: Tensor
    """[T] int64, where those of a position begin."""
    entropies: Tensor
    """[T] fp32, nats."""
    rest: Tensor | None = None
    """[T] fp32: the probability of all other tokens together, where they have some."""

    def to(self, device: torch.device | str) -> "SparseTargets":
        moved = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return replace(self, **moved)


class SparseDistillationSums(NamedTuple):
    """Sums over the rows whose label is not -100: fp32 scalars, of which only `loss` is differentiable."""

    loss: Tensor
    kl: Tensor
    """KL(teacher ‖ student), nats."""
    cross_entropy: Tensor
    """Of the student, nats."""


class Entries(NamedTuple):
    """The listed tokens of some rows, in the order of these."""

    rows: Tensor
    """[e] int64, ascending."""
    ids: Tensor
    """[e] int64, below V."""
    weights: Tensor
    """[e] fp32"""

    def of(self, bounds: list[int], rows: slice) -> "Entries":
        """Those of a slice of the rows, counted from its first on; `bounds`: as `bounds_of` has them."""
        own = slice(bounds[rows.start], bounds[rows.stop])
        return Entries(self.rows[own] - rows.start, self.ids[own], self.weights[own])


def entries(targets: SparseTargets, vocabulary: int) -> Entries:
    """All entries but tokens that only pad the teacher's vocabulary; rows are the positions."""
    sizes = torch.diff(targets.starts, append=targets.starts.new_tensor([len(targets.ids)]))
    rows = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    known = targets.ids < vocabulary
    return Entries(rows[known], targets.ids[known], targets.weights[known])


def bounds_of(rows: Tensor, num_rows: int) -> list[int]:
    """Where the entries of each of so many rows begin, and where the last ones end; the host waits."""
    return torch.searchsorted(rows, torch.arange(num_rows + 1, device=rows.device)).tolist()
