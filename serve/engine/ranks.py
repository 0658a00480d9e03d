"""The other ranks of a model that several processes compute together, as rank 0 sees them.

Rank 0 is the engine: it schedules, drafts, draws and answers. Before each pass it tells its followers what the pass is
made of (serve/engine/follower.py), and all compute it, each its part of every layer over its part of every page
(model/tensor_parallel.py). Nothing else is told: who a follower computes for, it never knows. Where layers are divided
among stages, what is behind the last of them, logits and draws, is a matter of the first, and told to its ranks alone:
meanwhile the stages may be at several passes, one behind the other.

Ranks stay in step or end. A pass that raises in one of them has left the others in the midst of a sum, so this engine
computes no further one; where it is a process of its own, a fresh one starts with fresh followers.
"""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from model.collectives import Grid, RankError
from model.mesh import choose_device, gpus
from serve.config import EngineConfig
from serve.engine.rank_messages import (
    Allocate,
    Begun,
    Copy,
    End,
    Failed,
    Loaded,
    Logits,
    Meet,
    Met,
    Run,
    ToFollower,
    next_answer,
    tell,
)

ROOT = str(Path(__file__).resolve().parents[2])
END_S = 5.0
"""How long a follower that was told to leave may take."""
NEWS_S = 0.5
"""How long after a broken sum the end of a follower, which explains it, may take to be known."""
log = logging.getLogger("potstill.engine")
Answer = TypeVar("Answer", Begun, Met, Loaded)


class FollowerProcess:
    """Another rank."""

    def __init__(self, rank: int, config: EngineConfig, meeting_point: Path) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        """Rank 0's side; closing it ends the process."""
        options = msgspec.json.encode(_options_of(rank, config)).decode()
        words = ("--rank", str(rank), "--socket", str(theirs.fileno()), "--meeting-point", str(meeting_point))
        threads = max(1, torch.get_num_threads() // config.num_ranks)
        python_path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "serve.engine.follower", *words, "--options", options],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": str(threads)},
            )

    def wait(self) -> int:
        """For its end; returns its exit code."""
        return self._process.wait()

    def end(self) -> None:
        """Close its socket, wait for it to leave, then kill it."""
        self.socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def answer(self, expected: type[Answer]) -> Answer:
        """What it says next. RankError when it is gone, ValueError when it cannot load."""
        try:
            answer = next_answer(self.socket)
        except (EOFError, OSError):
            raise RankError(f"rank {self.rank} ended while it was starting; its output says why") from None
        if isinstance(answer, Failed):
            raise ValueError(answer.reason)
        if not isinstance(answer, expected):
            raise RankError(f"rank {self.rank} said {answer}, not {expected.__name__}")
        return answer


def grid_of(config: EngineConfig, rank: int) -> Grid:
    """A rank's place."""
    return Grid.of(rank, tensor=config.tensor_parallel_size, stages=config.pipeline_parallel_size)


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Where a rank computes: on the CPU, or on the GPU of its number. ValueError where there are too few."""
    if config.device not in ("auto", "cpu", "cuda", "cuda:0"):
        raise ValueError(f"device {config.device!r} is one GPU; ranks take the first ones, so say cuda")
    kind = choose_device(config.device).type
    if kind == "cuda" and len(gpus()) < config.num_ranks:
        raise ValueError(f"{config.num_ranks} ranks need a GPU each, but this machine has {len(gpus())} for torch")
    return choose_device(f"cuda:{rank}" if kind == "cuda" else "cpu")


def _options_of(rank: int, config: EngineConfig) -> EngineConfig:
    """What a follower is to know: where it computes, and nothing of what rank 0 does alone."""
    device = f"cuda:{rank}" if config.device.startswith("cuda") else "cpu"
    alone: dict[str, Any] = dict.fromkeys(("draft", "draft_model", "watch_draft", "label_folder"))
    return replace(config, device=device, verify_artifact=False, **alone)


class _Alarm:
    """What the threads that wait for followers' ends have to tell."""

    def __init__(self) -> None:
        self.is_closing = False
        self.reason: str | None = None
        """Why no further pass is computed."""
        self._code = 0
        self.on_loss: Callable[[], None] = lambda: None
        self.rang = threading.Event()

    def watch(self, follower: FollowerProcess) -> None:
        code = follower.wait()
        if not self.is_closing:
            reason = f"rank {follower.rank} has ended with code {code}"
            log.error("%s", reason)
            if self.reason is None or code < 0 <= self._code:  # who was killed is why others have ended
                self.reason, self._code = reason, code
            self.rang.set()
            self.on_loss()


