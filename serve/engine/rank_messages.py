"""What the ranks of an engine tell each other beside the tensors that they add up, and how.

Rank 0 tells each follower what to do; a follower answers while it is being made, and never later. Frames are those of
`serve.messages`, over a socket pair, so that whoever dies is noticed by the others at once.
"""

import socket
from collections.abc import Sequence

import msgspec
import numpy as np

from serve.messages import frame, read_frame


class Array(msgspec.Struct, frozen=True, array_like=True):
    """One of numpy."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray
    """In C order."""

    @classmethod
    def of(cls, array: np.ndarray) -> "Array":
        return cls(array.dtype.str, array.shape, bytearray(np.ascontiguousarray(array)))

    def numpy(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A follower has imported what it needs."""


class Met(msgspec.Struct, frozen=True, tag=True):
    """A follower has met all others, and begins to load."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A follower has loaded its part of the model, and has memory for so many KV pages."""

    num_pages: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A follower cannot load its part; `reason` is one sentence for the operator."""

    reason: str


class Meet(msgspec.Struct, frozen=True, tag=True):
    """All ranks are there: meet the others, and load."""


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Have so many KV pages, and lists of visible slots for sequences in `num_rows` rows."""

    num_pages: int
    num_rows: int
    most_tokens: int


class Run(msgspec.Struct, frozen=True, tag=True):
    """Compute a pass: `serve.engine.runner.Step`."""

    arrays: list[Array | None]
    sampled: list[int]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray | None], sampled: list[int]) -> "Run":
        return cls([None if array is None else Array.of(array) for array in arrays], sampled)


class End(msgspec.Struct, frozen=True, tag=True):
    """Take back the oldest pass that other stages have gone on with, and compute its logits."""


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Compute those of rows [start, stop) of what the pass that ended last has returned."""

    start: int
    stop: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy KV pages, each from a source to a destination."""

    copies: tuple[tuple[int, int], ...]


ToFollower = Meet | Allocate | Run | End | Logits | Copy
FromFollower = Begun | Met | Loaded | Failed
_to_follower = msgspec.msgpack.Decoder(ToFollower)
_from_follower = msgspec.msgpack.Decoder(FromFollower)


def tell(connected: socket.socket, message: ToFollower | FromFollower) -> None:
    """OSError when the other rank is gone."""
    connected.sendall(frame(message))


def next_order(connected: socket.socket) -> ToFollower:
    """What a follower is told next; waits for it. EOFError when rank 0 is gone."""
    return _to_follower.decode(read_frame(connected))


def next_answer(connected: socket.socket) -> FromFollower:
    """What a follower says next; waits for it. EOFError when it is gone."""
    return _from_follower.decode(read_frame(connected))
