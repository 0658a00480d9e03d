"""Parts of a GPU hour, all in this one process: python -m tests.bench.gpu_hour_here FOLDER PART [PART ...]

A process of each part's own, as `python -m bench.gpu` starts it, imports torch anew, which takes longer than most parts
do on tiny models.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path

from bench.gpu import hour
from bench.gpu.parts import PARTS
from bench.gpu.process import ENVIRONMENT, Ended
from bench.gpu.task import Task
from bench.gpu.worker import measure
from bench.train import sides


def run_here(command: Sequence[str], log: Path, limit_s: float, *, cwd: Path, tick: Callable[[float], None]) -> Ended:
    """What `bench.gpu.process.run_limited` does with a worker's command."""
    target, path, task = command[-3:]
    began = time.monotonic()
    with log.open("w") as output, redirect_stdout(output), redirect_stderr(output):
        code = measure(target, Path(path), Task(**json.loads(task)))
    return Ended(code, time.monotonic() - began)


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    hour.run_limited = run_here
    sides.get_context = lambda method: get_context("fork")  # sides of training have processes of their own
    folder, *names = sys.argv[1:]
    done = hour.Hour(Path(folder), hour.ask_machine(), tiny=True, minutes=60)
    sys.exit(done.run([PARTS[name] for name in names], again=False))
