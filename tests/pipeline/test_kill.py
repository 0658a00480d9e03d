"""SIGKILL at random moments of a stage, then the same command: the same weights, bit for bit, and the same log."""

import random
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.stages.base import read_result
from tests.pipeline.fork_server import ForkServer
from tests.pipeline.tiny_run import TinyRun

KILLS = 20
LIVES = 4
"""Kills of one run before it may finish."""
ONLY = ("evaluate", "conversation")
SETTINGS = ("distill.checkpoint_every_s=0", "distill.evaluate_every_tokens=512")
"""A checkpoint at every step, so that many kills fall into the writing of one."""


@dataclass(frozen=True)
class Whole:
    """The run that nobody killed, and how long it took; `forks` runs others."""

    forks: ForkServer
    reference: TinyRun
    seconds: float


@pytest.fixture(scope="module")
def whole(finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    home = tmp_path_factory.mktemp("whole")
    with ForkServer() as forks:
        reference = finished_run.copy(home / "reference", "00-teacher")
        forks.run(reference.arguments(*SETTINGS, drop=ONLY))  # in the warm process itself
        timed = finished_run.copy(home / "timed", "00-teacher")
        ended = forks.run(timed.arguments(*SETTINGS, drop=ONLY))
        assert ended["status"] == 0
        yield Whole(forks, timed, ended["seconds"])


@pytest.mark.slow
def test_a_killed_stage_goes_on_to_the_same_weights(finished_run: TinyRun, whole: Whole, tmp_path: Path) -> None:
    generator = random.Random(0)
    kills, phases = 0, set()
    for attempt in range(12 * KILLS // LIVES):  # a run may be faster than the one that was timed
        if kills >= KILLS:
            break
        victim = finished_run.copy(tmp_path / str(attempt), "00-teacher")
        arguments = victim.arguments(*SETTINGS, drop=ONLY)
        for _ in range(LIVES):
            ended = whole.forks.run(arguments, generator.uniform(0.02, 1) * whole.seconds)
            if ended["status"] == 0:
                break
            assert ended["status"] == -9
            kills += 1
            phases.add(phase_of(victim))
        assert whole.forks.run(arguments)["status"] == 0
        assert_equal_runs(victim, whole.reference)
    assert kills >= KILLS
    assert len(phases) >= 4, f"kills fell only into {phases}"


@pytest.mark.slow
def test_sigterm_ends_a_run_and_the_same_command_goes_on(finished_run: TinyRun, whole: Whole, tmp_path: Path) -> None:
    victim = finished_run.copy(tmp_path / "victim", "00-teacher")
    arguments = victim.arguments(*SETTINGS, drop=ONLY)
    for part in (0.2, 0.5, 0.6, 0.7):
        ended = whole.forks.run(arguments, part * whole.seconds, signal.SIGTERM)
        assert ended["status"] in (0, 130)
    assert whole.forks.run(arguments)["status"] == 0
    assert_equal_runs(victim, whole.reference)


def phase_of(tiny: TinyRun) -> str:
    """Where a kill fell, by what it left: before training, after which step, or after training."""
    folder = tiny.folder.path / "01-distill"
    if not (folder / "start.json").exists():
        return "before training"
    if (folder / "candidate").exists() or (folder / "model").exists():
        return "after training"
    steps = [path.name for path in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return max(steps, default="first step")


def assert_equal_runs(one: TinyRun, other: TinyRun) -> None:
    assert one.weights() == other.weights()
    stages = [tiny.folder.path / "01-distill" for tiny in (one, other)]
    assert (stages[0] / "metrics.jsonl").read_text() == (stages[1] / "metrics.jsonl").read_text()
    results = [read_result(stage) for stage in stages]
    assert results[0] is not None and results[1] is not None
    assert (results[0].models, results[0].output, results[0].gate) == (
        results[1].models,
        results[1].output,
        results[1].gate,
    )
    leftovers = [path.name for stage in stages for path in stage.rglob("*") if "staging" in path.name]
    assert not leftovers and not (stages[0] / "candidate").exists()
