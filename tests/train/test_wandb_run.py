"""wandb as a guest: what it is asked for, and that no failure of it reaches training."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from train import wandb_run
from train.tracking import Tracker, read_metrics
from train.wandb_run import WandbRun

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, **changes: Any) -> WandbRun:
    return WandbRun(folder, **{"mode": "online", "name": "run", "job_type": "distill"} | changes)


class FakeWandb:
    """Stands in for the wandb module; records what it is asked, and fails where it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.inits, self.logged = failing, [], []
        self.Settings = dict
        self.exit_code: int | None = None
        self.dir = "somewhere/files"
        self.released = threading.Event()

    def init(self, **options: Any) -> "FakeWandb":
        self.inits.append(options)
        self._maybe_fail(f"init-{options['mode']}")
        return self

    def define_metric(self, *names: str, **options: Any) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        self._maybe_fail("log")
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self._maybe_fail("finish")
        self.exit_code = exit_code

    def _maybe_fail(self, action: str) -> None:
        if f"hanging {action}" in self.failing:
            self.released.wait(30)
        if action in self.failing:
            raise ConnectionError(f"{action}: no network")


def install(monkeypatch: pytest.MonkeyPatch, *failing: str) -> FakeWandb:
    fake = FakeWandb(*failing)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def three_steps(folder: Path, **options: Any) -> None:
    run = make(folder, **options)
    tracker = Tracker(folder, run)
    tracker.start()
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1 / step}, {"tokens_per_s": 100.0})
    tracker.finish()
    run.finish()


def test_wandb_gets_group_job_type_and_the_same_id_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    for _ in range(2):
        three_steps(tmp_path, group="demo", config={"layers": 12})
    first, second = fake.inits
    assert first["id"] == second["id"]
    wanted = {"group": "demo", "job_type": "distill", "mode": "online", "resume": "allow", "config": {"layers": 12}}
    assert wanted.items() <= first.items()
    assert fake.logged[0] == {"step": 1, "loss": 1.0, "tokens_per_s": 100.0}
    assert fake.exit_code == 0
    three_steps(tmp_path / "other")
    assert fake.inits[2]["id"] != first["id"]


def test_what_the_environment_says_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    three_steps(tmp_path)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    three_steps(tmp_path, run_id="asked-for")
    usual, asked = fake.inits
    assert (usual["project"], usual["dir"]) == ("potstill", str(tmp_path))
    assert (asked["project"], asked["dir"], asked["id"]) == ("mine", str(tmp_path / "elsewhere"), "asked-for")


@pytest.mark.parametrize(
    ("failing", "modes", "said"),
    [
        (("init-online",), ["online", "offline"], "wandb cannot start online (init-online: no network)"),
        (("init-online", "init-offline"), ["online", "offline"], "wandb cannot start offline"),
        (("log",), ["online"], "wandb failed (log: no network); no more of run is sent to it."),
        (("hanging finish",), ["online"], "wandb has not answered"),
        (("hanging log",), ["online"], "wandb has not answered"),
        (("hanging init-online",), ["online"], "wandb has not answered"),
    ],
)
def test_an_outage_costs_nothing_but_the_remote_copy(
    failing: tuple[str, ...],
    modes: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(wandb_run, "FINISH_TIMEOUT_S", 0.2)
    fake = install(monkeypatch, *failing)
    began = time.monotonic()
    three_steps(tmp_path)
    assert time.monotonic() - began < 5
    fake.released.set()
    assert [options["mode"] for options in fake.inits] == modes
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert said in caplog.text


@pytest.mark.parametrize("asked", [None, "true"])
def test_wandbs_own_telemetry_is_off_unless_asked_for(
    asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold up the end of the process: tests/train/test_tracker_outages.py."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", asked or "")
    if asked is None:
        monkeypatch.delenv("WANDB_ERROR_REPORTING")
    found: list[str | None] = []
    fake = install(monkeypatch)
    monkeypatch.setattr(fake, "init", lambda **options: found.append(os.environ.get("WANDB_ERROR_REPORTING")))
    three_steps(tmp_path)
    assert found[0] == (asked or "false")


def test_an_upload_is_waited_for_as_long_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_run, "FINISH_TIMEOUT_S", 0.1)
    fake = install(monkeypatch, "hanging finish")
    run = make(tmp_path)
    threading.Timer(1.0, fake.released.set).start()
    run.finish(patience_s=30)
    assert fake.exit_code == 0


def test_no_step_waits_and_what_was_not_taken_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_run, "MOST_WAITING", 100)
    fake = install(monkeypatch, "hanging log")
    run, slowest = make(tmp_path), 0.0
    for step in range(1000):
        began = time.monotonic()
        run.log({"step": step})
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 1
    fake.released.set()
    run.finish()
    assert 100 <= len(fake.logged) <= 101
    assert f"it has {1000 - len(fake.logged)} measurements of run less" in caplog.text


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_wandb_is_imported_only_when_used(mode: str, tmp_path: Path) -> None:
    remote = "None" if mode == "disabled" else f"WandbRun(folder, mode={mode!r}, name='run', job_type='distill')"
    code = (
        "import sys; from pathlib import Path\n"
        "from train.tracking import Tracker; from train.wandb_run import WandbRun\n"
        f"folder = Path({str(tmp_path)!r}); run = {remote}; tracker = Tracker(folder, run)\n"
        "tracker.start(); tracker.log(1, {'loss': 1.0}); tracker.finish()\n"
        "if run is not None: run.finish()\n"
        "print('wandb' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(mode == "offline")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert bool(list(tmp_path.glob("wandb/offline-run-*"))) == (mode == "offline")
