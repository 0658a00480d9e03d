"""Optimizer states that live in pinned host memory and visit the GPU one after another.

While one parameter is updated, the states of the next one arrive and those of the one before go home, on a stream of
their own. The GPU never holds more than the states of two parameters, so a long batch can take what they would have
taken. Nothing is left to the driver: no managed memory, no page faults.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


class Visit(NamedTuple):
    """A state's copy on the device, and when it will have arrived."""

    near: State
    arrived: torch.cuda.Event | None


class Copier(Protocol):
    """Copies states between their home and the device; what it starts, it does in order."""

    def fetch(self, home: State) -> Visit:
        """Starts to copy a state to the device."""

    def wait_for(self, visit: Visit) -> None:
        """Lets the computation wait until the copy is there."""

    def send_back(self, visit: Visit, home: State) -> None:
        """Starts to copy a state home, once what was computed so far is done."""

    def finish(self) -> None:
        """Waits until every state is home."""


def walk(states: Sequence[State], copier: Copier) -> Iterator[State]:
    """Yields each state on the device, for its owner to change before asking for the next one."""
    visits = map(copier.fetch, states)
    ahead = list(islice(visits, 1))
    for home in states:
        ahead += islice(visits, 1)  # the next state is on its way before this one is worked on
        visit = ahead.pop(0)
        copier.wait_for(visit)
        yield visit.near
        copier.send_back(visit, home)
    copier.finish()


class CudaCopier:
    """Copies on a side stream. States that lie on the device already are used where they are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def at_home(self, state: State) -> State:
        """The state in pinned host memory."""
        return {kind: tensor.cpu().pin_memory() for kind, tensor in state.items()}

    def fetch(self, home: State) -> Visit:
        if all(tensor.is_cuda for tensor in home.values()):
            return Visit(home, None)
        # The copies belong to this stream, which waits for the computation before it sends them back: when they are
        # freed, and their memory is given to the next ones, nobody uses them any more.
        with torch.cuda.stream(self.stream):
            near = {kind: tensor.to(self.device, non_blocking=True) for kind, tensor in home.items()}
            return Visit(near, self.stream.record_event())

    def wait_for(self, visit: Visit) -> None:
        if visit.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(visit.arrived)

    def send_back(self, visit: Visit, home: State) -> None:
        if visit.arrived is None:
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for kind, tensor in home.items():
                tensor.copy_(visit.near[kind], non_blocking=True)

    def finish(self) -> None:
        self.stream.synchronize()
