"""Tracking: the local log is complete, and cut back where a run resumes."""

import json
from pathlib import Path

import pytest

from train.tracking import Tracker, read_metrics


def three_steps(tracker: Tracker) -> None:
    tracker.start()
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1 / step}, {"tokens_per_s": 100.0})
    tracker.finish()


def test_lines_hold_the_step_and_the_metrics_but_no_timings(tmp_path: Path) -> None:
    three_steps(Tracker(tmp_path))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]


def test_starting_at_a_position_drops_what_came_later(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.start()
    tracker.log(1, {"loss": 3.0})
    position = tracker.sync()
    tracker.log(2, {"loss": 2.0})
    tracker.finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a line that a crash cut off
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    resumed = Tracker(tmp_path)
    resumed.start(position)
    resumed.log(2, {"loss": 2.5})
    resumed.finish()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]


def test_a_log_that_lost_its_end_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    three_steps(Tracker(tmp_path))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    Tracker(tmp_path).start(size + 10)
    assert "lost its end" in caplog.text
    assert (tmp_path / "metrics.jsonl").stat().st_size == size


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path)
    tracker.start()
    tracker.log(1, {"loss": float("nan"), "norm": float("inf")})
    tracker.finish()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "norm": None}
