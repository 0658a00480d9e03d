"""`potstill plan`: the stages that train, what they will hold, and what is wrong in one sentence."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from model.cost import planned_weight_bytes
from model.files.checkpoint import load_config
from pipeline.cli import main
from pipeline.errors import UserError
from pipeline.measure import training_time
from pipeline.measure.quality import HeldOut
from pipeline.plan import GIB, budgets_of, plan_recipe, plan_table, timed
from pipeline.recipe import load_recipe
from pipeline.stages.base import kind_of
from pipeline.stages.distill import run as distill
from pipeline.stages.mod.config import Mod
from pipeline.stages.qlora.config import Qlora
from pipeline.stages.quantize.config import Quantize, Weights
from tests.pipeline.tiny_run import run_stages, write_teacher, write_text
from train.loop import MemoryShortageError, Trainer


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Fewer KV heads, then fewer layers."""
    training = {"data": "text", "tokens": 4096, "batch_tokens": 512, "micro_batch_tokens": 256}
    raw = {
        "name": "planned",
        "models": {"teacher": {"from": str(write_teacher(tmp_path / "teacher"))}},
        "data": {"text": {"source": "nowhere/at-all", "sequence_length": 128}},
        "stages": [
            {"gqa": {"model": "teacher", "kv_heads": 1, "out": "narrow", **training}},
            {"distill": {"teacher": "teacher", "student": {"from": "narrow", "layers": 2}, **training}},
            {"evaluate": {"model": "student", "data": "text"}},
        ],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_each_stage_is_planned_with_the_shape_that_the_one_before_gives(recipe: Path, tmp_path: Path) -> None:
    narrow, small = plan_recipe(load_recipe(recipe, []), tmp_path)
    assert (narrow.name, small.name) == ("01-gqa", "02-distill")
    assert narrow.setup.teacher is not None and narrow.setup.teacher.num_kv_heads > 1
    assert narrow.setup.model == replace(narrow.setup.teacher, num_kv_heads=1)
    assert (small.setup.model.num_layers, small.setup.model.num_kv_heads) == (2, 1)
    assert small.memory.weights < narrow.memory.weights
    assert small.setup.training.micro_batch_tokens == 256


def test_a_student_is_planned_in_its_shape_and_of_candidates_the_largest(recipe: Path, tmp_path: Path) -> None:
    candidates = (
        "distill.student={from: narrow, candidates: [{layers: 1}, {mlp: 60, hidden: 24}, {heads: 2, layers: 1}]}"
    )
    for student in ("distill.student={from: narrow, mlp: 60, hidden: 24}", candidates):
        *_, small = plan_recipe(load_recipe(recipe, [student]), tmp_path)
        model = small.setup.model
        assert (model.num_layers, model.intermediate_size, model.hidden_size, model.num_query_heads) == (3, 60, 24, 4)
    with pytest.raises(UserError, match="no student of narrow has mlp 65: mlp is 65, but the model has 64"):
        plan_recipe(load_recipe(recipe, ["distill.student={from: narrow, mlp: 65}"]), tmp_path)


def test_a_stage_qlora_is_planned(recipe: Path, tmp_path: Path) -> None:
    whole = load_recipe(recipe, [])
    stage = Qlora(tokens=4096, model="teacher", data="text")
    (plan,) = plan_recipe(replace(whole, stages=(("qlora", stage),)), tmp_path)
    assert plan.setup.adapter is not None and plan.setup.adapter.rank == 64
    assert plan.setup.quantization == "nf4" and plan.setup.training.max_grad_norm == 0.3
    assert plan.memory.adapters == plan.memory.gradients > 0


def test_a_quantized_teacher_is_planned_in_its_format(recipe: Path, tmp_path: Path) -> None:
    whole = load_recipe(recipe, ["distill.student={from: teacher, layers: 2}"])
    (_, student), stage = whole.stages[1], Quantize(model="teacher", data="text", out="packed", method="round")
    sizes = []
    for teacher in ("teacher", "packed"):
        stages = (("quantize", stage), ("distill", replace(student, teacher=teacher)))
        (plan,) = plan_recipe(replace(whole, stages=stages), tmp_path)
        assert plan.setup.teacher is not None
        sizes.append(plan.memory.weights - 4 * plan.setup.model.num_parameters())
        assert sizes[-1] == planned_weight_bytes(plan.setup.teacher, plan.setup.teacher_formats, torch.bfloat16)
    assert sizes[0] == 2 * plan.setup.teacher.num_parameters() > 2 * sizes[1]


def test_a_teacher_that_has_said_all_before_makes_no_pass_in_training(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays, to measure by, and costs neither buffers of the loss nor time; of a loss of the text alone as ever."""
    raw = yaml.safe_load(recipe.read_text())
    training = {**raw["stages"][1]["distill"], "student": {"from": "teacher", "layers": 2}}
    raw["stages"] = [
        {"precompute": {"model": "teacher", "data": "text", "out": "told"}},
        {"distill": {**training, "data": "told", "out": "stored"}},
        {"distill": {**training, "data": "text", "out": "dense"}},
        {"distill": {**training, "data": "told", "out": "plain", "loss": {"kind": "cross_entropy"}}},
    ]
    recipe.write_text(yaml.safe_dump(raw))
    stored, dense, plain = plan_recipe(load_recipe(recipe, []), tmp_path)
    assert stored.setup.teacher is not None and stored.setup.asked_teacher is None
    assert dense.setup.asked_teacher == plain.setup.asked_teacher == stored.setup.teacher
    assert stored.memory.loss < dense.memory.loss and stored.memory.weights == dense.memory.weights
    with_teacher = []

    def refuses(training: Any, teacher: Any) -> None:
        with_teacher.append(teacher is not None)
        raise MemoryShortageError("seen")

    monkeypatch.setattr(training_time, "objective_by_settings", refuses)
    monkeypatch.setattr("pipeline.data.data_sets", lambda recipe, cache: [])
    timed([stored, dense, plain], load_recipe(recipe, []), tmp_path)
    assert with_teacher == [False, True, True]


def test_recovery_of_quantized_weights_is_planned_by_what_it_trains(recipe: Path, tmp_path: Path) -> None:
    stage = Quantize(tokens=4096, model="teacher", data="text", weights=Weights(group=16))
    plans = []
    for trained in ("scales", "low_rank", "all"):
        stages = (("quantize", replace(stage, train=trained)),)
        plans += plan_recipe(replace(load_recipe(recipe, []), stages=stages), tmp_path)
    scales, low_rank, everything = (plan.memory for plan in plans)
    shape = plans[0].setup.model
    heads = 2 * (shape.num_query_heads + shape.num_kv_heads) * shape.head_dim
    weights = shape.num_layers * shape.hidden_size * (heads + 3 * shape.intermediate_size)
    norms = shape.hidden_size * (2 * shape.num_layers + 1)
    assert scales.gradients == 4 * (weights // 16 + norms)
    assert everything.gradients == scales.gradients + 4 * weights
    assert scales.gradients < low_rank.gradients < everything.gradients
    assert scales.peak < everything.peak and scales.weights < low_rank.weights


@pytest.mark.parametrize(
    ("changes", "routers"), [({}, 1), ({"every": 1}, 3), ({"layers": (0, 2)}, 2), ({"least_important": 2}, 2)]
)
def test_routers_alone_are_planned(changes: dict, routers: int, recipe: Path, tmp_path: Path) -> None:
    stage = Mod(tokens=4096, model="teacher", data="text", train="router", **changes)
    (plan,) = plan_recipe(replace(load_recipe(recipe, []), stages=(("mod", stage),)), tmp_path)
    trained = routers * (plan.setup.model.hidden_size + 1)
    assert plan.memory.adapters == plan.memory.gradients == 4 * trained
    assert plan.memory.weights == 6 * plan.setup.model.num_parameters()


def test_adapters_that_are_merged_are_trained_on_an_fp32_base(recipe: Path, tmp_path: Path) -> None:
    whole = load_recipe(recipe, ["gqa.train=adapters", "gqa.adapter_rank=4"])
    plan = plan_recipe(whole, tmp_path)[0]
    parent, narrow = plan.setup.teacher, plan.setup.model
    assert parent is not None and plan.setup.adapter is not None and plan.setup.adapter.rank == 4
    assert plan.memory.weights == 2 * parent.num_parameters() + 4 * narrow.num_parameters()


def test_the_command_prints_a_table(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "gqa.micro_batch_tokens=512", "--gpu-memory", "2GiB"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"MiB +01-gqa +02-distill", printed)  # 0.00 GiB would say nothing
    assert not re.search(r"peak +0\.00", printed)
    for part in ("weights", "gradients", "optimizer", "activations", "logits and loss", "peak"):
        assert re.search(rf"^ *{part} +\d+\.\d\d +\d+\.\d\d", printed, re.MULTILINE), part
    assert re.search(r"micro-batch, tokens +512 +256", printed)
    largest = re.search(r"largest in 2 GiB +([\d,]+) +([\d,]+)", printed)
    assert largest and all(int(number.replace(",", "")) > 10_000 for number in largest.groups())


def test_what_does_not_fit_is_said(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "--gpu-memory", "0.001 GiB"]) == 0
    assert re.search(r"largest in 0\.001 GiB +does not fit +does not fit", capsys.readouterr().out)


BRIEF = {"context_tokens": 64, "new_tokens": 2, "batch_sizes": [1]}
MEASURED = {
    "sft": {"model": "teacher"},
    "qlora": {"model": "teacher", "adapter": {"rank": 4}},
    "distill": {
        "teacher": "teacher",
        "student": {
            "from": "teacher",
            "importance_tokens": 512,
            "candidates": [{"layers": 1}, {"mlp": 32}],
            "candidate_tokens": 300,
        },
    },
    "gqa": {"model": "teacher", "kv_heads": 1, "compare": ["mean"], "compare_tokens": 256, "long_context": BRIEF},
    "mod": {"model": "teacher", "speed": BRIEF | {"prefill_tokens": 64}},
}


@pytest.mark.parametrize("kind", MEASURED)
def test_held_out_text_is_timed_as_often_as_models_pass_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And steps are as many as are taken, those of models that are compared among them."""
    called: list[str] = []

    def count(place: Any, name: str) -> None:
        asked = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, **how: (called.append(name), asked(*given, **how))[1])

    count(HeldOut, "quality")
    count(HeldOut, "states")
    count(distill, "measure_importance")
    count(Trainer, "_run_step")
    settings = {"tokens": 2048, "batch_tokens": 256, "micro_batch_tokens": 256, "evaluate_every_tokens": 700}
    stage = {"data": "text", "held_out_tokens": 512, "out": "made", **settings, **MEASURED[kind]}
    run_stages(tmp_path, {kind: stage}, serve="made")
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", [])
    config = recipe.plan()[-1].config
    has_teacher = kind_of(kind).setup(config, {"teacher": load_config(tmp_path / "teacher")}).teacher is not None
    steps = called.count("_run_step")
    assert steps == config.steps + config.compared_steps
    assert len(called) - steps == (config.measured_tokens + config.teacher_tokens * has_teacher) / 512


def test_time_is_that_of_the_data_that_are_there(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    asked = training_time.training_seconds
    monkeypatch.setattr(
        training_time, "training_seconds", lambda *given: (seen.append(given[2].name), asked(*given))[1]
    )
    write_text(tmp_path / "text")
    source = f"data.text={{source: {tmp_path / 'text'}, sequence_length: 128, held_out: 0.2}}"
    assert main(["plan", str(recipe), source, "--time", "--cache", str(tmp_path / "cache")]) == 0
    assert re.search(r"its steps on this machine +\d+s +\d+s", capsys.readouterr().out)
    assert seen == [str(tmp_path / "text")] * 2
    assert main(["plan", str(recipe), "--time"]) == 2
    assert "nowhere/at-all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu-memory", "lots"], "--gpu-memory is 'lots'; write it like 80GiB or 24GB."),
        (
            ["--time", "--gpus", "2", "--gpu-memory", "1GiB"],
            "--time takes steps in this one process; leave --gpus out.",
        ),
        (["distill.student.layers=9"], "narrow has 3 layers, so 9 cannot be kept."),
        (["stages=[]"], "No stage of the recipe planned trains, so there is nothing to plan."),
        (["models.teacher.from=/nowhere"], "There is no model at /nowhere"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_each_stage_says_which_mesh_fits(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(recipe), "gqa.optimizer=adamw_8bit", "--gpus", "4", "--gpu-memory"]
    assert main([*arguments, "1GiB"]) == 0
    assert re.search(r"mesh, replicate × shard +4 × 1 +4 × 1", capsys.readouterr().out)
    assert main([*arguments, "0.001GiB"]) == 0  # where a part of the tokens fits each GPU, and no more
    assert re.search(r"mesh, replicate × shard × context +1 × 2 × 2 +1 × 2 × 2", capsys.readouterr().out)
    assert main([*arguments, "0.0001GiB"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"mesh, replicate × shard +1 × 4, does not fit +1 × 4, does not fit", printed)
    assert "embeddings and head are whole in every process" in printed
    assert main(["plan", str(recipe), "--gpus", "4"]) == 2
    assert "like --gpus 8 --gpu-memory 80GiB." in capsys.readouterr().err


def test_routers_see_all_tokens_of_a_document_so_layers_are_divided_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In mod, and behind it: the second stage would divide tokens, were there no routers in its base."""
    training = {"data": "text", "tokens": 4096, "batch_tokens": 1024, "micro_batch_tokens": 256}
    after = {"model": "routed", "adapter": {"rank": 4}, "quantization": "none", "out": "adapted", **training}
    raw = {
        "name": "planned",
        "models": {"teacher": {"from": str(write_teacher(tmp_path / "teacher"))}},
        "data": {"text": {"source": "nowhere/at-all", "sequence_length": 128}},
        "stages": [{"mod": {"model": "teacher", "out": "routed", **training}}, {"qlora": after}],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw))
    arguments = ["plan", str(tmp_path / "recipe.yaml"), "--gpus", "4", "--gpu-memory"]
    assert main([*arguments, "0.001GiB"]) == 0
    assert re.search(r"mesh, replicate × shard × tensor +1 × 2 × 2 +4 × 1 × 1", capsys.readouterr().out)
    assert main([*arguments, "0.0006GiB"]) == 0
    assert re.search(r"mesh, replicate × shard × tensor +1 × 4 × 1, does not fit +1 × 2 × 2", capsys.readouterr().out)


def test_a_mesh_that_divides_layers_is_shown_by_all_its_sizes(recipe: Path, tmp_path: Path) -> None:
    first, second = plan_recipe(load_recipe(recipe, []), tmp_path)
    first = replace(first, setup=replace(first.setup, processes=8, shards=4, tensor=2))
    second = replace(second, setup=replace(second.setup, processes=8, shards=8))
    shown = {line[0]: line[1:] for line in plan_table([first, second], [GIB]).rows}
    assert shown["mesh, replicate × shard × tensor"] == ["2 × 2 × 2", "1 × 8 × 1"]


def test_budgets() -> None:
    assert budgets_of("80GiB") == [80 * GIB] and budgets_of("24 GB") == [24 * 10**9]
    with pytest.raises(UserError):
        budgets_of("0GiB")
