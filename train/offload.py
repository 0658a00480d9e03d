"""Optimizer states that are offloaded to pinned host memory and prefetched to the GPU piece by piece.

While one piece is updated, the next one arrives on a stream of its own, and the one before is written back on another:
both directions of the bus are busy at once. The GPU never holds more than `PAGED_BUFFERS` pieces, however large a
parameter is, so a long batch can take what the states would have taken. Nothing is left to the driver: no managed
memory, no page faults.
"""

import mmap
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from model.training_memory import PAGED_BUFFERS

State = dict[str, Tensor]


class PinnedArena:
    """One allocation of pinned host memory that holds states of given shapes, to the byte."""

    def __init__(self, shapes: Sequence[State], *, holds: str = "optimizer states") -> None:
        """`shapes`: at least one state, of tensors on the meta device. MemoryError where so much cannot be pinned."""
        self.num_bytes = sum(tensor.nbytes for state in shapes for tensor in state.values())
        memory = _pinned(self.num_bytes, holds)
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, memory.data_ptr())
        self.states = _carved(memory, shapes)
        """Tensors of these shapes, with undefined content."""


def _pinned(num_bytes: int, holds: str) -> Tensor:
    """u8 `[num_bytes]`. Torch's own pinned memory is rounded up to a power of two: up to twice of what is asked for."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child process that shared these pages would make writes to them go to copies, where no device looks.
    pages.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    except RuntimeError as reason:
        raise MemoryError(f"{num_bytes:,} bytes cannot be pinned for {holds}: {reason}") from None
    return memory


def _carved(memory: Tensor, shapes: Sequence[State]) -> list[State]:
    """`memory` as tensors of these shapes, one behind the other: wide elements first, so that all are aligned."""
    states = [dict(shape) for shape in shapes]
    wanted = [(tensor, kind, state) for state in states for kind, tensor in state.items()]
    start = 0
    for shape, kind, state in sorted(wanted, key=lambda one: -one[0].itemsize):
        state[kind] = memory[start : start + shape.nbytes].view(shape.dtype).view(shape.shape)
        start += shape.nbytes
    return states


@dataclass
class _Buffer:
    """Memory of the device that pieces pass through, one at a time."""

    state: State
    written_back: torch.cuda.Event | None = None
    """When the piece that was there before is on the host."""


class Prefetcher:
    """Takes pieces of states to the device and back.

    A buffer is fetched into, computed in, written back from and fetched into again, on three streams. Each waits by an
    event for the one before in the same buffer, and for nothing else: a piece is fetched while the two before it are
    computed and written back. Buffers are allocated once and live as long as this object, and its streams are idle when
    `prefetched` ends; so torch's allocator never hands out memory that a copy still uses, and need not be told of the
    streams (`record_stream`).
    """

    def __init__(self, largest: State, device: torch.device) -> None:
        """`largest`: on the meta device, a piece that has as many rows as any."""
        self.device, self.fetching, self.writing = device, torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.buffers = [
            _Buffer({kind: torch.empty_like(tensor, device=device) for kind, tensor in largest.items()})
            for _ in range(PAGED_BUFFERS)
        ]
        # What this memory was used for before may not have been computed yet.
        self.fetching.wait_stream(torch.cuda.current_stream(device))

    def prefetched(self, pieces: Sequence[State]) -> Iterator[State]:
        """Yields each of the pieces in host memory on the device, for its owner to change before asking for the next.

        All are on the host again when it ends.
        """
        arrivals = map(self._fetch, cycle(self.buffers), pieces)
        try:
            ahead = list(islice(arrivals, 1))
            for host in pieces:
                ahead += islice(arrivals, 1)  # the next piece is on its way before this one is worked on
                buffer, state, arrived = ahead.pop(0)
                torch.cuda.current_stream(self.device).wait_event(arrived)
                yield state
                self._write_back(buffer, state, host)
        finally:
            self.fetching.synchronize()
            self.writing.synchronize()

    def _fetch(self, buffer: _Buffer, host: State) -> tuple[_Buffer, State, torch.cuda.Event]:
        """Starts to copy a piece to the device; what it will be there, and the event of its arrival."""
        if buffer.written_back is not None:
            self.fetching.wait_event(buffer.written_back)
        state = {kind: buffer.state[kind][: len(tensor)] for kind, tensor in host.items()}
        with torch.cuda.stream(self.fetching):
            for kind, tensor in host.items():
                state[kind].copy_(tensor, non_blocking=True)
            return buffer, state, self.fetching.record_event()

    def _write_back(self, buffer: _Buffer, state: State, host: State) -> None:
        """Starts to copy a piece to the host, once what was computed so far is done."""
        self.writing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.writing):
            for kind, tensor in host.items():
                tensor.copy_(state[kind], non_blocking=True)
            buffer.written_back = self.writing.record_event()
