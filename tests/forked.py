"""Processes that train, forked from one that has imported what they need: alone, or several as torchrun starts them.

An import of torch, and of what it and accelerate import at first use, takes longer than most tests train.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.train.toy_process", "pipeline.run", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"]
)


def launched(count: int) -> list[dict[str, str]]:
    """What torchrun says to each of so many processes; tests/pipeline/test_launch.py starts some by torchrun itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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


def _run(variables: dict[str, str], log: Path, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= variables
    with log.open("a") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    sys.exit(target(*arguments))
