"""How far a long read is: one line redrawn on a terminal, else a line in the log now and then."""

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)

QUIET_S = 0.5
"""What ends sooner says nothing."""
REDRAW_S, LOG_S = 0.1, 10.0


class ReadingProgress:
    """A context manager; `heard` is told how many bytes more were read."""

    def __init__(self, what: str, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._clock = what, total_bytes, clock
        self._read = 0
        self._began = clock()
        self._on_terminal = sys.stderr.isatty()
        self._is_drawn = False
        self._next = self._began + (QUIET_S if self._on_terminal else LOG_S)

    def heard(self, num_bytes: int) -> None:
        self._read += num_bytes
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (REDRAW_S if self._on_terminal else LOG_S)
        if self._on_terminal:
            self._is_drawn = True
            print(f"\r{self.sentence()}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            log.info("%s", self.sentence())

    def sentence(self) -> str:
        """Such as "loading demo: 1.2 of 3.4 GB, 35 %, 12 s left"."""
        read = min(self._read, self._total)
        left_s = (self._total - read) * (self._clock() - self._began) / max(read, 1)
        percent = 100 * read // max(self._total, 1)
        return f"{self._what}: {read / 1e9:.1f} of {self._total / 1e9:.1f} GB, {percent} %, {left_s:.0f} s left"

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
