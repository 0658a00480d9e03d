"""Engine processes as their parent sees them: started, called up, connected over a private socket, ended in any state.

A process imports torch and the engine, which takes seconds on a busy machine, and then waits to be called up: so a
spare one can stand by while another serves, without a model and without the device.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from serve.http.options import ServerOptions

ENGINE_COMMAND = (sys.executable, "-P", "-m", "serve.engine.process")
ROOT = str(Path(__file__).resolve().parents[2])
"""Where the engine process finds its modules; `-P` keeps the working directory from getting in front."""
SPARE_AFTER_S = 10.0
"""How long an engine is connected before a spare process stands by behind it: until then others need the processors."""
KILL_S = 10.0
"""How long a killed process may take to be gone; one that waits for a broken driver never is."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
log = logging.getLogger("potstill.server")


def engine_arguments(options: ServerOptions) -> list[str]:
    """What every engine process is started with."""
    return [
        *("--parent", str(os.getpid()), "--queue-wait-s", str(options.queue_wait_s)),
        *("--log-level", options.log_level, "--options", msgspec.json.encode(options.engine).decode()),
    ]


class EngineProcess:
    """Made by `start`, set to work by `call_up`; whoever makes one also calls `end`."""

    def __init__(self, process: asyncio.subprocess.Process, connected: "asyncio.Future[Streams]") -> None:
        self._process = process
        self._connected = connected
        self._exited = asyncio.create_task(process.wait())
        self._listener: asyncio.AbstractServer | None = None

    @classmethod
    async def start(cls, arguments: Sequence[str], path: Path) -> "EngineProcess":
        """Run the command, told to connect to a socket at `path` once called up. OSError when it cannot be run."""
        path.unlink(missing_ok=True)
        connected: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
        listener = await asyncio.start_unix_server(lambda *streams: connected.set_result(streams), path)
        python_path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                *("--socket", str(path)),
                env=os.environ | {"PYTHONPATH": python_path},
                stdin=asyncio.subprocess.PIPE,
            )
        except BaseException:
            listener.close()
            raise
        engine = cls(process, connected)
        engine._listener = listener
        return engine

    def call_up(self, adapters: dict[str, str] | None) -> None:
        """Let it load and serve. `adapters`: folders by name to load in place of those of its options, if not None."""
        if (stdin := self._process.stdin) is not None:  # as it always is, of a process that `start` made
            stdin.write(msgspec.json.encode(adapters) + b"\n")
            stdin.close()

    @property
    def has_exited(self) -> bool:
        return self._exited.done()

    async def connection(self) -> Streams | None:
        """The connection, once it is there; None when the process ends without one."""
        first: set[asyncio.Future[Any]] = {self._connected, self._exited}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        return self._connected.result() if self._connected.done() else None

    async def end(self, patience_s: float) -> int | None:
        """Wait for its end for that long, then kill it. Its exit code; None when even that does not end it."""
        if self._listener is not None:
            self._listener.close()
        try:
            await asyncio.wait({self._exited}, timeout=patience_s)
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await asyncio.wait({self._exited}, timeout=KILL_S)
        if not self._exited.done():
            self._exited.cancel()
        return self._process.returncode


class EngineProcesses:
    """One process after another; while one serves, a spare may stand by."""

    def __init__(self, arguments: Sequence[str], folder: Path, *, has_spare: bool) -> None:
        """`folder`: of the sockets."""
        self._arguments, self._folder, self._has_spare = arguments, folder, has_spare
        self._num_started = 0
        self._spare: EngineProcess | None = None

    async def take(self) -> EngineProcess:
        """The spare, or a fresh one; to be called up, and ended, by whoever takes it. OSError as from `start`."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare.has_exited:
            return spare
        if spare is not None:
            await spare.end(0.0)
        return await self._start()

    async def keep_spare(self) -> None:
        """Start a spare after a while, if there is to be one; that it cannot be is said, and the next starts fresh."""
        if not self._has_spare:
            return
        await asyncio.sleep(SPARE_AFTER_S)
        try:
            self._spare = await self._start()
        except OSError as error:
            log.warning("no spare engine process can be run: %s", error)

    async def close(self) -> None:
        """End the spare."""
        if self._spare is not None:
            await self._spare.end(0.0)

    async def _start(self) -> EngineProcess:
        self._num_started += 1
        return await EngineProcess.start(self._arguments, self._folder / f"engine-{self._num_started}.sock")
