"""Parts of a GPU hour that do what parts may do: find figures, hang, crash, fail."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu.figures import ROOFLINE, Figure, Goal
from bench.gpu.parts import Part
from bench.gpu.task import Task, Unfinished

SOURCE = "tests/bench/gpu_parts.py"


def part(function: str, limit_s: float = 30.0, needs: tuple[str, ...] = (), **options: Any) -> Part:
    return Part(function, f"tests.bench.gpu_parts:{function}", limit_s, (SOURCE,), needs, options)


def steady(task: Task) -> Iterator[Figure]:
    note_run(task, "steady")
    yield Figure("speed", "GB/s", 1.0)
    yield Figure("speed", "GB/s", 30.0, peers={"slow": 10.0, "fast": 40.0}, roofline=100.0)


def beaten(task: Task) -> Iterator[Figure]:
    yield Figure("memory", "GB", 2.0, peers={"dense": 10.0}, goals=(Goal("dense", 0.1),), less_is_better=True)


def peer(task: Task) -> Iterator[Figure]:
    yield Figure("speed", "GB/s", peers={"fastest": 60.0}, goals=(Goal(ROOFLINE, 0.8),))


def hanging(task: Task) -> Iterator[Figure]:
    """Beside a process of its own, which ignores polite signals; unless there is a file that says otherwise."""
    note_run(task, "hanging")
    yield Figure("before the hang", "GB/s", 5.0)
    if Path(task.results, "go").exists():
        return
    command = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", command])
    Path(task.results, "pids").write_text(f"{os.getpid()} {child.pid}")
    print("waiting for a device that never answers", flush=True)
    time.sleep(60)


def crashing(task: Task) -> Iterator[Figure]:
    yield Figure("before the crash", "GB/s", 6.0)
    print("illegal memory access", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def failing(task: Task) -> Iterator[Figure]:
    yield Figure("before the failure", "GB/s", 7.0)
    raise RuntimeError("CUDA error: out of luck\nand more")


def unfinished(task: Task) -> Iterator[Figure]:
    note_run(task, "unfinished")
    yield Figure("the first shapes", "GB/s", 8.0)
    raise Unfinished("3 shapes are left")


def note_run(task: Task, name: str) -> None:
    with open(Path(task.results, f"{name}.runs"), "a") as runs:
        runs.write("x")
