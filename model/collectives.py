"""What processes that compute one model together tell each other while they do: sums and gathers of tensors.

By torch.distributed's process groups, NCCL between GPUs and gloo between CPUs, held here alone: a program that has a
default group of its own, as under a launcher, keeps it. Ranks meet through a file in a private folder, and gloo listens
on loopback.
"""

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.common.cpu_graph import call

_MEETING = timedelta(minutes=1)
"""For ranks that have all begun and are to connect."""
_PATIENCE = timedelta(minutes=10)
"""For ranks that load, or compute a long step."""


class RankError(RuntimeError):
    """Ranks are out of step, or one is gone: no further pass is computed over them."""


class Group:
    """One rank's side of all of them."""

    def __init__(self, index: int, count: int) -> None:
        """`index`: this rank's, below `count`."""
        self.index, self.count = index, count
        self._backend: Any = None
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """What may still be on its way, the oldest first."""

    @classmethod
    def of_processes(cls, group: dist.ProcessGroup) -> "Group":
        """Those that a launcher has started, which have met."""
        ranks = cls(group.rank(), group.size())
        ranks._backend = group
        return ranks

    def join_by(self, store: dist.Store, device: torch.device) -> None:
        """Meet the other ranks, who have the same store; tensors will be on the device. Waits for all of them.

        RuntimeError, from torch, when one does not come.
        """
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _PATIENCE
            self._backend = dist.ProcessGroupNCCL(store, self.index, self.count, nccl)
            return
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _MEETING
        store.set_timeout(_MEETING)
        self._backend = gloo(store, self.index, self.count, options)
        self._backend._set_default_timeout(_PATIENCE)

    def sum(self, parts: Tensor) -> Tensor:
        """The sum of what all ranks give, in the same memory; the same bits everywhere. `parts` is contiguous."""
        if self.count > 1:
            call(self._sum, parts)
        return parts

    def gather(self, part: Tensor) -> Tensor:
        """What each rank gives, `[T, n]`, one below the other, `[ranks, T, n]`."""
        if self.count == 1:
            return part[None]
        gathered = part.new_empty(self.count * part.shape[0], *part.shape[1:])
        self._backend._allgather_base(gathered, part.contiguous()).wait()
        return gathered.view(self.count, *part.shape)

    def largest(self, parts: Tensor) -> Tensor:
        """The largest of what all ranks give, `[n]`, element by element."""
        return self.gather(parts[None]).amax((0, 1))

    def sum_parts(self, parts: Tensor) -> Tensor:
        """Of what all ranks give, `[ranks * T, n]` contiguous, the sum of this one's T rows."""
        if self.count == 1:
            return parts
        summed = parts.new_empty(parts.shape[0] // self.count, *parts.shape[1:])
        self._backend._reduce_scatter_base(summed, parts).wait()
        return summed

    def _sum(self, parts: Tensor) -> None:
        self._backend.allreduce([parts]).wait()

    def send(self, tensor: Tensor) -> None:
        """To the next rank, the first behind the last; it is contiguous, and received in the order of sending.

        Waits for nothing as long as no more than one tensor for each rank is on its way; nobody writes into it again.
        """
        self._sent.append((self._backend.send([tensor], (self.index + 1) % self.count, 0), tensor))
        if len(self._sent) > self.count:
            self._sent.popleft()[0].wait()

    def receive(self, tensor: Tensor) -> Tensor:
        """What the rank before has sent, into this memory of its shape and dtype."""
        self._backend.recv([tensor], (self.index - 1) % self.count, 0).wait()
        return tensor


ALONE = Group(0, 1)
"""Of a process that computes by itself."""


@dataclass(frozen=True)
class Grid:
    """One rank's place among all: layers are divided among stages, and each layer among the ranks of its stage."""

    tensor: Group
    """Those that share this one's layers."""
    stage: Group
    """Those that share their layers in the same way, one of each stage, in the order of layers."""
    back: Group
    """The same, for what the last of them returns to the first: two ways of a pair must not wait for each other."""

    @classmethod
    def of(cls, rank: int, *, tensor: int, stages: int) -> "Grid":
        """Ranks of a stage lie side by side."""
        stage = rank // tensor
        return cls(Group(rank % tensor, tensor), Group(stage, stages), Group(stage, stages))

    def join(self, meeting_point: Path, device: torch.device) -> None:
        """Meet all others, who name the same file; tensors will be on the device. Waits for those of all groups."""
        store = dist.FileStore(str(meeting_point), self.tensor.count * self.stage.count)
        column = self.tensor.index
        for name, group in (
            (f"tensor {self.stage.index}", self.tensor),
            (f"stage {column}", self.stage),
            (f"back {column}", self.back),
        ):
            if group.count > 1:
                group.join_by(dist.PrefixStore(name, store), device)
