"""What a progress line says of the time left."""

import logging
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
