"""Forks potstill commands from a warm process and kills them: imports and set-up happen once, not once a kill.

`python -m tests.pipeline.fork_server`, then one JSON line a command on standard input:
`{"arguments": [...], "kill_after_s": 0.4, "signal": 9}`; the answer is `{"status": -9, "seconds": 0.4}`, status being
an exit code or a negative signal.
The first command runs in the warm process itself, so that its forks find everything loaded.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.pipeline.tiny_run import ROOT


class ForkServer:
    """The client's side; use as a context manager."""

    def __enter__(self) -> "ForkServer":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.fork_server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def run(
        self, arguments: list[str], kill_after_s: float | None = None, number: int = signal.SIGKILL
    ) -> dict[str, Any]:
        """Runs one command in a fork; it gets the signal after so many seconds unless it has ended.

        One that can be caught comes no sooner than the command catches it: before, nothing has begun.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the fork server is closed")
        order = {"arguments": arguments, "kill_after_s": kill_after_s, "signal": number}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve() -> None:
    """The warm side."""
    import torch

    from pipeline.cli import main

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    warm = False
    for line in sys.stdin:
        order = json.loads(line)
        started = time.monotonic()
        if not warm:
            status, warm = main(order["arguments"]), True
        elif (child := os.fork()) == 0:
            os._exit(main(order["arguments"]))
        else:
            status = _wait(child, started, order["kill_after_s"], order["signal"])
        answers.write(json.dumps({"status": status, "seconds": time.monotonic() - started}) + "\n")
        answers.flush()


def _wait(child: int, started: float, kill_after_s: float | None, number: int) -> int:
    begun = number == signal.SIGKILL
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        begun = begun or _catches(child, number)
        if begun and kill_after_s is not None and time.monotonic() - started >= kill_after_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
            kill_after_s = None
        time.sleep(0.001)


def _catches(child: int, number: int) -> bool:
    """As Linux tells it."""
    found = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{child}/status").read_text())
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


if __name__ == "__main__":
    serve()
