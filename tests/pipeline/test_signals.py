import os
import signal
from contextlib import closing
from typing import NoReturn

import pytest

import train.accelerator
from pipeline.errors import RunInterrupted
from pipeline.processes import Processes
from pipeline.signals import ended_by_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("what", [None, ValueError("of C code"), RuntimeError("of C code")])
def test_a_signal_is_an_interruption_whatever_is_made_of_it(number: int, what: Exception | None) -> None:
    before = signal.getsignal(number)
    with pytest.raises(RunInterrupted, match="the same command goes on"), ended_by_signals():
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            raise (what or KeyboardInterrupt) from None
    assert signal.getsignal(number) == before


def test_an_error_without_a_signal_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="of the user"), ended_by_signals():
        raise ValueError("of the user")


def test_who_is_interrupted_while_it_joins_has_nothing_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was half imported then is not asked for again."""
    calls = []

    def joining() -> NoReturn:
        calls.append("asked")
        raise KeyboardInterrupt

    monkeypatch.setattr(train.accelerator, "this_accelerator", joining)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with closing(Processes()) as processes, pytest.raises(KeyboardInterrupt):
        processes.wait()
    assert calls == ["asked"]
