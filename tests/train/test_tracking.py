"""Tracking: the local log is complete whatever wandb does."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from train import tracking
from train.tracking import Tracker, read_metrics

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, **changes: Any) -> Tracker:
    return Tracker(folder, run_name="run", job_type="distill", **changes)


class FakeWandb:
    """Stands in for the wandb module; records what it is asked, and fails where it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.inits, self.logged = failing, [], []
        self.Settings = dict
        self.finished = threading.Event()

    def init(self, **options: Any) -> "FakeWandb":
        self.inits.append(options)
        self._maybe_fail(f"init-{options['mode']}")
        return self

    def define_metric(self, *names: str, **options: Any) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        self._maybe_fail("log")
        self.logged.append(values)

    def finish(self) -> None:
        if "finish" in self.failing:
            time.sleep(30)
        self.finished.set()

    def _maybe_fail(self, action: str) -> None:
        if action in self.failing:
            raise ConnectionError(f"{action}: no network")


def install(monkeypatch: pytest.MonkeyPatch, *failing: str) -> FakeWandb:
    fake = FakeWandb(*failing)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def three_steps(tracker: Tracker) -> None:
    tracker.start()
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1 / step}, {"tokens_per_s": 100.0})
    tracker.finish()


def test_lines_hold_the_step_and_the_metrics_but_no_timings(tmp_path: Path) -> None:
    three_steps(make(tmp_path))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]


def test_starting_at_a_position_drops_what_came_later(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    tracker.start()
    tracker.log(1, {"loss": 3.0})
    position = tracker.sync()
    tracker.log(2, {"loss": 2.0})
    tracker.finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a line that a crash cut off
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    resumed = make(tmp_path)
    resumed.start(position)
    resumed.log(2, {"loss": 2.5})
    resumed.finish()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]


def test_a_log_that_lost_its_end_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    three_steps(make(tmp_path))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    make(tmp_path).start(size + 10)
    assert "lost its end" in caplog.text
    assert (tmp_path / "metrics.jsonl").stat().st_size == size


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    tracker.start()
    tracker.log(1, {"loss": float("nan"), "norm": float("inf")})
    tracker.finish()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "norm": None}


def test_wandb_gets_group_job_type_and_the_same_id_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    for _ in range(2):
        three_steps(make(tmp_path, wandb="online", group="demo", config={"layers": 12}))
    first, second = fake.inits
    assert first["id"] == second["id"]
    wanted = {"group": "demo", "job_type": "distill", "mode": "online", "resume": "allow", "config": {"layers": 12}}
    assert wanted.items() <= first.items()
    assert fake.logged[0] == {"step": 1, "loss": 1.0, "tokens_per_s": 100.0}
    assert fake.finished.is_set()
    three_steps(make(tmp_path / "other", wandb="online"))
    assert fake.inits[2]["id"] != first["id"]


@pytest.mark.parametrize(
    ("failing", "modes"),
    [
        (("init-online",), ["online", "offline"]),
        (("init-online", "init-offline"), ["online", "offline"]),
        (("log",), ["online"]),
        (("finish",), ["online"]),
    ],
)
def test_an_outage_costs_nothing_but_the_remote_copy(
    failing: tuple[str, ...], modes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "WANDB_FINISH_TIMEOUT_S", 0.2)
    fake = install(monkeypatch, *failing)
    began = time.monotonic()
    three_steps(make(tmp_path, wandb="online"))
    assert time.monotonic() - began < 5
    assert [options["mode"] for options in fake.inits] == modes
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_wandb_is_imported_only_when_used(mode: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from train.tracking import Tracker\n"
        f"tracker = Tracker(Path({str(tmp_path)!r}), run_name='run', job_type='distill', wandb={mode!r})\n"
        "tracker.start(); tracker.log(1, {'loss': 1.0}); tracker.finish()\n"
        "print('wandb' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(mode == "offline")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert bool(list(tmp_path.glob("wandb/offline-run-*"))) == (mode == "offline")
