"""Runs Python that a model wrote against tests, in a process of its own.

What it protects from is what models write by mistake. The kernel limits CPU time, memory, file sizes and (unless you
are root) new processes; the process has an empty environment, a temporary folder, a session of its own that is killed
whatever happens, and ends by itself when this one dies. Python's audit hook refuses sockets, processes, signals, and
files outside the folder but for reading Python's own library. What it does not protect from is code written to break
out: the hook lives in the process that it watches, and nothing separates that process from the machine as a container
or a user of its own would. A model that you do not trust that far belongs into one of these, with all of potstill.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

CPU_S, MEMORY_BYTES = 3, 2**29
GUARD = Path(__file__).with_name("guard.py")


def passes(code: str, tests: Sequence[str], *, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES) -> bool:
    """Whether every test, a Python expression, is true after `code` has run; False for whatever goes wrong."""
    token = secrets.token_hex(16)  # that the end was reached: exit codes can be had more cheaply
    checks = "".join(f"if not ({test}):\n    raise SystemExit(1)\n" for test in tests)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(f"{code}\n{checks}print('\\n{token}')\n", "utf-8", "surrogatepass")
        command = [sys.executable, "-I", "-S", str(GUARD), "program.py", str(cpu_s), str(memory_bytes)]
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                _let_end(process.pid, within_s=3 * cpu_s)
            finally:  # until `wait`, the group and its number are the process's own, even when it has ended
                os.killpg(process.pid, signal.SIGKILL)
                ended_well = process.wait() == 0
        return ended_well and (folder / "output").read_bytes().rstrip().endswith(token.encode())


def _let_end(pid: int, *, within_s: float) -> None:
    """Returns when the process has ended, or the time has."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.005)
