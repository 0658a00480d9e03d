"""What runs first in the process of `sandbox.py`: limits and a fence, then the program in this folder.

Run as `python -I -S guard.py PROGRAM CPU_SECONDS BYTES`, with a temporary folder as the current one. It imports nothing
of ours.
"""

import os
import resource
import runpy
import signal
import sys
from typing import Any

FILE_BYTES = 2**20
"""Most that a file may grow to, its output too."""
NO_MODULES = frozenset({"_ctypes", "_posixshmem", "_posixsubprocess", "ctypes"})
"""These can do what no audit event tells of."""
HARMLESS = frozenset(
    {
        "array.__new__",
        "builtins.id",
        "code.__new__",
        "compile",
        "exec",
        "function.__new__",
        "marshal.loads",
        "object.__delattr__",
        "object.__getattr__",
        "object.__setattr__",
        "os.listdir",
        "os.scandir",
        "sys._getframe",
        "sys.excepthook",
        "time.sleep",
    }
)
"""Audit events (PEP 578) that pass. What is not listed is refused: sockets, processes, signals, changed files, mmap."""


def limit(cpu_s: int, memory_bytes: int) -> None:
    """What the kernel enforces from here on. A wall clock of twice the CPU time ends a program that sleeps."""
    for what, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(what, (most, most))
    signal.alarm(2 * cpu_s)


def fence(folder: str) -> None:
    """Lets Python read its library and this folder, write in the folder, and do nothing else outside itself."""
    own, readable = folder + os.sep, (os.path.dirname(os.__file__) + os.sep, folder + os.sep)
    harmless, modules, realpath = HARMLESS, NO_MODULES, os.path.realpath
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in harmless or event.startswith("cpython."):
            return
        if event == "import" and arguments[0] not in modules:
            return
        if event == "open" and isinstance(arguments[1], str):  # os.open has no mode; it could lead out by a descriptor
            path, _, flags = arguments
            if isinstance(path, int) or realpath(path).startswith(own if flags & writing else readable):
                return
        raise PermissionError(f"not in the sandbox: {event}")

    sys.addaudithook(refuse)


if __name__ == "__main__":
    program, cpu_s, memory_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    limit(cpu_s, memory_bytes)
    fence(os.path.realpath("."))
    runpy.run_path(program, run_name="__main__")
