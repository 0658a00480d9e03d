"""What only real processes show: signals, kills, and two processes that train as one."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import CONTEXT, launched
from tests.train import toy_process
from tests.train.toy import STEPS
from tests.waiting import wait_until
from train.tracking import read_metrics

KILLS = 10

Start = Callable[..., ForkServerProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[ForkServerProcess] = []

    def begin(*arguments: object, **options: object) -> ForkServerProcess:
        process = CONTEXT.Process(target=toy_process.run, args=arguments, kwargs=options)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()


def finish(process: ForkServerProcess, seconds: float = 60) -> int | None:
    process.join(seconds)
    return process.exitcode


def logged_lines(folder: Path) -> int:
    return len(read_metrics(folder / "metrics.jsonl"))


def wait_for_lines(folder: Path, count: int) -> None:
    wait_until(lambda: logged_lines(folder) >= count, 60, every_s=0.002)


@pytest.fixture
def straight(tmp_path: Path, start: Start) -> tuple[str, str]:
    """Weights and log of a run that nothing disturbs."""
    return undisturbed(tmp_path / "straight", start, STEPS)


def undisturbed(folder: Path, start: Start, steps: int) -> tuple[str, str]:
    assert finish(start(str(folder), "awake", steps=steps)) == 0
    return (folder / "weights.sha256").read_text(), (folder / "metrics.jsonl").read_text()


def test_killed_at_random_moments_it_ends_with_the_same_weights(tmp_path: Path, start: Start) -> None:
    steps = 120
    weights, log = undisturbed(tmp_path / "straight", start, steps)
    folder = tmp_path / "killed"
    moments = random.Random(0)
    reached = []
    for _ in range(KILLS):
        process = start(str(folder), "awake", steps=steps)
        # From the start-up to several steps on, at any point of a step, an evaluation or a save.
        wait_for_lines(folder, logged_lines(folder) + moments.randrange(4))
        time.sleep(moments.uniform(0.0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        reached.append(logged_lines(folder))
    assert len(set(reached)) > KILLS / 2, f"the kills must hit different moments, not lines {reached}"
    assert finish(start(str(folder), "awake", steps=steps)) == 0
    assert (folder / "weights.sha256").read_text() == weights
    assert (folder / "metrics.jsonl").read_text() == log
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    assert sorted(names) == [f"step-{steps - 1:08d}", f"step-{steps:08d}"]


def test_killed_while_a_checkpoint_is_written_behind_it_training_resumes_from_the_one_before(
    tmp_path: Path, start: Start, straight: tuple[str, str]
) -> None:
    folder = tmp_path / "killed"
    process = start(str(folder), "awake", held_at=5)
    wait_for_lines(folder, 7)  # six steps and an evaluation: training has gone on
    begun = folder / "checkpoints" / ".staging-step-00000005"
    wait_until(lambda: any(begun.glob("*")), 60, every_s=0.002)
    process.kill()
    process.join()
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [".staging-step-00000005", "step-00000002", "step-00000003"]  # of step 4 evaluation was due
    assert [path.name for path in (folder / "checkpoints" / names[0]).iterdir()]
    assert finish(start(str(folder), "awake")) == 0
    assert ((folder / "weights.sha256").read_text(), (folder / "metrics.jsonl").read_text()) == straight


def test_a_write_that_fails_in_one_process_stops_both(tmp_path: Path, start: Start) -> None:
    both = [start(str(tmp_path / "full"), launched=rank, file_limit=50_000) for rank in launched(2)]
    assert [finish(process) for process in both] == [1, 1]
    assert not list((tmp_path / "full" / "checkpoints").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_next_run_goes_on(
    number: signal.Signals, tmp_path: Path, start: Start, straight: tuple[str, str]
) -> None:
    folder = tmp_path / "signalled"
    process = start(str(folder), "awake", save_every_step=False)
    wait_for_lines(folder, 2)
    os.kill(process.pid or 0, number)
    assert finish(process, 20) == toy_process.INTERRUPTED
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{read_metrics(folder / 'metrics.jsonl')[-1]['step']:08d}"
    assert finish(start(str(folder), "awake", save_every_step=False)) == 0
    assert (folder / "weights.sha256").read_text() == straight[0]
    assert (folder / "metrics.jsonl").read_text() == straight[1]


def test_a_signal_during_evaluation_stops_at_once_and_the_next_run_evaluates(
    tmp_path: Path, start: Start, straight: tuple[str, str]
) -> None:
    folder = tmp_path / "evaluating"
    process = start(str(folder), "sleepy")
    wait_for_lines(folder, 4)  # of 128 tokens each: 500 are crossed
    time.sleep(0.3)
    began = time.monotonic()
    os.kill(process.pid or 0, signal.SIGTERM)
    assert finish(process, 20) == toy_process.INTERRUPTED
    assert time.monotonic() - began < toy_process.EVALUATION_S / 4
    assert finish(start(str(folder), "awake")) == 0
    assert (folder / "metrics.jsonl").read_text() == straight[1]


@pytest.mark.parametrize(
    "kind", [{}, {"adapted": True}, {"adapted": True, "paired": True}], ids=["whole", "adapted", "pairs"]
)
def test_two_processes_train_as_one(kind: dict[str, bool], tmp_path: Path, start: Start) -> None:
    options = {"save_every_step": False, **kind}
    two = [start(str(tmp_path / "two"), launched=rank, **options) for rank in launched(2)]
    assert [finish(process) for process in two] == [0, 0]
    assert finish(start(str(tmp_path / "one"), **options)) == 0
    alone, together = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in together] == list(range(1, STEPS + 1))
    for expected, line in zip(alone, together, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    last = Path("checkpoints") / f"step-{STEPS:08d}" / "model.safetensors"
    weights = [load_file(tmp_path / name / last) for name in ("one", "two")]
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=1e-3, atol=1e-5)
    # A checkpoint does not know how many processes made it: one goes on where two stopped.
    assert finish(start(str(tmp_path / "two"), **options)) == 0
