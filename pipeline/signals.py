"""How a signal ends a command: in peace and with one sentence, whatever was being computed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pipeline.errors import RunInterrupted
from train.signals import SIGNALS


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM ends like Ctrl-C; raises RunInterrupted once one of them came.

    A library's C code may turn the interruption into an error of its own, as reading a tensor of safetensors does, so
    any error behind a signal is taken for it.
    """
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if came or isinstance(error, KeyboardInterrupt):
            raise RunInterrupted("interrupted; the same command goes on from here") from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
