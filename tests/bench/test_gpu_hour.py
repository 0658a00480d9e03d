"""A GPU hour without a GPU: no part can end it, everything found is kept, what is done is not done again."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import hour
from bench.gpu.__main__ import main
from bench.gpu.figures import ITSELF, ROOFLINE, Figure, Goal, join, table_of
from bench.gpu.hour import Hour, Progress
from bench.gpu.parts import PARTS, Part, parts_named
from bench.gpu.task import Task
from tests.bench.gpu_parts import part
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MACHINE: dict[str, Any] = {"gpu": "NVIDIA H100 80GB HBM3", "packages": {"torch": "2.11.0", "triton": "3.6.0"}}
Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Runs these parts and returns what is on disk then."""

    def run(
        *parts: Part, code: int = 0, again: bool = False, minutes: float = 60, machine: dict[str, Any] = MACHINE
    ) -> dict[str, Any]:
        monkeypatch.setattr(hour, "PARTS", {one.name: one for one in parts})
        assert Hour(tmp_path, machine, tiny=False, minutes=minutes).run(parts, again=again) == code
        found: dict[str, Any] = json.loads((tmp_path / "gpu-nvidia-h100-80gb-hbm3.json").read_text())
        return found

    return run


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_no_part_ends_the_run_and_what_each_found_is_kept(
    measure: Measure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [part("hanging", limit_s=2), part("crashing"), part("failing"), part("steady", needs=("no_such_thing",))]
    found = measure(*listed, part("beaten"), code=1)
    parts = found["parts"]
    assert {name: one["status"] for name, one in parts.items()} == {
        "hanging": "failed", "crashing": "failed", "failing": "failed", "steady": "skipped", "beaten": "done",
    }  # fmt: skip
    assert parts["hanging"]["reason"] == "killed after 2 s"
    assert parts["hanging"]["last_lines"] == ["waiting for a device that never answers"]
    assert parts["crashing"]["reason"] == f"it ended with exit code {-signal.SIGSEGV}"
    assert "illegal memory access" in parts["crashing"]["last_lines"]
    assert parts["failing"]["reason"] == "RuntimeError: CUDA error: out of luck"
    assert any("in failing" in line for line in parts["failing"]["last_lines"])
    assert parts["steady"]["reason"] == "needs no_such_thing"
    figures = {row["name"] for row in found["table"]}
    assert figures == {"before the hang", "before the crash", "before the failure", "memory"}
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_until(lambda pid=pid: not is_alive(pid))
    out, err = capsys.readouterr()
    assert "steady: skipped: needs no_such_thing" in out and "    illegal memory access" in out
    assert "[ 1/5] hanging, 0 of at most 2 s; everything at most 2 min more" in err


def test_what_is_done_is_skipped_until_something_changes(measure: Measure, tmp_path: Path) -> None:
    runs = tmp_path / "steady.runs"
    first = measure(part("steady"), part("unfinished"))
    assert first["parts"]["steady"]["identity"]["gpu"] == MACHINE["gpu"] and first["parts"]["steady"]["commit"]
    again = measure(part("steady"), part("unfinished"))
    assert len(runs.read_text()) == 1 and again["parts"]["steady"] == first["parts"]["steady"]
    assert len((tmp_path / "unfinished.runs").read_text()) == 2, "what has shapes left goes on"
    (tmp_path / "gpu" / "steady.json").unlink()  # a fresh machine, to which only the results were carried
    measure(part("steady"))
    assert len(runs.read_text()) == 1 and Task(str(tmp_path), False, 1.0).measured("steady") == {"speed": 30.0}
    measure(part("steady"), again=True)
    assert len(runs.read_text()) == 2
    other = replace(part("steady"), sources=("tests/bench/gpu_parts.py", "bench/common.py"))
    late = measure(other, minutes=0.1)
    assert late["parts"]["steady"]["figures"] and not late["table"], "kept until it is measured anew, but not shown"
    measure(other)
    assert len(runs.read_text()) == 3
    measure(part("steady"), machine={**MACHINE, "packages": {"torch": "2.12.0", "triton": "3.6.0"}})
    assert len(runs.read_text()) == 4


def test_what_failed_waits_for_what_was_never_tried(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    measure(part("failing"), code=1)
    capsys.readouterr()
    measure(part("failing"), part("steady"), code=1)
    err = capsys.readouterr().err
    assert err.index("steady: done") < err.index("failing: failed")


def test_a_killed_driver_leaves_nothing_running_and_goes_on(measure: Measure, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from bench.gpu import hour
from tests.bench.gpu_parts import part
parts = [part("steady"), part("hanging")]
hour.PARTS = {{one.name: one for one in parts}}
hour.Hour(Path({str(tmp_path)!r}), {MACHINE!r}, tiny=False, minutes=60).run(parts, again=False)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL) as driver:
        wait_until((tmp_path / "pids").exists)
        partial = json.loads((tmp_path / "gpu" / "hanging.json").read_text())
        assert partial["status"] == "running" and partial["figures"][0]["ours"] == 5.0
        driver.kill()
    worker, child = map(int, (tmp_path / "pids").read_text().split())
    wait_until(lambda: not is_alive(worker))
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # a part's own children are its business when nobody is left to end them
    (tmp_path / "go").touch()
    found = measure(part("steady"), part("hanging"))
    assert {one["status"] for one in found["parts"].values()} == {"done"}
    assert len((tmp_path / "steady.runs").read_text()) == 1 and len((tmp_path / "hanging.runs").read_text()) == 2


def test_it_stops_in_time(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(part("steady"), minutes=0.1)
    assert not found["parts"] and not found["table"], "nothing that was not measured"
    found = measure(part("steady", limit_s=4), minutes=0.1)
    assert found["parts"]["steady"]["status"] == "done"
    monkeypatch.setattr(hour, "LEAST_S", 0.0)
    cut = measure(part("hanging"), minutes=0.03)["parts"]["hanging"]
    assert cut["status"] == "unfinished" and "the hour was over" in cut["reason"] and cut["figures"]


def test_progress_is_one_line_on_a_terminal_and_one_a_part_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    listed = [part("steady", limit_s=60), part("peer", limit_s=240)]
    record = {"status": "done", "reason": "", "figures": [1, 2], "seconds": 21.0}
    written = []
    for stream in (Terminal(), io.StringIO()):
        progress = Progress(0, listed, time.monotonic() + 3600, stream)
        for passed in (0.0, 20.0):
            progress.show(listed[0], passed, 60.0)
        progress.end(listed[0], record)
        written.append(stream.getvalue())
    redrawn, plain = (text.rstrip("\n").split("\n") for text in written)
    assert len(redrawn) == 1 and redrawn[0].count("\r") == 3
    assert "steady, 20 of at most 60 s; everything at most 5 min more" in redrawn[0]
    assert len(plain) == 2 and plain[1] == "[ 1/2] steady: done in 21 s, 2 figures"


def test_the_table_joins_parts_and_begins_with_the_worst(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    speed, memory = measure(part("steady"), part("beaten"), part("peer"))["table"]
    assert memory["name"] == "memory" and memory["goal"] == 1.0 and memory["ratio"] == 0.5
    assert (speed["ours"], speed["best_peer"], speed["peer"]) == (30.0, "fastest", 60.0)
    assert speed["goal"] == 80.0 and speed["ratio"] == 30 / 80
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[1].split()[:3] == ["steady", "speed,", "GB/s"]
        and "fastest 60" in lines[1]
        and lines[1].endswith("0.38 <")
    )
    assert lines[2].split()[:3] == ["beaten", "memory,", "GB"] and lines[2].endswith("0.50 <")


def test_the_goal_is_the_hardest_that_is_known_and_else_the_best_peer() -> None:
    goals = (Goal("vllm", 1.1), Goal(ROOFLINE, 0.8), Goal("plain", 0.98))
    figure = Figure("x", "tokens/s", 80.0, {"transformers": 20.0}, goals=goals)
    assert figure.goal() == 20.0 and figure.ratio() == 4.0, "none of its goals is known"
    figure = replace(figure, references={"plain": 50.0})
    assert figure.goal() == 49.0 and figure.best_peer() == ("transformers", 20.0)
    assert replace(figure, roofline=100.0).goal() == 80.0
    assert replace(figure, roofline=100.0, peers={"vllm": 90.0}).ratio() == pytest.approx(80 / 99)
    assert Figure("x", "tests", 46, goals=(Goal(ITSELF, 46),)).ratio() == 1.0
    assert Figure("x", "GB/s", 46).ratio() is None
    less = Figure("x", "GB", 2.0, {"a": 3.0, "b": 1.0}, less_is_better=True)
    assert less.best_peer() == ("b", 1.0) and less.ratio() == 0.5 and (replace(less, ours=0.0).ratio() or 0) > 1


def test_a_peer_measured_elsewhere_joins_its_figure() -> None:
    ours = Figure("x", "tokens/s", 80.0, {"a": 1.0}, 100.0, (Goal("b", 1.1),), note="batch 1")
    for figures in ([ours, Figure("x", "tokens/s", peers={"b": 40.0})], [Figure("x", "", peers={"b": 40.0}), ours]):
        [joined] = join(figures)
        assert joined == replace(ours, peers={"a": 1.0, "b": 40.0})
    assert table_of([Figure("y", "s"), ours])[0]["name"] == "x", "what has no ratio comes last"


def test_the_command_needs_a_gpu_or_tiny_and_knows_its_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.gpu.__main__.ask_machine", lambda: {**MACHINE, "gpu": None})
    assert main(["--out", str(tmp_path)]) == 2 and "--tiny" in capsys.readouterr().err
    assert main(["--parts", "peaks,peeks"]) == 2 and "'peeks'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert parts_named("correct") == [name for name in PARTS if name.startswith("correct-")]


def test_every_part_names_sources_and_a_function_that_are_there() -> None:
    for one in PARTS.values():
        assert all((ROOT / source).exists() for source in one.sources), one.name
        module, _, function = one.measure.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}(" in source, one.measure
