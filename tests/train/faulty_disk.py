"""A disk that counts what changes it: each write, force to the disk, renaming, removal and new folder.

`counted` calls a function before each change, which may raise, or end the process. `forked` runs work in a process that
may end so. What was written and not forced to the disk by then is known: a power cut may lose it.
"""

import builtins
import ctypes
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REMOVALS = ("unlink", "rmdir")
CHANGES = ("fsync", "rename", "replace", "mkdir", *REMOVALS)
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
NO_NAMESPACE = 77
"""Exit code where the machine lets nobody have a disk of his own."""


class Disk:
    """Of this process, while `counted`."""

    def __init__(self, before: Callable[[str, int], None]) -> None:
        """`before` is told each change's name and number, from 1."""
        self.changes = 0
        self.unsynced: set[Path] = set()
        self._before = before

    def change(self, name: str) -> None:
        self.changes += 1
        self._before(name, self.changes)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*arguments: Any, **options: Any) -> Any:
            self.change(name)
            file = Path(os.readlink(f"/proc/self/fd/{arguments[0]}")) if name == "fsync" else None
            result = call(*arguments, **options)
            if file is not None:
                self.unsynced.discard(file)
            if name in ("rename", "replace"):
                self._moved(*(Path(path) for path in arguments[:2]))
            return result

        return changing

    def open(self, path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode not in ("w", "wb"):
            return io.open(path, mode, *arguments, **options)  # noqa: UP020  -- `open` is this very function
        file = io.BufferedWriter(_File(self, path), buffer_size=256)
        return file if mode == "wb" else io.TextIOWrapper(file, options.get("encoding"), newline=options.get("newline"))

    def _moved(self, source: Path, target: Path) -> None:
        self.unsynced = {
            target / path.relative_to(source) if path.is_relative_to(source) else path for path in self.unsynced
        }


class _File(io.FileIO):
    def __init__(self, disk: Disk, path: Path) -> None:
        disk.change("open")
        super().__init__(path, "w")
        self._disk, self._path = disk, Path(path)

    def write(self, content: Any) -> int | None:
        self._disk.change("write")
        self._disk.unsynced.add(self._path)
        return super().write(content)


@contextmanager
def counted(before: Callable[[str, int], None]) -> Iterator[Disk]:
    disk = Disk(before)
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, disk.wrap(name, getattr(os, name)))
        patch.setattr(builtins, "open", disk.open)
        yield disk


def forked(work: Callable[[], None]) -> int:
    """Does it in a fork of this process; its exit code, 1 after an exception, or the negative signal that ended it."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        work()
        status = 0
    except SystemExit as asked:
        status = int(str(asked))
    finally:
        os._exit(status)


def killed_at(number: int, work: Callable[[], None], *, power_cut: bool) -> int:
    """Does it until that change would begin. Of a `power_cut`, files that are not on the disk come back empty."""

    def work_and_die() -> None:
        truncate = os.truncate

        def before(name: str, change: int) -> None:
            if change == number:
                for path in disk.unsynced if power_cut else ():
                    if path.exists():
                        truncate(path, 0)
                os.kill(os.getpid(), signal.SIGKILL)

        with counted(before) as disk:
            work()

    return forked(work_and_die)


def on_a_small_disk(folder: Path, options: str, work: Callable[[], None]) -> int:
    """Does it where `folder` is a tmpfs mounted with these options, which nobody else sees; its exit code."""

    def mount_and_work() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
            raise SystemExit(NO_NAMESPACE)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
        if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, options.encode()):
            raise SystemExit(NO_NAMESPACE)
        work()

    return forked(mount_and_work)
