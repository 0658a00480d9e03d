"""What a CUDA graph is on a GPU, for the CPU: code runs once, and what it computes is computed again at will.

A pass of a model over few tokens is for the most part Python. A capture notes the calls of C functions and of torch's
operators that the code makes; a replay makes them again, in their order and on the same memory, without the code. So
inputs are what is written into the tensors that the code has read, and shapes stay. Results have the bits of the code.

As with CUDA, whatever else the code reads or decides is frozen: code that looks at numbers, or works anew from lengths,
cannot be captured and says so by CaptureError. Caches must be full before: run the code once without a capture.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.common.calls_cpu import together

_ALIGNMENT = 64
_NO_ROOM = "there is no room for what a product or an attention works with"
_aten = torch.ops.aten
UNFILLED = {
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default),
}
"""Operators that make a tensor and leave its memory as it is."""
_LOOKS_AT_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_now = threading.local()
"""`graph`: the one that this thread captures, if it does."""


class CaptureError(RuntimeError):
    """This code cannot be captured; the message says why."""


def refuse_capture(reason: str) -> None:
    """For code that reads more than the contents of tensors: raise CaptureError within a capture."""
    if getattr(_now, "graph", None) is not None:
        raise CaptureError(reason)


def call(function: Callable[..., int | None], *arguments: Any) -> None:
    """Call a C function, and so does every replay. Raises MemoryError where it returns anything but 0 or None."""
    if function(*arguments):
        raise MemoryError(_NO_ROOM)
    graph = getattr(_now, "graph", None)
    if graph is not None:
        graph.calls.append(partial(function, *arguments))


class _Block:
    """Some memory, lent to one tensor and what shares its storage."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
        self._holder: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        return self._holder is None or self._holder.expired()

    def lend(self, like: Tensor) -> Tensor:
        tensor = torch.frombuffer(self.memory.numpy(), dtype=like.dtype).as_strided(like.shape, like.stride())
        self._holder = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def unlent(self, tensor: Tensor) -> Tensor:
        """A lent tensor, without holding the block."""
        return self.memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class GraphMemory:
    """Where graphs keep what they compute on their way. Several may share it: one runs at a time.

    Memory whose tensor is gone serves for the next, within a capture and from graph to graph.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        """By their addresses."""

    @property
    def num_bytes(self) -> int:
        return sum(len(block.memory) for block in self._blocks.values())

    def lend(self, like: Tensor) -> Tensor:
        """A tensor in the memory here, of the same shape, dtype and strides; its contents are anything."""
        if not like.numel():
            return like
        needed = like.untyped_storage().nbytes()
        fitting = [block for block in self._blocks.values() if block.is_free and len(block.memory) >= needed]
        block = min(fitting, key=lambda block: len(block.memory), default=None) or _Block(needed)
        self._blocks[block.memory.data_ptr()] = block
        return block.lend(like)

    def unlent(self, value: Any) -> Any:
        """Arguments of a call, with nothing in them that would hold memory here."""
        return tree_map_only(Tensor, self._unlent_tensor, value)

    def _unlent_tensor(self, tensor: Tensor) -> Tensor:
        block = self._blocks.get(_address(tensor))
        return tensor if block is None else block.unlent(tensor)


class CpuGraph(TorchDispatchMode):
    """One capture, to be replayed as often as is wished."""

    def __init__(self, memory: GraphMemory) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        """In their order; each returns 0 or None, else a C function found no memory."""
        self._memory = memory

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Notes what the code within computes. CaptureError out of the code that cannot be captured."""
        _now.graph = self
        try:
            with self:
                yield
        finally:
            _now.graph = None
        self.calls = together(self.calls)

    def replay(self) -> None:
        """Computes it again. MemoryError where there is none left."""
        for call in self.calls:
            if call():
                raise MemoryError(_NO_ROOM)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing compiles this; to have torch say so to its compiler imports that, and the first request waits."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _looks_at_numbers(func, args):
            raise CaptureError(f"{func} looks at numbers")
        result = func(*args, **kwargs)
        inputs = {_address(tensor) for tensor in _tensors((args, kwargs))}
        is_new = [_address(tensor) not in inputs for tensor in _tensors(result)]
        if func._schema.is_mutable:
            self._keep(func, args, kwargs, result, [])
        elif any(is_new):
            kept = [self._memory.lend(tensor) for tensor in _tensors(result)]
            if not all(is_new):
                raise CaptureError(f"{func} returns new tensors beside views")
            if func not in UNFILLED:
                for tensor, value in zip(kept, _tensors(result), strict=True):
                    tensor.copy_(value)
                self._keep(func, args, kwargs, result, kept)
            left = iter(kept)
            return tree_map_only(Tensor, lambda _: next(left), result)
        return result

    def _keep(self, func: Any, args: Any, kwargs: Any, result: Any, results: list[Tensor]) -> None:
        """Note a call of an operator that has returned `result`, whose tensors belong into `results`."""
        args, kwargs, results = self._memory.unlent((args, kwargs, results))
        if len(results) == 1 and isinstance(result, Tensor):  # nearly all: to look for tensors in it takes as long
            self.calls.append(partial(_compute_one, results[0], func, args, kwargs))
        else:
            self.calls.append(partial(_compute_all, results, func, args, kwargs))


def _compute_one(kept: Tensor, func: Any, args: Any, kwargs: Any) -> None:
    kept.copy_(func(*args, **kwargs))


def _compute_all(kept: list[Tensor], func: Any, args: Any, kwargs: Any) -> None:
    values = func(*args, **kwargs)
    for tensor, value in zip(kept, _tensors(values) if kept else (), strict=True):
        tensor.copy_(value)


def _looks_at_numbers(func: Any, args: Any) -> bool:
    if func is _aten.index.Tensor:  # only a mask of booleans gives as many rows as it has ones
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
    return not _LOOKS_AT_NUMBERS.isdisjoint(func.tags)


def _address(tensor: Tensor) -> int:
    """Of the memory that a tensor shares with its views; 0 of what oneDNN keeps to itself."""
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
