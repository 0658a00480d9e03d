"""How a model and its objective lie in the processes that train it, as the loop sees it.

    Replicated    every process has them whole: one process alone, or several (train/loop.py)
    Sharded       a group of processes has them once, a part of each matrix in each (train/sharding.py); neighbours may
                  compute a part of each layer (train/parts.py)

Objectives return sums, so what the loop wants of gradients is their sum over all processes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from model.mesh import Mesh, MeshError
from model.routed import routed_layers
from model.trained_split import check_parts
from model.transformer import Transformer
from train.config import TrainingConfig
from train.data import TokenizedDocuments
from train.packing import Batch


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

    def written(self) -> dict[str, str]:
        """The trained parameters of which this process writes its part, and what that is called in a checkpoint."""
        ...

    def part_of(self, batch: Batch) -> Batch:
        """What this process computes of a micro-batch that it has a share in."""
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


def check_processes(
    model: Transformer, data: TokenizedDocuments, config: TrainingConfig, mesh: Mesh, world: int
) -> None:
    """Raises ValueError where so many processes cannot train the model, or there is nothing to train."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("there is nothing to train: every parameter is frozen")
    for name, parameter in trained:
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}; load the model as float32 to train it (the master weights)")
    config.check_shared_by(world, mesh.together)
    check_parts(model, mesh.tensor)
    whole = {"pairs of answers": data.paired, "stored distributions": data.distributions is not None}
    for what, is_there in (whole | {"routers": bool(routed_layers(model))}).items():
        if is_there and mesh.context > 1:
            raise MeshError(f"context parallel (cp_size {mesh.context}) cuts documents, but {what} need whole ones")
        if whole.get(what) and mesh.tensor > 1:
            raise MeshError(f"tensor parallel (tp_size {mesh.tensor}) divides losses, but {what} need whole documents")
