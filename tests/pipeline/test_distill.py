"""Stage `distill` between models that need not be of one family: what must be equal are their tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.files.checkpoint import load_config
from pipeline.errors import UserError
from pipeline.processes import Processes
from pipeline.recipe import load_recipe
from pipeline.results import Result
from pipeline.run import run_recipe
from pipeline.run_folder import RunFolder
from tests.pipeline.tiny_run import RECIPE, write_teacher, write_text


def distill(home: Path, **settings: Any) -> list[Result]:
    """Four steps with `home/teacher` as teacher and `home/small` as student."""
    stage = {"teacher": "teacher", "student": {"from": "small"}, "data": "text", "out": "student"}
    budget = {"tokens": "1k", "batch_tokens": 256, "micro_batch_tokens": 128, "held_out_tokens": 256}
    overrides = [
        f"models={json.dumps({name: {'from': str(home / name)} for name in ('teacher', 'small')})}",
        f"stages={json.dumps([{'distill': stage | budget | {'precision': 'fp32', 'learning_rate': 3e-3} | settings}])}",
        "serve={model: student}",
        f"data.text.source={write_text(home / 'text')}",
    ]
    recipe = load_recipe(RECIPE, overrides)
    return run_recipe(recipe, RunFolder(home / "run"), cache=home / "cache", processes=Processes())


@pytest.mark.parametrize(("teacher_rows", "student_rows"), [(320, 384), (384, 320)])
def test_differently_padded_embeddings_are_no_obstacle(tmp_path: Path, teacher_rows: int, student_rows: int) -> None:
    write_teacher(tmp_path / "teacher", rows=teacher_rows)
    write_teacher(tmp_path / "small", seed=1, layers=2, rows=student_rows)
    result = distill(tmp_path)[-1]
    before, after = result.models[1].quality, result.models[2].quality
    assert before is not None and after is not None and before.kl is not None and after.kl is not None
    assert after.kl.value < before.kl.value, "it has learnt"
    assert result.parity is not None and result.parity.passed
    [published] = (tmp_path / "run").glob("*-distill/model")
    assert load_config(published).vocab_size == student_rows


def test_other_tokens_are_refused_by_name(tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "small", tokens=270)
    with pytest.raises(UserError, match=r"token 270 is None in small and '\w+' in teacher; they must be equal"):
        distill(tmp_path)


def test_a_student_learns_from_what_it_writes_itself(tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "small", seed=1, layers=2)
    results = distill(tmp_path, on_policy={"share": 1.0, "prompt_tokens": 8, "max_tokens": 16})
    before, after = results[-1].models[1].quality, results[-1].models[2].quality
    assert before is not None and after is not None and before.kl is not None and after.kl is not None
    assert after.kl.value < before.kl.value
    [metrics] = (tmp_path / "run").glob("*-distill/metrics.jsonl")
    assert '"on_policy": 1.0' in metrics.read_text()


def test_nobody_grades_what_a_student_writes_for_the_text_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="with the loss cross_entropy no teacher grades it"):
        distill(tmp_path, on_policy={"share": 0.5}, loss={"kind": "cross_entropy"})
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "small", seed=1, layers=2)
    with pytest.raises(UserError, match="positions, too few for a sequence_length of"):
        distill(tmp_path, on_policy={"share": 0.5, "max_tokens": 100_000})
