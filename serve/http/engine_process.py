"""One engine process as its parent sees it: started, connected over a private socket, ended in any state."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from serve.http.options import ServerOptions

ENGINE_COMMAND = (sys.executable, "-P", "-m", "serve.engine.process")
ROOT = str(Path(__file__).resolve().parents[2])
"""Where the engine process finds its modules; `-P` keeps the working directory from getting in front."""
KILL_S = 10.0
"""How long a killed process may take to be gone; one that waits for a broken driver never is."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def engine_arguments(options: ServerOptions, adapters: dict[str, str] | None = None) -> list[str]:
    """What the engine process is told. `adapters`: those that are loaded by now, of engines that load such."""
    config, restored = options.engine, {}
    if config.enable_lora and adapters is not None:
        config, restored = replace(config, adapters={}), adapters
    return [
        *("--parent", str(os.getpid()), "--queue-wait-s", str(options.queue_wait_s)),
        *("--log-level", options.log_level, "--options", msgspec.json.encode(config).decode()),
        *("--restore-adapters", msgspec.json.encode(restored).decode()),
    ]


class EngineProcess:
    """Made by `start`; whoever makes one also calls `end`."""

    def __init__(self, process: asyncio.subprocess.Process, connected: "asyncio.Future[Streams]") -> None:
        self._process = process
        self._connected = connected
        self._exited = asyncio.create_task(process.wait())
        self._listener: asyncio.AbstractServer | None = None

    @classmethod
    async def start(cls, arguments: Sequence[str], path: Path) -> "EngineProcess":
        """Run the command, told to connect to a socket at `path`. OSError when it cannot be run."""
        path.unlink(missing_ok=True)
        connected: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
        listener = await asyncio.start_unix_server(lambda *streams: connected.set_result(streams), path)
        python_path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        process = await asyncio.create_subprocess_exec(
            *arguments, "--socket", str(path), env=os.environ | {"PYTHONPATH": python_path}
        )
        engine = cls(process, connected)
        engine._listener = listener
        return engine

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