class Ranks:
    """Started together; `close` ends them, and so does whatever ends this process."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """`config`: what they load, its device and dtype by name; `device`: rank 0's. Waits until all have met.

        RankError for one that does not get so far.
        """
        if device.type == "cuda":
            log.warning("ranks capture no CUDA graphs, and read each step before the next is launched")
        self._alarm = _Alarm()
        self.grid = grid_of(config, 0)
        with tempfile.TemporaryDirectory(prefix="potstill-ranks-") as folder:
            point = Path(folder) / "store"
            self._followers = [FollowerProcess(rank, config, point) for rank in range(1, config.num_ranks)]
            self.close = weakref.finalize(self, _end, self._alarm, self._followers)
            """Ends them; called again, it does nothing."""
            self._beside = self._followers[: self.grid.tensor.count - 1]
            """Those that share rank 0's layers."""
            for follower in self._followers:
                threading.Thread(target=self._alarm.watch, args=(follower,), daemon=True).start()
            try:
                self._meet(point, device)
            except BaseException:
                self.close()
                raise

    def _meet(self, point: Path, device: torch.device) -> None:
        """All have begun before the first joins, where one would wait for the others."""
        for follower in self._followers:
            follower.answer(Begun)
        self._tell(Meet(), self._followers)
        try:
            self.grid.join(point, device)
        except RuntimeError as error:
            raise self._out_of_step(error) from error
        for follower in self._followers:
            follower.answer(Met)

    def on_loss(self, call: Callable[[], None]) -> None:
        """Have `call` called, in a thread of its own, when a follower ends that was not to; at once, if one has."""
        self._alarm.on_loss = call
        if self._alarm.reason is not None:
            call()

    def fewest_pages(self, own: int) -> int:
        """KV pages for which all have memory, this rank for `own`; waits until all have loaded.

        Raises ValueError, one sentence, where one cannot.
        """
        return min(own, *(follower.answer(Loaded).num_pages for follower in self._followers))

    def allocate(self, num_pages: int, *, num_rows: int, most_tokens: int) -> None:
        """Have all others make their part of so many pages, with lists of that size, before the first pass."""
        self._tell(Allocate(num_pages, num_rows, most_tokens), self._followers)

    def run(self, arrays: Sequence[np.ndarray | None], sampled: list[int]) -> AbstractContextManager[None]:
        """Have all others compute a pass, `serve.engine.runner.Step`, that this rank computes within.

        Where the model has several stages, without what `end` is for. Raises RankError when that cannot be done, here
        or there.
        """
        return self._in_step(Run.of(arrays, sampled), self._followers)

    def end(self) -> AbstractContextManager[None]:
        """Likewise what is left of the oldest pass, when it has been through all stages."""
        return self._in_step(End(), self._beside if self.grid.stage.count > 1 else [])

    def logits(self, start: int, stop: int) -> AbstractContextManager[None]:
        """Likewise those of rows [start, stop) of what the pass that ended last has returned."""
        return self._in_step(Logits(start, stop), self._beside)

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Have all others copy (source, destination) pages. Raises RankError when one is gone."""
        self._tell(Copy(copies), self._followers)

    def _tell(self, message: ToFollower, followers: Sequence[FollowerProcess]) -> None:
        if self._alarm.reason is not None:
            raise RankError(self._alarm.reason)
        try:
            for follower in followers:
                tell(follower.socket, message)
        except OSError as error:
            raise self._out_of_step(error) from error

    @contextmanager
    def _in_step(self, message: ToFollower, followers: Sequence[FollowerProcess]) -> Iterator[None]:
        self._tell(message, followers)
        try:
            yield
        except Exception as error:
            raise self._out_of_step(error) from error
        except BaseException:
            self._alarm.reason = "an interrupt has left ranks out of step"
            raise

    def _out_of_step(self, error: BaseException) -> RankError:
        self._alarm.rang.wait(NEWS_S)
        self._alarm.reason = self._alarm.reason or f"ranks are out of step: {error}"
        return RankError(self._alarm.reason)


def _end(alarm: _Alarm, followers: Sequence[FollowerProcess]) -> None:
    """A follower leaves when its socket is closed, whatever it is doing."""
    alarm.is_closing = True
    alarm.reason = "the engine is closed"
    for follower in followers:
        follower.end()
