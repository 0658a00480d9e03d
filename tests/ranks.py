"""Ranks of tensor parallelism as threads of this process, over gloo."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from model.collectives import Grid, Group
from serve.config import EngineConfig
from serve.engine import ranks as ranks_module
from serve.engine.follower import follow
from serve.engine.rank_messages import Loaded
from serve.engine.ranks import FollowerProcess, Ranks

Result = TypeVar("Result")


def in_ranks(count: int, work: Callable[[Group], Result]) -> list[Result]:
    """What `work` returns in each of so many ranks, which have met."""
    store = dist.HashStore()

    def run(index: int) -> Result:
        group = Group(index, count)
        group.join_by(store, torch.device("cpu"))
        return work(group)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class FollowerThread(FollowerProcess):
    """A follower of an engine that costs no start of Python."""

    def __init__(self, rank: int, config: EngineConfig, meeting_point: Path) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        self._thread = Thread(target=self._follow, args=(theirs, config, meeting_point), daemon=True)
        self._thread.start()

    def _follow(self, theirs: socket.socket, config: EngineConfig, meeting_point: Path) -> None:
        with theirs:
            try:
                follow(theirs, self.rank, config, meeting_point)
            except (EOFError, OSError):
                """Rank 0 has closed its end."""

    def wait(self) -> int:
        self._thread.join()
        return 0

    def end(self) -> None:
        self.socket.close()
        self.wait()


class IdleFollower(FollowerProcess):
    """A process that reads what it is told and does nothing."""

    def __init__(self, rank: int, config: EngineConfig, meeting_point: Path) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)

    def answer(self, expected: type[Any]) -> Any:
        """That it has done everything, with room for any number of pages."""
        return expected(2**30) if expected is Loaded else expected()


@contextmanager
def idle_ranks(count: int) -> Iterator[Ranks]:
    """Rank 0's side of ranks that compute nothing."""
    started, joined = ranks_module.FollowerProcess, Grid.join
    ranks_module.FollowerProcess, Grid.join = IdleFollower, lambda *arguments: None  # type: ignore
    try:
        ranks = Ranks(EngineConfig("none", tensor_parallel_size=count), torch.device("cpu"))
    finally:
        ranks_module.FollowerProcess, Grid.join = started, joined  # type: ignore
    try:
        yield ranks
    finally:
        ranks.close()
