"""A command in a process group of its own, which neither its limit nor whoever waits for it lets live on."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
TICK_S = 1.0
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
"""Last lines are there even of what is killed, and nobody waits for a network that is not there."""
TAIL_LINES, TAIL_CHARACTERS = 20, 3000


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None
    """The exit code, minus the signal that killed it; None: it was killed at its limit."""
    seconds: float


def run_limited(
    command: Sequence[str], log: Path, limit_s: float, *, cwd: Path, tick: Callable[[float], None] = lambda passed: None
) -> Ended:
    """Runs a command, whose output goes to `log`, for at most `limit_s`; `tick` hears every second how long it has run.

    Its whole group is killed at the limit, when it ends, and when the caller is interrupted.
    """
    began = time.monotonic()
    with (
        open(log, "wb") as output,
        subprocess.Popen(
            command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=die_with_parent, env=os.environ | ENVIRONMENT,
        ) as process,
    ):  # fmt: skip
        try:
            while (passed := time.monotonic() - began) < limit_s:
                with suppress(subprocess.TimeoutExpired):
                    return Ended(process.wait(min(TICK_S, limit_s - passed)), time.monotonic() - began)
                tick(time.monotonic() - began)
            return Ended(None, time.monotonic() - began)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Linux: the kernel ends this process when the one that started it dies, even by SIGKILL."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def last_lines(log: Path) -> list[str]:
    """The end of what a command said."""
    if not log.exists():
        return []
    return log.read_bytes()[-TAIL_CHARACTERS:].decode(errors="replace").splitlines()[-TAIL_LINES:]
