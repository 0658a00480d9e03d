"""A stand-in for CUDA graphs on the CPU: what is captured runs again at each replay, and is watched.

As a CUDA graph it freezes what it has seen: a replay raises where operators, their shapes or the numbers among their
arguments differ from the capture's, or where a tensor is read that lies elsewhere now. Within a capture and a replay
the host may neither read a tensor nor make one from its own numbers. A capture leaves everything as it was, and garbage
in its outputs; they stay where they are.

Kernels are exempt from it on the CPU, where their wrappers may look at what is at hand, but not through the
interpreter, which takes the wrappers of a GPU.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.common.cpu_graph import _looks_at_numbers
from kernels.common.cuda_graph import Graphs, Outputs
from kernels.common.triton_support import _interpreting

FROM_HOST = ("tensor", "as_tensor", "from_numpy", "frombuffer")
HOST_READS = ("tolist", "item", "numpy", "cpu", "pin_memory")
"""Methods of tensors; other reads of their numbers are operators."""


class CaptureViolation(BaseException):
    """A CUDA graph would have computed something else, or could not have been captured."""


def _in_kernel() -> bool:
    """Whether this is the work of a kernel: in the form of the CPU all of it, else what the interpreter does."""
    inside = ("triton.", "tests.interpreter") if _interpreting.get() else ("kernels.",)
    # Kernels call nothing above them, unless the interpreter calls what is a kernel.
    outside = () if _interpreting.get() else ("model.", "serve.")
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(inside):
            return True
        if name.startswith(outside) or (name == __name__ and frame.f_code.co_name == "_watched"):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


_watching = threading.local()
"""`depth`: how many captures and replays this thread is within."""


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_watching, "depth", 0) and not _in_kernel():
            raise CaptureViolation(f"{name} goes through the host")
        return function(*args, **kwargs)

    return call


@contextmanager
def _no_host() -> Iterator[None]:
    """Nothing goes between host and device in this thread."""
    _watching.depth = getattr(_watching, "depth", 0) + 1
    with ExitStack() as stack:
        for owner, names in ((torch, FROM_HOST), (Tensor, HOST_READS)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _guarded(name, getattr(owner, name))))
        try:
            yield
        finally:
            _watching.depth -= 1


class _Log(TorchDispatchMode):
    """What is computed: operators, with shapes and numbers.

    It sees some hundred thousand operators in a run of the tests, so it goes through their arguments once, and plainly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, ...]] = []
        self._made: set[int] = set()
        """Storages that were made within."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """What was written to, and what it held."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing compiles this; to have torch say so at each operator takes longer than most of them."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _leaves((*args, *kwargs.values()))
        places = [_address(value) if isinstance(value, Tensor) else None for value in given]
        is_mutable = _is_mutable(func)
        if is_mutable:
            self._keep([value for value in given if isinstance(value, Tensor)])
        in_kernel = _in_kernel()
        if not in_kernel and _looks_at_numbers(func, args):
            raise CaptureViolation(f"{func} looks at numbers")
        entry = None if in_kernel else (func, *map(self._describe, given, places))
        result = func(*args, **kwargs)
        if entry is not None:
            self.entries.append(entry)
        if not is_mutable:
            results = [result] if isinstance(result, Tensor) else _leaves((result,))
            self._made.update({_address(value) for value in results if isinstance(value, Tensor)}.difference(places))
        return result

    def _keep(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._made and storage.data_ptr() not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[storage.data_ptr()] = whole, whole.clone()

    def undo(self) -> None:
        """Give everything that was written to what it held before."""
        for whole, held in self._before.values():
            whole.copy_(held)

    def _describe(self, value: Any, place: int | None) -> Any:
        """Of a tensor its shape, dtype and place; any other value is itself."""
        if place is None:
            return value
        return value.shape, value.dtype, "made" if place in self._made else place


@cache
def _is_mutable(func: Any) -> bool:
    return func._schema.is_mutable


def _leaves(values: Iterable[Any]) -> list[Any]:
    """What is in lists within lists; those of tree_leaves know many kinds more, and take ten times as long."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += _leaves(value)
        else:
            found.append(value)
    return found


def _address(tensor: Tensor) -> int:
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _watched(run: Callable[[], Outputs]) -> tuple[Outputs, _Log]:
    log = _Log()
    with _no_host(), log:
        outputs = run()
    return outputs, log


class RecordedGraph:
    """See above; `pool` counts what happens."""

    def __init__(self, pool: dict[str, int]) -> None:
        self._counts = pool

    def capture(self, run: Callable[[], Outputs]) -> Outputs:
        self._counts["captures"] = self._counts.get("captures", 0) + 1
        self._run = run
        self._outputs, log = _watched(run)
        log.undo()
        self._entries = log.entries
        for output in self._outputs:
            output.fill_(float("nan") if output.is_floating_point() else -7)
        return self._outputs

    def replay(self) -> None:
        self._counts["replays"] = self._counts.get("replays", 0) + 1
        outputs, log = _watched(self._run)
        for number, (old, new) in enumerate(zip(self._entries, log.entries, strict=False)):
            if old != new:
                raise CaptureViolation(f"call {number} was {old}, and is {new}")
        if len(self._entries) != len(log.entries):
            raise CaptureViolation(f"{len(self._entries)} calls were captured, and {len(log.entries)} are made")
        for kept, fresh in zip(self._outputs, outputs, strict=True):
            kept.copy_(fresh)


def recorded_graphs() -> Graphs:
    """For an engine on the CPU."""
    return Graphs(RecordedGraph, {})


@contextmanager
def counted(graphs: Graphs) -> Iterator[dict[str, int]]:
    """What is captured and replayed within."""
    before, counts = dict(graphs._pool), {}
    yield counts
    counts |= {name: number - before.get(name, 0) for name, number in graphs._pool.items()}
