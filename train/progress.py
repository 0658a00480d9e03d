"""A progress bar on a terminal, log lines elsewhere; both with the time left."""

import logging
import sys
import time
from types import TracebackType
from typing import Any, ClassVar

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
LEAST_SHARE, LEAST_S = 0.01, 60.0
"""From when on time left is said: work that has hardly begun took what beginnings take."""


def as_duration(seconds: float) -> str:
    """`42s`, `3m07s`, `2h05m`."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Counts work of a known size; use as a context manager."""

    _has_terminal: ClassVar[bool] = False
    """A terminal has room for one bar: work inside of other work has log lines there, too."""

    def __init__(self, title: str, total: float, *, done: float = 0, enabled: bool = True) -> None:
        """`done` is work of an earlier run: it counts as done but not into the speed."""
        self.title, self.total, self.done, self.enabled = title, max(total, 1), done, enabled
        self._already = done
        self._bar: Any = None
        self._task: Any = None
        self._started_at = self._logged_at = time.monotonic()

    def __enter__(self) -> "Progress":
        self._started_at = self._logged_at = time.monotonic()
        if self.enabled and sys.stderr.isatty() and not Progress._has_terminal:
            self._open_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            Progress._has_terminal = False

    def advance(self, amount: float, note: str) -> None:
        """Adds finished work; `note` says what to show beside it."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=note, left=self._left())
        elif self.enabled and time.monotonic() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.info("%s: %d%%, %s, %s left", self.title, 100 * self.done / self.total, note, self._left())

    def skip(self, amount: float) -> None:
        """Takes away work that turned out to be none."""
        self.total = max(self.total - amount, 1)
        if self._bar is not None:
            self._bar.update(self._task, total=self.total)

    def _left(self) -> str:
        done_here, seconds = self.done - self._already, time.monotonic() - self._started_at
        if done_here <= 0 or (done_here < LEAST_SHARE * self.total and seconds < LEAST_S):
            return "?"
        return as_duration(seconds * max(self.total - self.done, 0) / done_here)

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}% {task.fields[note]} {task.fields[left]} left"),
            console=Console(stderr=True),
        )
        self._bar.start()
        Progress._has_terminal = True
        self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, note="", left="?")
