"""C sources that take up to half a minute of a processor to compile."""

import ctypes
import fcntl
from contextlib import suppress
from pathlib import Path

from kernels.common.compiled import compiled
from kernels.common.processor import Needs


def compiled_by_one(source: Path, needs: Needs) -> ctypes.CDLL | None:
    """What `compiled` says; one process compiles, and others that want the same wait for it."""
    with source.open() as file:
        with suppress(OSError):  # where files cannot be locked, each compiles for itself
            fcntl.flock(file, fcntl.LOCK_EX)
        return compiled(source, needs)
