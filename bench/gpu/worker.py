"""Measures one part in this process, and has every figure on disk as soon as it is there.

    python -m bench.gpu.worker MODULE:FUNCTION FILE TASK      # started by `python -m bench.gpu`

The function is given a `Task` (TASK: its fields as JSON) and yields figures; a later one replaces an earlier one of the
same name. FILE holds them, the status and, unless that is "done", the reason.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from bench.gpu.figures import Figure
from bench.gpu.task import NotDone, Task
from pipeline.files import write_atomically


def measure(target: str, path: Path, task: Task) -> int:
    """The exit code: 0 for a part that is done."""
    figures: dict[str, Figure] = {}

    def write(status: str, reason: str = "") -> None:
        plain = [figure.to_plain() for figure in figures.values()]
        content = {"status": status, "reason": reason, "figures": plain}
        write_atomically(path, json.dumps(content, indent=1).encode())

    write("running")
    status, reason = "done", ""
    try:
        for figure in _found(target, task):
            figures[figure.name] = figure
            write("running")
    except NotDone as error:
        status, reason = error.status, str(error)
    except Exception as error:
        traceback.print_exc()
        status, reason = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
    write(status, reason)
    return 0 if status == "done" else 1


def _found(target: str, task: Task) -> Iterator[Figure]:
    module, _, function = target.partition(":")
    found: Iterator[Figure] = getattr(import_module(module), function)(task, **task.options)
    return found


if __name__ == "__main__":
    sys.exit(measure(sys.argv[1], Path(sys.argv[2]), Task(**json.loads(sys.argv[3]))))
