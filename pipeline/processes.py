"""One process or several that run the same recipe: who writes, and how all of them go the same way.

Under `accelerate launch` or `torchrun` every process runs the whole recipe. The main one measures, publishes and
decides; the others train with it and wait for it otherwise. They share the run folder through the file system.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from model.mesh import MeshError, this_rank, training_mesh
from pipeline.schema import Recipe
from train.config import TrainingConfig


def check_mesh(recipe: Recipe) -> None:
    """Raises MeshError where the stages that train cannot share the processes that run, before anything is done."""
    for stage in recipe.plan():
        if not isinstance(stage.config, TrainingConfig) or not stage.config.tokens:
            continue
        try:
            stage.config.check_shared_by(this_rank().count, training_mesh(stage.config.dp_shard_size).context)
        except ValueError as error:
            raise MeshError(f"{stage.name}: {error}") from None


class Processes:
    """This process among all of them. One process needs no group, and no accelerate until it trains."""

    def __init__(self) -> None:
        rank = this_rank()
        self.count, self.index, self.is_main = rank.count, rank.index, rank.index == 0
        self._joined = False

    def agree(self, value: int) -> int:
        """The main process's number, in every process; also a barrier."""
        if self.count == 1:
            return value
        import torch
        from torch.distributed import broadcast

        from train.accelerator import this_accelerator

        self._joined = True
        number = torch.tensor([value], dtype=torch.int64, device=this_accelerator().device)
        broadcast(number, src=0)
        return int(number.item())

    def wait(self) -> None:
        """Returns when every process has come here."""
        self.agree(0)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """A block that the main process goes through before the others."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()

    def close(self) -> None:
        """Leaves the group, so that the interpreter can end without complaint."""
        if self._joined:
            from train.accelerator import this_accelerator

            this_accelerator().end_training()
