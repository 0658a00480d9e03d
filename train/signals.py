"""SIGTERM and SIGINT ask for a stop: the trainer saves and returns instead of dying in the middle of a step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(BaseException):
    """Raised inside `interruptible` when a stop is asked for. Not an Exception: callbacks must not swallow it."""


class StopSignals:
    """Turns signals into a flag for as long as its context is open.

    Only Python's main thread may install handlers; elsewhere the flag stays down. A second SIGINT is not held back:
    whoever presses Ctrl-C twice wants out at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interruptible = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, a stop raises StopRequested at once: for long work that can be thrown away, such as evaluation."""
        if self.requested:
            raise StopRequested
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        if self._interruptible:
            raise StopRequested
