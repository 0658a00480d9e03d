"""Runs: what is done again and what is not, what a gate stops, what a damaged file leads to."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import train.objectives
from model.files.artifact import open_artifact
from model.files.checkpoint import load_model
from model.files.safe_io import SourceError
from model.transformer import Transformer
from pipeline.cli import main
from pipeline.errors import GateRefused, RunInterrupted, StageFailed, UserError
from pipeline.results import FILE_NAME
from pipeline.run_folder import RunFolder, resolve_served
from pipeline.stages.base import read_result
from serve.http.options import ServerOptions
from tests.pipeline.tiny_run import TinyRun, rerun, write_text
from train.objectives import Distillation, ObjectiveOutput
from train.packing import Batch


def test_a_run_leaves_what_the_design_says(finished_run: TinyRun) -> None:
    folder = finished_run.folder.path
    assert {path.name for path in folder.iterdir()} >= {
        "recipe.yaml", "00-teacher", "01-distill", "02-evaluate", "report.html"
    }  # fmt: skip
    distill = folder / "01-distill"
    assert {path.name for path in distill.iterdir()} >= {"checkpoints", "model", "metrics.jsonl", "result.json"}
    assert not (distill / "candidate").exists()
    manifest = open_artifact(distill / "model")
    teacher = open_artifact(folder / "00-teacher" / "model")
    assert manifest.parents == (teacher.digest,)
    assert load_model(distill / "model").config.num_layers == 2
    assert (distill / "model" / "README.md").read_text().count("| perplexity (") == 3


def test_results_hold_the_fixed_schema(finished_run: TinyRun) -> None:
    keys = None
    for path in sorted(finished_run.folder.path.glob("*/result.json")):
        raw = json.loads(path.read_text())
        keys = keys or raw.keys()
        assert raw.keys() == keys
        assert raw["versions"]["torch"] and raw["hardware"]["cores"] >= 1 and raw["cost"]["seconds"] > 0
    evaluate = read_result(finished_run.folder.path / "02-evaluate")
    assert evaluate is not None and evaluate.parity is not None and evaluate.parity.passed
    assert evaluate.parity.same_top == 1.0 and evaluate.parity.tokens > 100
    rows = {row.label: row for row in evaluate.models}
    assert list(rows) == ["teacher", "student", "student verified by teacher"]
    pair, teacher, student = rows["student verified by teacher"], rows["teacher"], rows["student"]
    assert pair.exact and pair.parameters == teacher.parameters + student.parameters
    assert pair.quality == teacher.quality
    assert teacher.quality and teacher.quality.kl is None and student.quality and student.quality.kl
    assert all([point.batch_size for point in row.speed] == [1, 2] for row in rows.values())
    assert all(point.tokens_per_s > 0 for row in rows.values() for point in row.speed)


def test_distillation_brings_the_student_closer(finished_run: TinyRun) -> None:
    result = read_result(finished_run.folder.path / "01-distill")
    assert result is not None
    before, after = (
        next(row for row in result.models if row.label == label) for label in ("student, before", "student")
    )
    assert before.quality and after.quality and before.quality.kl and after.quality.kl
    assert after.quality.kl.value < before.quality.kl.value
    assert result.cost.trained_tokens > 1_800 and result.details.kept_layers and result.details.steps == 8


def test_the_figures_are_those_of_the_published_files(finished_run: TinyRun) -> None:
    """Quality measured again from the artifacts, by other code, is what the result says."""
    import math

    import torch

    from model.mesh import choose_dtype
    from model.text.tokenizer import Tokenizer
    from pipeline.processes import Processes
    from pipeline.recipe import load_recipe
    from pipeline.stages.shared.context import prepare_data
    from tests.tiny import full_logits

    folder = finished_run.folder
    result = read_result(folder.path / "02-evaluate")
    assert result is not None
    recipe = load_recipe(folder.path / "recipe.yaml")
    tokenizer = Tokenizer.load(folder.path / "00-teacher" / "model")
    held_out = prepare_data(recipe.data["text"], tokenizer, finished_run.home / "cache", Processes()).held_out
    dtype = choose_dtype("auto", torch.device("cpu"))
    models = [load_model(folder.path / name / "model", dtype=dtype) for name in ("00-teacher", "01-distill")]
    sums, labels = dict.fromkeys(("nll", "kl", "acceptance", "agreement"), 0.0), 0
    for start, end in zip(held_out.offsets[:-1], held_out.offsets[1:], strict=True):
        tokens = held_out.tokens[start:end].tolist()
        if labels + len(tokens) - 1 > 512:
            break
        teacher, student = (torch.log_softmax(full_logits(model, tokens[:-1]).double(), -1) for model in models)
        labels += len(tokens) - 1
        sums["nll"] -= student.gather(1, torch.tensor(tokens[1:])[:, None]).sum().item()
        sums["kl"] += (teacher.exp() * (teacher - student)).sum().item()
        sums["acceptance"] += torch.minimum(teacher.exp(), student.exp()).sum().item()
        sums["agreement"] += (teacher.argmax(-1) == student.argmax(-1)).sum().item()
    quality = next(row.quality for row in result.models if row.label == "student")
    assert quality is not None and quality.tokens == labels
    for name, total in sums.items():
        # In bf16 two tokens may tie for the first place, and either is right.
        allowed = 0.01 if name == "agreement" else 0.0
        assert math.isclose(getattr(quality, name).value, total / labels, rel_tol=1e-3, abs_tol=allowed), name


def test_a_second_time_nothing_runs(copied_run: TinyRun) -> None:
    before = copied_run.finished()
    weights = copied_run.weights()
    results = copied_run.run()
    assert rerun(before, copied_run.finished()) == set()
    assert copied_run.weights() == weights
    assert [result.stage for result in results] == ["00-teacher", "01-distill", "02-evaluate"]


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("evaluate.held_out_tokens=256", {"02-evaluate"}),
        ("distill.seed=1", {"01-distill", "02-evaluate"}),
        ("distill.checkpoint_every_s=50", set()),
        ("serve.verify=teacher", set()),
        ("tracking.wandb=disabled", set()),
        ("data.text.held_out=0.3", {"01-distill", "02-evaluate"}),
    ],
)
def test_a_change_runs_what_depends_on_it(copied_run: TinyRun, override: str, stages: set[str]) -> None:
    before = copied_run.finished()
    copied_run.run(override)
    assert rerun(before, copied_run.finished()) == stages


def test_replaced_results_are_all_kept(copied_run: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    kept = []
    for seed in (1, 2, 3):
        kept.append(copied_run.weights())
        with caplog.at_level("INFO"):
            copied_run.run(f"distill.seed={seed}")
        assert f"01-distill has other settings or inputs now; what it had made moves to {_aside(copied_run, seed)}" in (
            caplog.text
        )
    weights = [(_aside(copied_run, number) / "model" / "model.safetensors").read_bytes() for number in (1, 2, 3)]
    assert weights == kept and len(set(weights)) == 3


def _aside(tiny: TinyRun, number: int) -> Path:
    return tiny.folder.path / "previous" / f"01-distill.{number}"


@pytest.fixture
def interrupted_run(finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRun:
    """Distillation got a signal in the third of eight steps."""
    calls = []

    class Signalling(Distillation):
        def __call__(self, model: Transformer, batch: Batch, progress: float) -> ObjectiveOutput:
            calls.append(progress)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(model, batch)

    tiny = finished_run.copy(tmp_path / "run", "00-teacher")
    with monkeypatch.context() as patch, pytest.raises(RunInterrupted, match="step 3 of 8"):
        patch.setattr(train.objectives, "Distillation", Signalling)
        tiny.run()
    return tiny


@pytest.mark.parametrize(
    "override",
    [
        "distill.evaluate_every_tokens=null",
        "distill.held_out_tokens=256",
        "distill.activation_checkpointing=true",
        "distill.optimizer=paged_adamw",
    ],
)
def test_interrupted_training_goes_on_where_a_change_reaches_no_weights(
    finished_run: TinyRun, interrupted_run: TinyRun, caplog: pytest.LogCaptureFixture, override: str
) -> None:
    with caplog.at_level("INFO"):
        interrupted_run.run(override)
    assert "Resuming from step 3 of 8" in caplog.text
    assert interrupted_run.weights() == finished_run.weights()
    assert not (interrupted_run.folder.path / "previous").exists()
    result = read_result(interrupted_run.folder.path / "01-distill")
    assert result is not None
    counted = [row.quality.tokens for row in result.models if row.quality]
    assert len(counted) == 3 and len(set(counted)) == 1, "all rows are measured on the same text"
    assert (counted[0] <= 256) == ("held_out_tokens" in override)


def test_interrupted_training_goes_on_to_more_tokens(
    interrupted_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        interrupted_run.run("distill.tokens=3k")
    assert "tokens grew from 2,000 to 3,000; its work goes on, training under the longer schedule" in caplog.text
    assert "Resuming from step 3 of 12" in caplog.text
    result = read_result(interrupted_run.folder.path / "01-distill")
    assert result is not None and result.details.steps == 12


def test_a_finished_stage_goes_on_to_more_tokens_and_its_result_is_kept(
    copied_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    weights = copied_run.weights()
    with caplog.at_level("INFO"):
        copied_run.run("distill.tokens=3k")
    assert "Resuming from step 8 of 12" in caplog.text and copied_run.weights() != weights
    assert (_aside(copied_run, 1) / "model" / "model.safetensors").read_bytes() == weights
    assert read_result(_aside(copied_run, 1)) is not None and (_aside(copied_run, 1) / "metrics.jsonl").exists()


@pytest.mark.parametrize("override", ["distill.micro_batch_tokens=64", "distill.tokens=1k", "distill.seed=1"])
def test_unfinished_work_of_other_settings_is_moved_aside(
    interrupted_run: TinyRun, caplog: pytest.LogCaptureFixture, override: str
) -> None:
    """Even where the size of a micro-batch alone changes: other texts are packed together then."""
    with caplog.at_level("INFO"):
        interrupted_run.run(override)
    moved = [record.getMessage() for record in caplog.records if "moves to" in record.getMessage()]
    assert moved[0].endswith(str(_aside(interrupted_run, 1))) and "Resuming" not in caplog.text
    assert (_aside(interrupted_run, 1) / "checkpoints" / "step-00000003").is_dir()


def test_a_run_of_the_first_version_is_skipped_and_gone_on_with(copied_run: TinyRun) -> None:
    """It recorded one digest of all settings, as the key of its work."""
    for path in copied_run.folder.path.glob("*/inputs.json"):
        path.write_text(json.dumps({"key": json.loads(path.read_text())["full"]}))
    before = copied_run.finished()
    copied_run.run()
    assert rerun(before, copied_run.finished()) == set()
    (copied_run.folder.path / "01-distill" / FILE_NAME).unlink()
    trained = next((copied_run.folder.path / "01-distill" / "checkpoints").iterdir()).stat().st_mtime_ns
    copied_run.run()
    assert next((copied_run.folder.path / "01-distill" / "checkpoints").iterdir()).stat().st_mtime_ns == trained
    assert not (copied_run.folder.path / "previous").exists()


def test_changed_text_runs_everything_but_the_import(
    finished_run: TinyRun, copied_run: TinyRun, tmp_path: Path
) -> None:
    text = write_text(tmp_path / "text", seed=1)
    before = copied_run.finished()
    copied_run.run(f"data.text.source={text}")
    assert rerun(before, copied_run.finished()) == {"01-distill", "02-evaluate"}
    before = copied_run.finished()
    same = shutil.copytree(finished_run.home / "text", tmp_path / "same")
    shutil.rmtree(text)
    same.rename(text)
    copied_run.run(f"data.text.source={text}")
    assert rerun(before, copied_run.finished()) == {"01-distill", "02-evaluate"}, (
        "the path is the same, the text is not"
    )


def test_a_touched_teacher_is_imported_again_and_nothing_else(copied_run: TinyRun, tmp_path: Path) -> None:
    teacher = shutil.copytree(copied_run.home / "teacher", tmp_path / "teacher")
    copied_run.run(f"models.teacher.from={teacher}")
    before = copied_run.finished()
    os.utime(teacher / "config.json", ns=(1, 1))
    copied_run.run(f"models.teacher.from={teacher}")
    assert rerun(before, copied_run.finished()) == {"00-teacher"}


@pytest.mark.parametrize("stage", ["00-teacher", "01-distill"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "extra", "missing", "manifest"])
def test_a_damaged_artifact_is_made_again_and_never_used(copied_run: TinyRun, stage: str, damage: str) -> None:
    weights = copied_run.weights()
    folder = copied_run.folder.path / stage / "model"
    victim = folder / ("potstill.json" if damage == "manifest" else "model.safetensors")
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    if damage in ("flip", "manifest"):
        victim.write_bytes(content)
    elif damage == "truncate":
        victim.write_bytes(content[:-1])
    elif damage == "missing":
        victim.unlink()
    else:
        (folder / "extra.bin").write_bytes(b"x")
    before = copied_run.finished()
    copied_run.run()
    assert rerun(before, copied_run.finished()) == {stage}
    assert copied_run.weights() == weights
    open_artifact(folder)


def test_a_result_that_was_edited_away_is_made_again(copied_run: TinyRun) -> None:
    (copied_run.folder.path / "02-evaluate" / FILE_NAME).write_text("{")
    before = copied_run.finished()
    copied_run.run()
    assert rerun(before, copied_run.finished()) == {"02-evaluate"}


def test_a_gate_refuses_and_stops_the_run(finished_run: TinyRun, tmp_path: Path) -> None:
    tiny = finished_run.copy(tmp_path / "run", "00-teacher")
    with pytest.raises(GateRefused, match="01-distill"):
        tiny.run("distill.gate.max_kl=0.0001")
    folder = tiny.folder.path
    assert not (folder / "01-distill" / "model").exists() and (folder / "01-distill" / "candidate").exists()
    assert not (folder / "02-evaluate").exists()
    result = read_result(folder / "01-distill")
    assert result is not None and not result.passed and result.output is None
    assert "stopped at a gate" in tiny.folder.report.read_text()
    with pytest.raises(GateRefused):
        tiny.run("distill.gate.max_kl=0.0001")
    checkpoint = next((folder / "01-distill" / "checkpoints").iterdir())
    trained = checkpoint.stat().st_mtime_ns
    tiny.run("distill.gate.max_kl=5")
    assert checkpoint.stat().st_mtime_ns == trained, "another bound needs no new training"
    assert tiny.weights() == finished_run.weights()


def test_a_stricter_gate_takes_back_what_was_published(copied_run: TinyRun) -> None:
    with pytest.raises(GateRefused):
        copied_run.run("distill.gate.min_acceptance=0.999")
    assert not (copied_run.folder.path / "01-distill" / "model").exists()
    unfinished = "is not finished: it has no model 'student' yet; `potstill run` with its recipe goes on from where"
    with pytest.raises(UserError, match=unfinished):
        resolve_served(str(copied_run.folder.path))


def test_a_damaged_model_of_a_run_is_not_called_unfinished(copied_run: TinyRun) -> None:
    (copied_run.folder.path / "01-distill" / "model" / "config.json").unlink()
    with pytest.raises(UserError, match=r"The model 'student' of the run .* cannot be used: .*config\.json is missing"):
        resolve_served(str(copied_run.folder.path))


def test_an_evaluation_has_a_gate_too(copied_run: TinyRun) -> None:
    with pytest.raises(GateRefused, match="02-evaluate"):
        copied_run.run("evaluate.gate.max_bits_per_byte=0.01")


def test_a_model_can_be_evaluated_alone(copied_run: TinyRun) -> None:
    stage = {"evaluate": {"model": "teacher", "data": "text", "held_out_tokens": 256, "speed": {"batch_sizes": []}}}
    results = copied_run.run(f"stages={json.dumps([stage])}", "serve=null")
    (row,) = results[-1].models
    assert row.label == "teacher" and row.quality is not None and row.quality.kl is None and row.speed == ()
    assert results[-1].parity is not None and results[-1].parity.passed
    with pytest.raises(UserError, match="has no `serve:`"):
        resolve_served(str(copied_run.folder.path))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("distill.student.layers=9", "teacher has 3 layers, so 9 cannot be kept"),
        ("models.teacher.from=nowhere", "There is no model at nowhere"),
        ("models.teacher.from=./nowhere.gguf", "There is no GGUF file"),
        ("models.teacher.from=wheel:name", "must be of the form wheel:NAME==VERSION"),
        ("data.text.source=./nowhere.txt", "does not exist"),
    ],
)
def test_mistakes_found_while_running_are_sentences(copied_run: TinyRun, override: str, sentence: str) -> None:
    """What was made before stays where it was."""
    before = copied_run.finished()
    with pytest.raises(ValueError) as caught:
        copied_run.run(override)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert copied_run.finished() == before
    copied_run.run()
    assert copied_run.finished() == before


def test_a_recipe_says_in_what_its_model_caches(copied_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    copied_run.run("serve.kv_cache_dtype=int8")
    told: list[ServerOptions] = []

    def run_server(options: ServerOptions) -> int:
        told.append(options)
        return 0

    monkeypatch.setattr("serve.http.server.run_server", run_server)
    for flags in ([], ["--kv-cache-dtype", "fp8"]):
        assert main(["serve", str(copied_run.folder.path), *flags]) == 0
    assert [options.engine.kv_cache_dtype for options in told] == ["int8", "fp8"]


def test_names_in_a_run_become_folders(finished_run: TinyRun) -> None:
    folder = finished_run.folder.path
    served = resolve_served(str(folder))
    assert (served.model, served.verify, served.name) == (str(folder / "01-distill" / "model"), None, "tiny")
    verified = resolve_served(str(folder), "teacher")
    assert verified.verify == str(folder / "00-teacher" / "model")
    plain = resolve_served(served.model, verified.verify)
    assert (plain.model, plain.verify, plain.name) == (served.model, verified.verify, None)
    for model, verify in ((str(folder), "techer"), ("nowhere", None), (served.model, "nowhere")):
        with pytest.raises((UserError, SourceError)):
            resolve_served(model, verify)
    with pytest.raises(UserError, match="no run folder"):
        RunFolder(folder / "01-distill").recipe()


def test_training_that_diverges_is_one_sentence_and_publishes_nothing(
    copied_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Diverging(Distillation):
        def __call__(self, model: Transformer, batch: Batch, progress: float) -> ObjectiveOutput:
            found = super().__call__(model, batch)
            return found._replace(loss_sum=found.loss_sum * float("nan"))

    monkeypatch.setattr(train.objectives, "Distillation", Diverging)
    with pytest.raises(StageFailed, match="lower the learning rate") as caught:
        copied_run.run("distill.seed=1")
    assert "\n" not in str(caught.value)
    assert not (copied_run.folder.path / "01-distill" / "model").exists()
