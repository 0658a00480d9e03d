"""One process or several that run the same recipe: who writes, and how all of them go the same way.

Under `accelerate launch` or `torchrun` every process runs the whole recipe. All train and measure; the main one
publishes and decides, and the others wait for it meanwhile. They share the run folder through the file system. First of
all they meet (pipeline/meeting.py), and they end together (pipeline/shared_exit.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import yaml

from model.mesh import MeshError, choose_device, this_rank, training_mesh
from model.startup import import_torch
from pipeline.meeting import Meeting, installation, leaves
from pipeline.schema import Recipe
from pipeline.shared_exit import SharedExit
from train.config import TrainingConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from model.collectives import Group


T = TypeVar("T")


def check_mesh(recipe: Recipe) -> None:
    """Raises MeshError where the stages that train cannot share the processes that run, before anything is done."""
    for stage in recipe.plan():
        if not isinstance(stage.config, TrainingConfig) or not stage.config.tokens:
            continue
        try:
            stage.config.check_shared_by(this_rank().count, training_mesh(stage.config.dp_shard_size).together)
        except ValueError as error:
            raise MeshError(f"{stage.name}: {error}") from None


class Processes:
    """This process among all of them. One process needs no group, and no accelerate until it trains."""

    def __init__(self) -> None:
        rank = this_rank()
        self.count, self.index, self.is_main = rank.count, rank.index, rank.index == 0
        self._joined = False
        self._meeting: Meeting | None = None

    @contextmanager
    def together(self, *, shows_traceback: bool) -> Iterator[None]:
        """A block that all processes begin together, of one installation, and end together, whichever of them fails.

        Raises MeetingFailed or UserError where they cannot begin; EndedElsewhere where one has said why it fails.
        """
        if self.count == 1:
            yield
            return
        import_torch()
        self._meeting = Meeting(this_rank())
        with SharedExit(self._meeting).shared(shows_traceback=shows_traceback):
            self._meeting.compare(installation() | {"device": choose_device().type})
            yield

    def check_same(self, recipe: str) -> None:
        """Ends all, with one sentence of the main process, where one has another recipe (YAML), or launch file."""
        if self._meeting is not None:
            facts = dict(leaves(yaml.safe_load(recipe), "recipe"))
            self._meeting.compare(facts | {"launch": _launched()})

    def agree(self, value: int) -> int:
        """The main process's number, in every process; also a barrier."""
        if self.count == 1:
            return value
        import torch
        from torch.distributed import broadcast

        from train.accelerator import this_accelerator

        accelerator = this_accelerator()
        self._joined = True  # not before: whom a signal ends while it joins has nothing to leave
        number = torch.tensor([value], dtype=torch.int64, device=accelerator.device)
        broadcast(number, src=0)
        return int(number.item())

    @cached_property
    def group(self) -> "Group":
        """All of them, for what they compute together; on the device of each."""
        from model.collectives import ALONE, Group

        if self.count == 1:
            return ALONE
        from torch.distributed import group

        from train.accelerator import this_accelerator

        this_accelerator()
        self._joined = True
        return Group.of_processes(cast("ProcessGroup", group.WORLD))

    def dealt(self, things: Sequence[T]) -> Sequence[T]:
        """This process's part of what all work on: every n-th."""
        return things[self.index :: self.count]

    def collected(self, own: Sequence[T], kind: type[T]) -> list[T]:
        """What all have made of things that were dealt, in the order of these; of a `kind` that JSON holds."""
        if self.count == 1:
            return list(own)
        import torch

        said, device = msgspec.json.encode(own), choose_device()
        lengths = self.group.gather(torch.tensor([[len(said)]], device=device)).flatten().tolist()
        padded = torch.frombuffer(bytearray(said.ljust(max(lengths))), dtype=torch.uint8)[:, None]
        parts = [
            msgspec.json.decode(part.cpu().numpy().tobytes(), type=list[kind])  # type: ignore[valid-type]
            for part in self.group.gather(padded.to(device))
        ]
        return [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)]

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


def _launched() -> str:
    """What the launcher asks for; a recipe that trains nothing asks for no mesh, and may do with any."""
    try:
        return str(training_mesh(None))
    except MeshError as error:
        return str(error)
