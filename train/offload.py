"""Optimizer states that are offloaded to pinned host memory and prefetched to the GPU one after another.

While one parameter is updated, the states of the next one arrive and those of the one before are written back, on a
stream of their own. The GPU never holds more than the states of two parameters, so a long batch can take what they
would have taken. Nothing is left to the driver: no managed memory, no page faults.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


class DeviceCopy(NamedTuple):
    """A state's copy on the device, and when it will have arrived."""

    state: State
    arrived: torch.cuda.Event | None


class Copier(Protocol):
    """Copies states between host and device; what it starts, it does in order."""

    def fetch(self, host: State) -> DeviceCopy:
        """Starts to copy a state to the device."""

    def wait_for(self, copy: DeviceCopy) -> None:
        """Lets the computation wait until the copy is there."""

    def write_back(self, copy: DeviceCopy, host: State) -> None:
        """Starts to copy a state to the host, once what was computed so far is done."""

    def finish(self) -> None:
        """Waits until every state is on the host."""


def prefetched(states: Sequence[State], copier: Copier) -> Iterator[State]:
    """Yields each state on the device, for its owner to change before asking for the next one."""
    copies = map(copier.fetch, states)
    ahead = list(islice(copies, 1))
    for host in states:
        ahead += islice(copies, 1)  # the next state is on its way before this one is worked on
        copy = ahead.pop(0)
        copier.wait_for(copy)
        yield copy.state
        copier.write_back(copy, host)
    copier.finish()


class CudaCopier:
    """Copies on a side stream. States that lie on the device already are used where they are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def to_host(self, state: State) -> State:
        """The state in pinned host memory."""
        return {kind: tensor.cpu().pin_memory() for kind, tensor in state.items()}

    def fetch(self, host: State) -> DeviceCopy:
        if all(tensor.is_cuda for tensor in host.values()):
            return DeviceCopy(host, None)
        # The copies belong to this stream, which waits for the computation before it writes them back: when they are
        # freed, and their memory is given to the next ones, nobody uses them any more.
        with torch.cuda.stream(self.stream):
            state = {kind: tensor.to(self.device, non_blocking=True) for kind, tensor in host.items()}
            return DeviceCopy(state, self.stream.record_event())

    def wait_for(self, copy: DeviceCopy) -> None:
        if copy.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(copy.arrived)

    def write_back(self, copy: DeviceCopy, host: State) -> None:
        if copy.arrived is None:
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for kind, tensor in host.items():
                tensor.copy_(copy.state[kind], non_blocking=True)

    def finish(self) -> None:
        self.stream.synchronize()
