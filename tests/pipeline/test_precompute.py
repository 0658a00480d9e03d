"""Distributions stored by a stage: later stages learn from them without the teacher; what is interrupted goes on."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.errors import UserError
from pipeline.processes import Processes
from pipeline.recipe import RecipeError, load_recipe, parse_recipe
from pipeline.results import Result
from pipeline.run import run_recipe
from pipeline.run_folder import RunFolder
from pipeline.stages.precompute import run as precompute
from tests.pipeline.tiny_run import RECIPE, run_stages, write_teacher
from train import objectives

STUDENT = {"from": "teacher", "layers": 2, "importance_tokens": 256}
TRAINING = {"tokens": "8k", "batch_tokens": 256, "micro_batch_tokens": 128, "learning_rate": 3e-3, "precision": "fp32"}


def distill(data: str, out: str, **more: Any) -> dict[str, object]:
    settings = {"teacher": "teacher", "student": STUDENT, "data": data, "out": out, "held_out_tokens": 512, **TRAINING}
    return {"distill": settings | more}


def stored(home: Path, folder: str = "run") -> Path:
    return home / folder / "01-precompute" / "data"


def test_a_student_learns_as_much_without_the_teacher_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same documents in the same order; only that the dense loss has the teacher's passes."""
    passes = []
    run_teacher = objectives.teacher_states
    monkeypatch.setattr(objectives, "teacher_states", lambda *given: passes.append(1) or run_teacher(*given))
    stages = ({"precompute": {"model": "teacher", "data": "text"}}, distill("taught", "sparse"))
    _, kept, sparse = run_stages(tmp_path, *stages, serve="sparse")
    assert not passes
    *_, dense = run_stages(tmp_path, distill("text", "dense"), serve="dense", folder="dense")
    assert len(passes) == 64
    before, found, wanted = (row.quality.kl.value for row in (*sparse.models[-2:], dense.models[-1]))
    assert wanted < 0.7 * before
    assert found == pytest.approx(wanted, rel=0.03)
    details = kept.details
    assert details.bytes_per_position < 3 * details.stored_tokens / details.positions + 10
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Stored distributions" in page
    logged = [json.loads(line) for line in (tmp_path / "run" / "02-distill" / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["kl"] < logged[0]["kl"]


def test_what_was_stored_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute, "SHARD_TOKENS", 500)
    monkeypatch.setattr(precompute, "BATCH_TOKENS", 256)
    stage = {"precompute": {"model": "teacher", "data": "text"}}
    run_stages(tmp_path, stage, serve="teacher", folder="whole")
    whole = {path.name: path.read_bytes() for path in stored(tmp_path, "whole").glob("*.safetensors")}
    assert len(whole) > 3

    calls, written = iter(range(10**6)), []
    write = precompute.write_shard

    def dies(path: Path, *given: Any) -> None:
        if next(calls) % 2:
            path.with_suffix(".staging").write_bytes(b"half")
            raise RuntimeError("killed")
        write(path, *given)
        written.append(path.name)

    monkeypatch.setattr(precompute, "write_shard", dies)
    kills = 0
    while not (tmp_path / "run" / "01-precompute" / "result.json").exists():
        try:
            run_stages(tmp_path, stage, serve="teacher")
        except RuntimeError:
            kills += 1
    assert kills >= len(whole) - 1
    assert sorted(written) == sorted(whole), "no shard is computed twice"
    assert {path.name: path.read_bytes() for path in stored(tmp_path).glob("*.safetensors")} == whole
    assert not (tmp_path / "run" / "01-precompute" / "shards").exists()


def test_a_finished_stage_is_left_alone_until_it_is_damaged(tmp_path: Path) -> None:
    stages = ({"precompute": {"model": "teacher", "data": "text"}}, distill("taught", "student"))
    first = run_stages(tmp_path, *stages, serve="student")
    again = run_stages(tmp_path, *stages, serve="student")
    assert [result.finished_at for result in first] == [result.finished_at for result in again]
    shard = next(stored(tmp_path).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    mended = run_stages(tmp_path, *stages, serve="student")
    assert [result.output for result in mended] == [result.output for result in first]
    assert mended[2].finished_at == first[2].finished_at, "what learnt from it need not learn again"


def test_other_draws_are_other_data(tmp_path: Path) -> None:
    def stages(draws: int) -> tuple[dict[str, object], ...]:
        return {"precompute": {"model": "teacher", "data": "text", "draws": draws}}, distill("taught", "s")

    few = run_stages(tmp_path, *stages(4), serve="s")
    many = run_stages(tmp_path, *stages(100), serve="s")
    assert few[1].details.stored_tokens < many[1].details.stored_tokens
    assert few[2].key != many[2].key


def test_conversations_have_distributions_at_their_answers_alone(tmp_path: Path) -> None:
    said = [[("user", f"mash {n} the wort"), ("assistant", f"cut the heart from {n} tails")] for n in range(40)]
    rows = [[{"role": role, "content": text} for role, text in messages] for messages in said]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in rows))
    stage = {"precompute": {"model": "teacher", "data": "chat"}}
    data = f"data.chat={{source: {tmp_path / 'chat.jsonl'}, chat: true, held_out: 0.2, sequence_length: 128}}"
    teacher = write_teacher(tmp_path / "teacher")
    results = run_with(tmp_path / "run", teacher, data, stage, distill("taught", "s", tokens=256))
    arrays = load_file(next(stored(tmp_path).glob("*.safetensors")))
    labels = results[1].details.positions
    assert np.count_nonzero(np.diff(arrays["starts"].astype(int))) == labels < len(arrays["tokens"]) / 2


