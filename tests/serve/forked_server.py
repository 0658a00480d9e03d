"""`python -m serve`, server and engine forked from a process that has imported what they need.

Fresh interpreters, as test_promises.py has them, import for longer than most tests take.
"""

import asyncio
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from serve.engine import process
from serve.http.engine_process import ENGINE_COMMAND
from tests.forked import CONTEXT, take_over

ROOT = Path(__file__).resolve().parents[2]


class ForkedServer:
    """What is used of a `subprocess.Popen`."""

    def __init__(
        self, main: Callable[[], int], arguments: Sequence[str], environment: Mapping[str, str], errors: TextIO
    ) -> None:
        output, written = os.pipe()
        streams = [Connection(os.dup(file)) for file in (0, written, errors.fileno())]
        os.close(written)
        self._process = CONTEXT.Process(target=run, args=(main, list(arguments), dict(environment), streams))
        self._process.start()
        for stream in streams:
            stream.close()
        self.stdout = os.fdopen(output)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("serve", timeout_s or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run(
    main: Callable[[], int], arguments: list[str], environment: dict[str, str], streams: Sequence[Connection]
) -> None:
    """Becomes the server."""
    take_over(environment, ROOT, streams)
    fork_engines()
    sys.argv = ["serve", *arguments]
    sys.exit(main())


def fork_engines() -> None:
    """From now on what this process would start as an engine is a fork of it."""
    asyncio.create_subprocess_exec = partial(start, asyncio.create_subprocess_exec)  # type: ignore[assignment]


async def start(create: Any, *command: str, **options: Any) -> asyncio.subprocess.Process:
    """As asyncio does; the child that would run an engine is one as it stands."""
    size = len(ENGINE_COMMAND)
    if command[:size] == ENGINE_COMMAND:
        options["preexec_fn"] = partial(be_engine, command[size:])
    return await create(*command, **options)


def be_engine(arguments: Sequence[str]) -> None:
    """Runs an engine and ends, with nothing open that a command would not have."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    sys.argv, sys.stdin = ["engine", *arguments], os.fdopen(0, closefd=False)
    code = 1
    try:
        code = process.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
