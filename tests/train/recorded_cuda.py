"""A stand-in for CUDA's streams, events and pinned memory that finds copies and computations which nothing orders.

Everything runs at once, on the CPU, and is recorded as if it had been launched on the current stream. A launch knows of
what its stream has waited for, and of all that the host had done; it may touch no memory that a launch it does not know
of writes, and write none that such a launch touches: on a GPU one could overtake the other.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST, COMPUTATION = "host", "stream 0"
Known = dict[str, int]
"""Of each actor (the host, a stream), how many of its launches are over."""


class RaceError(AssertionError):
    """Two launches touch the same memory, and nothing says which comes first."""


@dataclass(frozen=True)
class Launch:
    """An operator on an actor, the `tick`-th there."""

    what: str
    actor: str
    tick: int
    known: Known

    def follows(self, other: "Launch") -> bool:
        """Whether it cannot begin before the other is over."""
        return self.known.get(other.actor, 0) >= other.tick


@dataclass(frozen=True)
class _Access:
    launch: Launch
    writes: bool
    start: int
    stop: int


class _Event:
    def __init__(self, cuda: "RecordedCuda", actor: str, known: Known) -> None:
        self.cuda, self.actor, self.known = cuda, actor, known

    def synchronize(self) -> None:
        self.cuda.wait(HOST, self)


class _Stream:
    def __init__(self, cuda: "RecordedCuda", name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_event(self) -> _Event:
        return _Event(self.cuda, self.name, dict(self.cuda.known[self.name]))

    def wait_event(self, event: _Event) -> None:
        self.cuda.wait(self.name, event)

    def wait_stream(self, other: "_Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.cuda.wait(HOST, self.record_event())


class RecordedCuda(TorchDispatchMode):
    """While it is entered, `torch.cuda` is this, and every operator is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ignored_wait: tuple[str, str] | None = None) -> None:
        """`ignored_wait`: of which actor for which other, to see what becomes of it."""
        super().__init__()
        self.ignored_wait = ignored_wait
        self.known: defaultdict[str, Known] = defaultdict(dict)
        self.pinned: dict[int, int] = {}
        """Bytes by address."""
        self.launches: list[Launch] = []
        self._accesses: list[_Access] = []
        self._streams = [_Stream(self, COMPUTATION)]
        self._current = self._streams[0]
        errors = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        for name, stand_in in {
            "Stream": self._stream,
            "stream": self._on,
            "current_stream": lambda device: self._current,
            "cudart": lambda: errors,
            "check_error": self._check,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def wait(self, actor: str, event: _Event) -> None:
        if (actor, event.actor) != self.ignored_wait:
            _join(self.known[actor], event.known)

    def _stream(self, device: torch.device) -> _Stream:
        self._streams.append(_Stream(self, f"stream {len(self._streams)}"))
        return self._streams[-1]

    @contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        self.pinned[address] = num_bytes
        return 0

    def _unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("empty"):  # its memory may still be in use by what the stream has to do
            self._launch(name, self._current.name, [], [result])
        elif not func.is_view:
            reads, writes = _touched(func, args, kwargs)
            blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            on_host = any(map(self._is_pinned, (*reads, *writes)))
            assert not on_host or name in ("copy_", "fill_", "zero_"), f"{name} reads host memory from the device"
            self._launch(name, HOST if on_host and blocking else self._current.name, reads, writes)
        return result

    def _is_pinned(self, tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < start + size for start, size in self.pinned.items())

    def _launch(self, name: str, actor: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        known = self.known[actor]
        _join(known, self.known[HOST])
        launch = Launch(self._what(name, reads, writes), actor, known.get(actor, 0) + 1, dict(known))
        known[actor] = launch.tick
        self.launches.append(launch)
        touched = [(tensor, False) for tensor in reads] + [(tensor, True) for tensor in writes]
        new = [_Access(launch, is_write, t.data_ptr(), t.data_ptr() + t.nbytes) for t, is_write in touched if t.nbytes]
        for access in new:
            for before in self._accesses:
                _check_order(access, before)
        self._accesses += new

    def _what(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> str:
        pinned = any(map(self._is_pinned, reads)), any(map(self._is_pinned, writes))
        return {(True, False): "fetch", (False, True): "write back"}.get(pinned, name) if name == "copy_" else name


def _check_order(access: _Access, before: _Access) -> None:
    overlap = access.start < before.stop and before.start < access.stop
    one, other = access.launch, before.launch
    if overlap and (access.writes or before.writes) and one.actor != other.actor and not one.follows(other):
        raise RaceError(f"{one.what} on {one.actor} may overtake {other.what} on {other.actor}")


def _join(known: Known, other: Known) -> None:
    for actor, tick in other.items():
        known[actor] = max(known.get(actor, 0), tick)


def _touched(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_write else reads).extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    on_device = [[tensor for tensor in tensors if not tensor.is_meta] for tensors in (reads, writes)]
    return on_device[0], on_device[1]
