"""How a model and its objective lie in the processes that train it, as the loop sees it.

    Replicated    every process has them whole: one process alone, or several (train/loop.py)
    Sharded       a group of processes has them once, a part of each matrix in each (train/sharding.py)

Objectives return sums, so what the loop wants of gradients is their sum over all processes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from model.transformer import Transformer


class Trained(Protocol):
    """What an optimizer updates."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


class Parallel(Protocol):
    """What the loop asks."""

    module: nn.Module
    """Model and objective: called with a micro-batch."""
    model: Transformer
    """The one that is called."""
    parts: int
    """Processes that hold the trained weights together."""
    part: int | None
    """This one's among them, from 0; None where another process saves the same."""

    @property
    def trained(self) -> Trained:
        """The part of it that this process updates."""
        ...

    def written(self) -> set[str]:
        """The trained parameters of which this process writes its rows."""
        ...

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch of a step; `last`: no other one follows."""
        ...

    def gradients(self) -> list[Tensor]:
        """Behind the last micro-batch: of what this process updates, divided by `divided_by`."""
        ...

    @property
    def divided_by(self) -> int:
        """By how much `gradients` are less than the sum over all processes."""
        ...

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the gradient of the whole model, which these are parts of."""
        ...

    def clear(self) -> None:
        """Frees the gradients."""
        ...

    def whole(self) -> Transformer | None:
        """The model as its owner gave it, with the weights of the moment; None where this process does not get it.

        All processes call it, and `put_away` before training goes on.
        """
        ...

    def put_away(self) -> None:
        """Frees what `whole` made."""
        ...
