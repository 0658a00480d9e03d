"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0, *, every_s: float = 0.01) -> None:
    """Return as soon as `holds()`; AssertionError when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(every_s)
