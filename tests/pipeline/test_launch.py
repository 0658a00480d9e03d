"""The same recipe started plainly, by `accelerate launch`, and as two processes by torchrun: the same losses.

The barriers of a run and its training share one Accelerator; a second one of another precision would be refused.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from model.mesh import MeshError
from pipeline.cli import main
from pipeline.measure.suite.ask import Marked
from pipeline.processes import check_mesh
from pipeline.recipe import load_recipe
from pipeline.run_folder import RunFolder
from pipeline.stages.base import read_result
from pipeline.stages.evaluate.report import ANSWERS_NAME
from tests.forked import end_of, ranks
from tests.pipeline.tiny_run import ROOT, TinyRun

LAUNCHERS = Path(sys.executable).parent
NO_SPEED = "evaluate.speed.batch_sizes=[]"


def launch(tiny: TinyRun, *command: str) -> None:
    """By a launcher that asks for bf16, of which the recipe knows nothing."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    arguments = [*command, *tiny.arguments(NO_SPEED)]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def logged(tiny: TinyRun) -> list[dict[str, float]]:
    lines = (tiny.folder.path / "01-distill" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_accelerate_launch_changes_nothing(finished_run: TinyRun, tmp_path: Path) -> None:
    tiny = TinyRun(finished_run.home, RunFolder(tmp_path / "run"))
    command = ["launch", "--config_file", "configs/accelerate/cpu.yaml", "-m", "pipeline"]
    launch(tiny, str(LAUNCHERS / "accelerate"), *command)
    assert logged(tiny) == logged(finished_run)
    assert tiny.weights() == finished_run.weights()


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(finished_run: TinyRun, tmp_path: Path) -> None:
    tiny = TinyRun(finished_run.home, RunFolder(tmp_path / "run"))
    command = ["--standalone", "--nproc_per_node", "2", "-m", "tests.pipeline.test_launch"]
    launch(tiny, str(LAUNCHERS / "torchrun"), *command)
    one, two = logged(finished_run), logged(tiny)
    assert len(one) == len(two) > 8
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert {path.name for path in tiny.folder.path.glob("rank-*")} == {"rank-0", "rank-1"}


def test_two_processes_evaluate_what_one_does(finished_run: TinyRun, tmp_path: Path) -> None:
    """They share held-out batches, whose figures are the same numbers, not about the same, and the suite's prompts.

    An answer in bf16 may depend on how many are written beside it.
    """
    found, answers = [], []
    for count in (1, 2):
        tiny = finished_run.copy(tmp_path / str(count))
        words = tiny.arguments(NO_SPEED, "evaluate.held_out_tokens=448", "evaluate.suite=[facts]")  # seven batches
        with ranks(count, main, words, log=tmp_path / "log", environment={"OMP_NUM_THREADS": "1"}) as started:
            assert not any(end_of(started)), (tmp_path / "log").read_text()
        result = read_result(tiny.folder.path / "02-evaluate")
        assert result is not None and result.cost.processes == count
        found.append((result.models, result.gate, result.parity, result.details))
        kept = (tiny.folder.path / "02-evaluate" / ANSWERS_NAME).read_bytes()
        answers.append(msgspec.json.decode(kept, type=list[Marked]))
    assert found[0] == found[1]
    pairs = list(zip(*answers, strict=True))
    assert all((one.model, one.prompt) == (two.model, two.prompt) for one, two in pairs)
    assert sum(one == two for one, two in pairs) > len(pairs) / 2


def test_a_step_that_cannot_be_shared_says_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model that is rounded and not recovered trains in no process at all."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=r"01-quantize: batch_tokens 1,024 in .* which 2 processes .* can be 2,048 or"):
        check_mesh(load_recipe(ROOT / "configs" / "smollm2-all.yaml", ["quantize.tokens=10k"]))
    check_mesh(load_recipe(ROOT / "configs" / "smollm2-all.yaml", []))


def run_twice() -> None:
    """The command `potstill` in one of two processes; a second time nothing runs."""
    from pipeline.processes import Processes
    from train.accelerator import this_accelerator

    folder = RunFolder(Path(sys.argv[sys.argv.index("--folder") + 1]))
    log = folder.path / "01-distill" / "metrics.jsonl"
    with mock.patch.object(Processes, "close"):  # the group lasts for both
        assert main(sys.argv[1:]) == 0
    accelerator = this_accelerator()
    assert accelerator.num_processes == 2 and accelerator.mixed_precision == "no"
    before = log.read_text(), log.stat().st_mtime_ns
    assert main(sys.argv[1:]) == 0
    assert (log.read_text(), log.stat().st_mtime_ns) == before
    (folder.path / f"rank-{accelerator.process_index}").touch()


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files_hold_what_accelerate_knows(path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(str(path))
    assert config.mixed_precision == "no", "the recipe's precision decides"


if __name__ == "__main__":
    run_twice()
