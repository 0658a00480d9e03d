"""Checkpoints behind training: what one holds is copied, and a thread writes the copy while training goes on.

    prepare on a CPU, some time before the first save: the thread asks the system for the copy's memory, page by page
    save    waits for the checkpoint before; begins to copy weights and moments to host memory; starts the thread
    thread  train.checkpoint.save_checkpoint: write, force to the disk, rename, read back, purge
    wait    for the thread, which then works as fast as it can; raises what it failed with

The copy is made beside the next step's forward and backward, and its update waits for it: from a GPU to pinned memory
on a stream of its own, on a CPU by a thread. On a CPU, whose cores training needs, the thread that writes rests most of
the time, at first for what the copy took. Between its pieces of a MiB alone it holds Python's lock. A process that is
killed takes it along: what is on the disk by then is a whole checkpoint, or a staging folder.

Several processes write a part each. They agree over a group of their own, whose collectives are in no order with those
of training.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from model.files.safe_io import HASH_CHUNK_BYTES
from train.accelerator import this_accelerator, writers_group
from train.checkpoint import Files, save_checkpoint
from train.offload import PinnedArena

SHARE = 0.1
"""Of one core, which the thread takes beside training on a CPU."""


class _Copying(threading.Thread):
    """Makes copies, as events of a GPU tell of theirs."""

    def __init__(self, copy: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._copy = copy
        self._error: Exception | None = None
        self.worked_s = 0.0
        """Known when all is here."""
        self.start()

    def run(self) -> None:
        try:
            self._copy()
        except Exception as error:
            self._error = error
        self.worked_s = time.thread_time()

    def synchronize(self) -> None:
        """Returns when all is here. Raises what the thread failed with."""
        self.join()
        if self._error is not None:
            raise self._error


class HostCopy:
    """A copy in host memory of the tensors that files will hold; its memory is allocated once."""

    def __init__(self, device: torch.device) -> None:
        """`device`: that trains. From a GPU memory is pinned."""
        self.device, self.files = device, Files()
        self.arriving: Any = None
        """What `synchronize` returns of when all is here; None as soon as an update waits for it."""
        self._arena: PinnedArena | None = None
        self._stream: Any = None

    def allocate(self, files: Files) -> None:
        """Undefined memory of their shapes. Raises as `take`."""
        self.files, self._arena = Files(), None  # never two of them
        if self.device.type != "cuda":
            self.files = _empty(files, self.device)
            return
        shapes = _empty(files, torch.device("meta"))
        self._arena = PinnedArena(list(shapes.values()), holds="the copy of a checkpoint")
        self.files = dict(zip(shapes, self._arena.states, strict=True))

    def take(self, files: Files) -> None:
        """Copies them as they are until an update may begin. Raises MemoryError where there is no room to pin."""
        if _shapes(files) != _shapes(self.files):
            self.allocate(files)
        if self.device.type != "cuda":
            self.arriving = _Copying(partial(self._copy, files))
            return
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._copy(files)
            self.arriving = self._stream.record_event()

    def update_may_begin(self) -> None:
        """What is launched from now on may change what was copied."""
        if self.arriving is None:
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self.arriving)
        else:
            self.arriving.synchronize()
        self.arriving = None

    @torch.no_grad()
    def _copy(self, files: Files) -> None:
        for name, tensors in files.items():
            for key, tensor in tensors.items():
                self.files[name][key].copy_(tensor, non_blocking=True)


class CheckpointWriter:
    """Publishes a trainer's checkpoints in `folder`, one after the other. Each process has one, and all do the same.

    As a context it waits at the end for what is being written, and for what was before an exception. An impatient user
    (KeyboardInterrupt) waits for a piece, and what is being written is given up: the folder is free for others.
    """

    def __init__(self, folder: Path, *, keep: int, part: int | None, parts: int) -> None:
        """`part`: which of so many files this process writes; None where another one holds the same."""
        accelerator = this_accelerator()
        self.folder, self.keep, self.part, self.parts = folder, keep, part, parts
        self.is_main, self._group = accelerator.is_main_process, writers_group()
        self.copy = HostCopy(accelerator.device)
        self._rests = accelerator.device.type == "cpu"
        self._thread: threading.Thread | None = None
        self._awaited = threading.Event()
        self._is_given_up = False
        self._worked_s = 0.0
        self.error: Exception | None = None
        """What the thread failed with; the next `wait` raises it, in all processes."""

    def prepare(self, files: Callable[[], Files]) -> None:
        """Has the memory of the first save's copy made behind training, where pages cost a core that trains time.

        `files` is asked once for what `save` will be given.
        """
        if self._rests and self.part is not None and not self.copy.files:
            self.copy.allocate(files())
            self._begin(self._touch)

    def save(self, step: int, files: Files, state: dict[str, Any]) -> None:
        """Copies `files`, the tensors that this process is to write, and has them written with the main one's `state`.

        Raises what the checkpoint before failed with.
        """
        self.wait()
        if self.part is not None:
            self.copy.take(files)
        self._begin(self._write, step, self.copy.arriving, state)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises OSError, or what else the last checkpoint failed with."""
        self._join()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            self._join()
        elif self._group is None:  # others may never come to agree
            self._is_given_up = True
            self._join()

    def _begin(self, work: Callable[..., None], *arguments: Any) -> None:
        self._awaited.clear()
        self._thread = threading.Thread(target=self._work, args=(work, *arguments), daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._awaited.set()
            self._thread.join()
            self._thread = None

    # In the thread

    def _work(self, work: Callable[..., None], *arguments: Any) -> None:
        self._worked_s = time.thread_time()
        try:
            work(*arguments)
        except Exception as error:
            self.error = error

    def _touch(self) -> None:
        """Writes to each page; a system gives them when they are first written to."""
        for tensors in self.copy.files.values():
            for tensor in tensors.values():
                for piece in tensor.view(-1).view(torch.uint8).split(HASH_CHUNK_BYTES):
                    piece.zero_()
                    self.moved(piece.nbytes)

    def _write(self, step: int, arriving: Any, state: dict[str, Any]) -> None:
        if arriving is not None:
            arriving.synchronize()
            if self._rests:
                self._rest_after(arriving.worked_s)
        save_checkpoint(self.folder, step, files=self.copy.files, state=state, keep=self.keep, writers=self)

    def together(self, work: Callable[[], None]) -> None:
        """As `train.checkpoint.Writers` says."""
        error = None
        try:
            work()
        except Exception as reason:
            error = reason
        failed = torch.tensor(float(error is not None))
        if self._group is not None:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        if failed:
            raise error or OSError("another process could not write its part of a checkpoint; its log says why")

    def moved(self, num_bytes: int) -> None:
        """Rests, on a CPU that trains, for as long as makes its work a tenth."""
        if self._rests:
            self._rest_after(time.thread_time() - self._worked_s)
            self._worked_s = time.thread_time()
        if self._is_given_up:
            raise InterruptedError("training was interrupted")

    def _rest_after(self, worked_s: float) -> None:
        self._awaited.wait(worked_s * (1 / SHARE - 1))


def _shapes(files: Files) -> dict[str, dict[str, Any]]:
    return {name: {key: (t.shape, t.dtype) for key, t in tensors.items()} for name, tensors in files.items()}


def _empty(files: Files, device: torch.device) -> Files:
    """Undefined and contiguous."""
    return {
        name: {key: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for key, tensor in tensors.items()}
        for name, tensors in files.items()
    }
