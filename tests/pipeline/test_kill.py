"""SIGKILL at random moments of a stage, then the same command: the same weights, bit for bit, and the same log."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from model.files.artifact import MANIFEST_NAME
from pipeline.stages.base import read_result
from tests.pipeline.fork_server import ForkServer
from tests.pipeline.test_gqa import STAGE as GQA
from tests.pipeline.test_launch import LAUNCHERS
from tests.pipeline.test_mod import STAGE as MOD
from tests.pipeline.test_qlora import STAGE as QLORA
from tests.pipeline.tiny_run import RECIPE, ROOT, TinyRun
from tests.trials import in_full, trials

KILLS = trials(20, 300)
"""Of each kind."""
COLD_KILLS = 20
SIGNALS = trials(4, 100)
GRACE_S = 30.0
"""After SIGTERM, what services send SIGKILL after."""
LIVES = 4
"""Kills of one run before it may finish."""
DISTILL: dict[str, Any] = yaml.safe_load(RECIPE.read_text())["stages"][0]["distill"]
SMALL = {"context_tokens": 16, "new_tokens": 2, "batch_sizes": [1]}
STAGES = {
    "distill": DISTILL,
    "qlora": QLORA | {"tokens": "2k"},
    "gqa": GQA | {"compare": [], "long_context": SMALL},
    "mod": MOD | {"tokens": "2k", "speed": {"prefill_tokens": 16, **SMALL}},
}
KINDS = list(STAGES)[: trials(1, 4)]


class Runs(Protocol):
    """Commands, of which the status and the seconds are told."""

    def run(
        self, arguments: list[str], kill_after_s: float | None = None, number: int = signal.SIGKILL
    ) -> dict[str, Any]: ...


class Launches:
    """Each by an `accelerate launch` of its own; the signal comes to the launcher and to what it has launched."""

    def run(
        self, arguments: list[str], kill_after_s: float | None = None, number: int = signal.SIGKILL
    ) -> dict[str, Any]:
        command = [str(LAUNCHERS / "accelerate"), "launch", "--config_file", "configs/accelerate/cpu.yaml"]
        environment, begun = os.environ | {"OMP_NUM_THREADS": "1"}, time.monotonic()
        with subprocess.Popen(
            [*command, "-m", "pipeline", *arguments],
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as launched:
            try:
                launched.wait(kill_after_s)
            except subprocess.TimeoutExpired:
                os.killpg(launched.pid, number)
        return {"status": launched.returncode, "seconds": time.monotonic() - begun}


@dataclass(frozen=True)
class Whole:
    """The run of one stage of this kind that nobody killed, and how long it took; `forks` runs others."""

    kind: str
    forks: Runs
    teacher: TinyRun
    reference: TinyRun
    seconds: float

    def victim(self, folder: Path) -> TinyRun:
        return self.teacher.copy(folder, "00-teacher")

    def arguments(self, tiny: TinyRun) -> list[str]:
        """With a checkpoint at every step, so that many kills fall into the writing of one."""
        stage = STAGES[self.kind] | {"checkpoint_every_s": 0, "evaluate_every_tokens": 512, "out": "student"}
        return tiny.arguments(f"stages={json.dumps([{self.kind: stage}])}")


@pytest.fixture(scope="module", params=KINDS)
def whole(
    request: pytest.FixtureRequest, finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Whole]:
    home = tmp_path_factory.mktemp("whole")
    with ForkServer() as forks:
        reference, timed = (finished_run.copy(home / name, "00-teacher") for name in ("reference", "timed"))
        made = Whole(request.param, forks, finished_run, reference, 0.0)
        forks.run(made.arguments(reference))  # in the warm process itself
        ended = forks.run(made.arguments(timed))
        assert ended["status"] == 0
        yield Whole(made.kind, forks, finished_run, timed, ended["seconds"])


@pytest.mark.slow
def test_a_killed_stage_goes_on_to_the_same_weights(whole: Whole, tmp_path: Path) -> None:
    assert len(phases := phases_of_kills(whole, KILLS, tmp_path)) >= 4, f"kills fell only into {phases}"


@pytest.mark.slow
@pytest.mark.skipif(not in_full, reason="tried with --all-trials")
def test_so_does_one_that_a_launcher_has_started(whole: Whole, tmp_path: Path) -> None:
    """Cold: most kills fall into imports and what comes before training."""
    launches = Launches()
    timed = whole.victim(tmp_path / "timed")
    ended = launches.run(whole.arguments(timed))
    assert ended["status"] == 0
    launched = replace(whole, forks=launches, reference=timed, seconds=ended["seconds"])
    assert len(phases_of_kills(launched, COLD_KILLS, tmp_path)) > 1


def phases_of_kills(whole: Whole, wanted: int, tmp_path: Path) -> set[str]:
    """Kills so often, at random moments, and lets each run end, as the whole one did. Returns where kills fell."""
    generator = random.Random(0)
    kills, phases = 0, set()
    for attempt in range(12 * wanted // LIVES):  # a run may be faster than the one that was timed
        if kills >= wanted:
            break
        victim = whole.victim(tmp_path / str(attempt))
        arguments = whole.arguments(victim)
        for _ in range(LIVES):
            ended = whole.forks.run(arguments, generator.uniform(0.02, 1) * whole.seconds)
            if ended["status"] == 0:
                break
            assert ended["status"] == -signal.SIGKILL
            kills += 1
            phases.add(phase_of(victim, whole.kind))
        assert whole.forks.run(arguments)["status"] == 0
        assert_equal_runs(victim, whole)
    assert kills >= wanted
    return phases


@pytest.mark.slow
def test_sigterm_ends_a_run_and_the_same_command_goes_on(whole: Whole, tmp_path: Path) -> None:
    generator = random.Random(1)
    for attempt in range(0, SIGNALS, LIVES):
        victim = whole.victim(tmp_path / str(attempt))
        arguments = whole.arguments(victim)
        for part in (0.2, 0.5, 0.6, 0.7) if attempt == 0 else [generator.uniform(0.02, 1) for _ in range(LIVES)]:
            ended = whole.forks.run(arguments, part * whole.seconds, signal.SIGTERM)
            result, report = read_result(victim.folder.path / f"01-{whole.kind}"), victim.folder.report
            # Once all is written the command takes no more care of signals: there is nothing left to lose.
            assert ended["status"] in (0, 130) or (result and report.exists() and ended["status"] == -signal.SIGTERM)
            assert ended["seconds"] < part * whole.seconds + GRACE_S
        assert whole.forks.run(arguments)["status"] == 0
        assert_equal_runs(victim, whole)


@pytest.mark.slow
def test_a_finished_stage_that_is_run_again_changes_nothing(whole: Whole) -> None:
    def state() -> dict[Path, tuple[int, bytes]]:
        files = (path for path in (whole.reference.folder.path / f"01-{whole.kind}").rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    for _ in range(trials(1, 10)):
        assert whole.forks.run(whole.arguments(whole.reference))["status"] == 0
        assert state() == before


def phase_of(tiny: TinyRun, kind: str) -> str:
    """Where a kill fell, by what it left: before training, after which step, or after training."""
    folder = tiny.folder.path / f"01-{kind}"
    if not (folder / "start.json").exists():
        return "before training"
    if (folder / "candidate").exists() or (folder / "model").exists():
        return "after training"
    steps = [path.name for path in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return max(steps, default="first step")


def assert_equal_runs(one: TinyRun, whole: Whole) -> None:
    stages = [tiny.folder.path / f"01-{whole.kind}" for tiny in (one, whole.reference)]
    published = [
        {path.relative_to(stage): path.read_bytes() for path in (stage / "model").rglob("*") if path.is_file()}
        for stage in stages
    ]
    manifests = {path for path in published[0] if path.name == MANIFEST_NAME}  # they say when it was made
    assert published[0].keys() == published[1].keys() and len(published[0]) > len(manifests) > 0
    assert all(published[0][path] == published[1][path] for path in published[0].keys() - manifests)
    assert (stages[0] / "metrics.jsonl").read_text() == (stages[1] / "metrics.jsonl").read_text()
    results = [read_result(stage) for stage in stages]
    assert results[0] is not None and results[1] is not None
    assert (results[0].models, results[0].gate) == (results[1].models, results[1].gate)
    assert results[0].output == results[1].output or whole.kind == "qlora", "which holds the manifest of its base"
    leftovers = [path.name for stage in stages for path in stage.rglob("*") if "staging" in path.name]
    assert not leftovers and not (stages[0] / "candidate").exists()