def test_another_teacher_or_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    run_stages(tmp_path, {"precompute": {"model": "teacher", "data": "text"}}, serve="teacher")
    folder = stored(tmp_path)
    data = (f"data.text.source={tmp_path / 'text'}", f"data.text.distributions={folder}")
    other, taken = write_teacher(tmp_path / "other-teacher", seed=1), distill("text", "s")
    with pytest.raises(UserError, match="distill: the data text holds distributions of another model than teacher"):
        run_with(tmp_path / "other", other, *data, taken)
    smaller = write_teacher(tmp_path / "smaller", tokens=300)
    with pytest.raises(ValueError, match="holds distributions of other documents: the text, its tokenizer"):
        run_with(tmp_path / "another", smaller, *data, taken)


def run_with(run: Path, teacher: Path, *changes: Any) -> list[Result]:
    """A run in that folder, of a recipe's overrides and of stages."""
    stages = [change for change in changes if isinstance(change, dict)]
    overrides = [f"models.teacher.from={teacher}", f"stages={json.dumps(stages)}", "serve={model: teacher}"]
    recipe = load_recipe(RECIPE, [*overrides, *(change for change in changes if isinstance(change, str))])
    return run_recipe(recipe, RunFolder(run), cache=run.parent / "cache", processes=Processes())


RECIPE_TEXT = """
name: x
models: {teacher: {from: x}}
data: {text: {source: python-stdlib, sequence_length: 256}}
stages:
  - precompute: {model: teacher, data: text}
  - distill: {teacher: teacher, student: {from: teacher}, data: taught, tokens: 2k}
"""


def test_what_cannot_be_learnt_from_them_is_said_when_the_recipe_is_read() -> None:
    recipe = parse_recipe(RECIPE_TEXT)
    source = recipe.data_set("taught", Path("runs/x"))
    assert source.sequence_length == 256 and source.distributions == "runs/x/01-precompute/data"
    assert parse_recipe(RECIPE_TEXT, ["distill.loss.kind=cross_entropy"]) != recipe
    with pytest.raises(RecipeError, match=r"on_policy\.share is 0\.5, but taught is for training without the teacher"):
        parse_recipe(RECIPE_TEXT, ["distill.on_policy.share=0.5"])
    for override in ("distill.loss.kind=reverse_kl", "distill.loss.temperature=2"):
        said = "stages.1.distill.loss is more than the stored distributions of taught can teach"
        with pytest.raises(RecipeError, match=re.escape(said)):
            parse_recipe(RECIPE_TEXT, [override])
