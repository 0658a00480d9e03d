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
        if not isinstance(stage.config, TrainingConfig):
            continue
        mesh = training_mesh(stage.config.dp_shard_size)
        count, batches = this_rank().count // mesh.context, stage.config.micro_batches_per_step
        if batches % count:
            of = "micro-batches (batch_tokens / micro_batch_tokens)"
            who = "processes" if mesh.context == 1 else f"groups of {mesh.context} processes"
            raise MeshError(f"{stage.name}: a step of {batches} {of} cannot be shared evenly by {count} {who}")


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
