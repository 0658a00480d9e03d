"""What a progress line says of the time left."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest

from train import progress
from train.progress import Progress


@pytest.mark.parametrize(
    ("seconds", "done", "said"),
    [
        (11, 0.0, "? left"),  # nothing to go by
        (11, 5.0, "? left"),  # the first of many: a model was still being loaded
        (11, 10.0, "18m09s left"),
        (70, 5.0, "3h52m left"),  # a week of training is not silent until 1 %
        (20, 500.0, "20s left"),
    ],
)
def test_time_left_is_said_once_there_is_something_to_go_by(
    seconds: float, done: float, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with caplog.at_level(logging.INFO, logger="train.progress"), Progress("training", 1000) as shown:
        now[0] += seconds
        shown.advance(done, "3 tokens/s")
    assert caplog.messages == [f"training: {done / 10:.0f}%, 3 tokens/s, {said}"]


def test_earlier_work_counts_as_done_but_not_into_the_speed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with caplog.at_level(logging.INFO, logger="train.progress"), Progress("training", 1000, done=900) as shown:
        now[0] += 30
        shown.advance(50, "")
    assert caplog.messages == ["training: 95%, , 30s left"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_bar_and_work_inside_of_it_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, logger="train.progress"):
        with Progress("training", 2) as outer:
            with Progress("measuring", 2) as inner:
                inner.advance(1, "held-out text")
            outer.advance(1, "3 tokens/s")
        with Progress("rounding", 2) as next_one:
            next_one.advance(1, "layer 1")
    assert caplog.messages == ["measuring: 50%, held-out text, 0s left"]
    shown = terminal.getvalue()
    assert "3 tokens/s" in shown and "layer 1" in shown and "measuring" not in shown
