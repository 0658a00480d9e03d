"""What a run says before its first import: data that is nowhere, a disk too full, what a model is too small for."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from compress.quantize.round_to_nearest import formats_of_layers
from model.formats.compressed_tensors import Int4
from model.lora import LoraConfig
from pipeline.cli import main
from pipeline.plan import plan_recipe
from pipeline.preflight import ROOM, little_room, preflight, undivided
from pipeline.recipe import load_recipe
from pipeline.run_folder import RunFolder
from tests.pipeline.tiny_run import write_teacher


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that knows 128 positions."""
    folder = tmp_path_factory.mktemp("preflight")
    teacher = write_teacher(folder / "teacher")
    stage = {
        "model": "teacher",
        "kv_heads": 1,
        "data": "text",
        "tokens": 512,
        "batch_tokens": 512,
        "micro_batch_tokens": 512,
    }
    raw = {
        "name": "planned",
        "models": {"teacher": {"from": str(teacher)}},
        "data": {"text": {"source": "python-stdlib/json", "sequence_length": 64}},
        "stages": [{"gqa": stage}],
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def run(recipe: Path, folder: Path, *overrides: str) -> int:
    return main(["run", str(recipe), *overrides, "--folder", str(folder / "run"), "--cache", str(folder / "cache")])


def said_before_anything(recipe: Path, folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The sentence with which a run ends; it has imported nothing."""
    assert run(recipe, folder, *overrides) == 2
    assert not list((folder / "run").glob("00-*"))
    return capsys.readouterr().err.splitlines()[-1]


def test_data_that_is_nowhere(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "chats.jsonl"
    sentence = f"data.text: data source '{missing}' does not exist on this machine and is no hub id (org/name)."
    assert said_before_anything(recipe, tmp_path, capsys, f"data.text.source={missing}") == f"potstill: {sentence}"
    assert main(["plan", str(recipe), f"data.text.source={missing}"]) == 0
    assert sentence in capsys.readouterr().out
    mixed = f"data.text={{mix: [{{source: python-stdlib/json}}, {{source: '{missing}'}}], sequence_length: 64}}"
    assert said_before_anything(recipe, tmp_path, capsys, mixed) == f"potstill: {sentence}"


def test_groups_that_do_not_divide_the_model_of_an_earlier_stage(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = yaml.safe_load(recipe.read_text())
    raw["stages"] += [{"quantize": {"model": "student", "data": "text", "weights": {"format": "int4", "group": 24}}}]
    two = tmp_path / "recipe.yaml"
    two.write_text(yaml.safe_dump(raw))
    told = "model.layers.0.self_attn.q_proj cannot be quantized: INT4: groups of 24 do not divide rows of 32 weights."
    told += " Set weights.group: 16."
    assert said_before_anything(two, tmp_path, capsys) == f"potstill: quantize: {told}"
    assert main(["plan", str(two)]) == 2 and told in capsys.readouterr().err


STEPS = {"data": "text", "tokens": 512, "batch_tokens": 512, "micro_batch_tokens": 512}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gqa", {"model": "small", "kv_heads": 1, **STEPS}),
        ("mod", {"model": "small", "layers": [1], **STEPS}),
        ("distill", {"teacher": "teacher", "student": {"from": "small", "layers": 1}, **STEPS}),
        ("sft", {"model": "small", **STEPS}),
        ("qlora", {"model": "small", **STEPS}),
        ("dpo", {"model": "small", **STEPS, "data": "pairs"}),
        ("quantize", {"model": "small", "data": "text"}),
    ],
)
def test_a_stage_that_goes_on_from_what_an_earlier_one_quantizes(
    kind: str, settings: dict[str, object], recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = yaml.safe_load(recipe.read_text())
    raw["data"]["pairs"] = raw["data"]["text"] | {"preference": True}
    raw["stages"] = [
        {"quantize": {"model": "teacher", "data": "text", "out": "small"}},
        {kind: {**settings, "out": "next"}},
    ]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    sentence = f"02-{kind}: small is quantized already; name the model that it was made from."
    assert said_before_anything(path, tmp_path, capsys) == f"potstill: {sentence}"


def test_a_disk_without_room_for_checkpoints(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plan_recipe(load_recipe(recipe, []), tmp_path)
    needed = int(ROOM * plans[0].memory.checkpoint)
    monkeypatch.setattr("pipeline.preflight.shutil.disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    sentence = said_before_anything(recipe, tmp_path, capsys)
    assert sentence.startswith(f"potstill: 01-gqa needs {needed:,} bytes of disk for its checkpoints (2.2 of ")
    assert f"but {needed - 1:,} are free at {tmp_path}" in sentence
    assert main(["plan", str(recipe)]) == 0
    assert "01-gqa needs" in capsys.readouterr().out
    # What the stage has on the disk already need not be free.
    checkpoint = tmp_path / "run" / "01-gqa" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"1")
    assert little_room(plans, tmp_path / "run") is None


def test_processes_that_cannot_divide_the_layers_of_a_model(recipe: Path, tmp_path: Path) -> None:
    (plan,) = plan_recipe(load_recipe(recipe, []), tmp_path)
    assert undivided([plan], 2) is None
    assert undivided([plan], 3) == (
        "01-gqa: tp_size 3 does not divide the 4 attention heads; shard over more processes instead (dp_shard_size)"
    )
    adapted = replace(plan.setup, adapter=LoraConfig(rank=4, dora=True))
    assert "01-gqa: tp_size 2 cuts the rows whose norms DoRA" in str(undivided([replace(plan, setup=adapted)], 2))
    base = replace(plan.setup, adapter=LoraConfig(rank=4), quantization="nf4")
    taught = replace(
        plan.setup, teacher=plan.setup.model, teacher_formats=formats_of_layers(plan.setup.model, Int4(32))
    )
    for setup, layer in ((base, "q_proj"), (taught, "o_proj")):
        said = undivided([replace(plan, setup=setup)], 2)
        assert said is not None and said.startswith(f"01-gqa: tp_size 2 cannot cut model.layers.0.self_attn.{layer}: ")


def test_a_model_that_is_imported_need_not_be_found_again(recipe: Path, tmp_path: Path) -> None:
    gone = load_recipe(recipe, [f"models.teacher.from={tmp_path / 'gone'}"])
    folder, imported = RunFolder(tmp_path / "run"), gone.plan()[0]
    with pytest.raises(ValueError, match="gone"):
        preflight(gone, folder, tmp_path)
    write_teacher(folder.model(imported))
    (folder.stage(imported) / "result.json").write_text("{}")
    folder.write_recipe(gone)
    preflight(gone, folder, tmp_path)
    with pytest.raises(ValueError, match="other"):
        preflight(load_recipe(recipe, [f"models.teacher.from={tmp_path / 'other'}"]), folder, tmp_path)
    (folder.model(imported) / "config.json").unlink()
    with pytest.raises(ValueError, match="gone"):
        preflight(gone, folder, tmp_path)


def test_a_finished_run_is_checked_again_where_its_recipe_has_changed(recipe: Path, tmp_path: Path) -> None:
    folder, finished = RunFolder(tmp_path / "run"), load_recipe(recipe, [])
    for stage in finished.plan():
        folder.stage(stage).mkdir(parents=True)
        (folder.stage(stage) / "result.json").write_text("{}")
    folder.write_recipe(finished)
    write_teacher(folder.model(finished.plan()[0]))
    preflight(finished, folder, tmp_path)
    with pytest.raises(ValueError, match="must be a multiple of num_key_value_heads"):
        preflight(load_recipe(recipe, ["gqa.kv_heads=3"]), folder, tmp_path)


def test_texts_longer_than_the_model_knows(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = plan_recipe(load_recipe(recipe, []), tmp_path)
    known = plan.setup.model.num_positions
    sentence = f"01-gqa: the sequence_length of its data is {known + 1:,}, but its model knows {known:,} positions"
    for length, is_said in ((known, False), (known + 1, True)):
        changes = [
            f"data.text.sequence_length={length}",
            f"gqa.micro_batch_tokens={4 * known}",
            f"gqa.batch_tokens={4 * known}",
        ]
        assert main(["plan", str(recipe), *changes]) == 0
        assert (sentence in capsys.readouterr().out) is is_said
