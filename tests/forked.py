"""Processes that train or serve, forked from one that has imported what they need: alone, or several as torchrun does.

An import of torch, and of what it and accelerate import at first use, takes longer than most tests do.
"""

import multiprocessing
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


PORTS = range(20_000, 32_768)
"""Below those that the system gives to whoever asks for any: one of these could be gone before our process listens."""


def free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"none of a hundred ports from {PORTS.start} to {PORTS.stop - 1} is free")


def launched(count: int) -> list[dict[str, str]]:
    """What torchrun says to each of so many processes; tests/pipeline/test_launch.py starts some by torchrun itself."""
    port = free_port()
    everybody = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {name: str(value) for name, value in {**everybody, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(count)
    ]


@contextmanager
def ranks(
    count: int, target: Callable[..., Any], *arguments: Any, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[list[ForkServerProcess]]:
    """So many processes that call `target`, whose result is the exit code; none is left at the end."""
    given = [{**(environment or {}), **said} for said in launched(count)]
    processes = [CONTEXT.Process(target=_run, args=(variables, log, target, arguments)) for variables in given]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def end_of(processes: list[ForkServerProcess], timeout_s: float = 240.0) -> list[int | None]:
    """Their exit codes, once all have ended, or one has that failed; then the others are ended, as torchrun does it."""
    waiting = {process.sentinel: process for process in processes}
    while waiting and (ready := wait(list(waiting), timeout_s)):
        if any(waiting.pop(sentinel).exitcode for sentinel in ready):  # type: ignore[call-overload]
            break
    for process in waiting.values():
        process.terminate()
        process.join(timeout_s)
    return [process.exitcode for process in processes]


def take_over(environment: Mapping[str, str], folder: Path | str, files: Sequence[Connection]) -> None:
    """Let this process stand where a command would: its variables, its folder, and its standard streams."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin = os.fdopen(0, closefd=False)
    tempfile.tempdir = None  # a variable says where
    torch.set_num_threads(1)


def _run(variables: dict[str, str], log: Path, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= variables
    with log.open("a") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    sys.exit(target(*arguments))
