"""`potstill plan` of what is served: which GPUs hold it, how many tokens, and what is only estimated."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from model.cost import GPUS, OnGpus, Roofline, Served
from model.files.checkpoint import load_model
from pipeline.cli import main
from pipeline.errors import UserError
from pipeline.plan import GIB, gpu_named, on_gpus, plan_recipe
from pipeline.plan_serving import OPTIONS, divisions, placements, served_models, serving_plan
from pipeline.recipe import load_recipe
from serve.engine.kv_cache import PAGE_SIZE
from serve.engine.loading import Models, count_pages
from tests.pipeline.tiny_run import write_teacher
from tests.serve.toys import toy_tokenizer

LLAMA_3 = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""As their config.json files have them."""


def write_llama(folder: Path, size: str) -> Path:
    """A config.json without weights."""
    shared = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shared | LLAMA_3[size]))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Llama-3-8B is taught by the 70B, rounded and served."""
    training = {"data": "text", "tokens": "100M", "batch_tokens": 524_288, "micro_batch_tokens": 2048}
    student = {"teacher": "teacher", "student": {"from": "small"}, "out": "taught", "activation_checkpointing": True}
    raw = {
        "name": "llama",
        "models": {
            "teacher": {"from": str(write_llama(tmp_path / "70b", "70b"))},
            "small": {"from": str(write_llama(tmp_path / "8b", "8b"))},
        },
        "data": {"text": {"source": "nowhere/at-all", "sequence_length": 2048}},
        "stages": [
            {"distill": {**student, **training}},
            {"quantize": {"model": "taught", "data": "text", "embeddings": "none", "out": "rounded"}},
        ],
        "serve": {"model": "taught"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_a_70b_teacher_teaches_8b_on_eight_gpus_of_80_gib(llama: Path, tmp_path: Path) -> None:
    plans = plan_recipe(load_recipe(llama, []), tmp_path)
    (alone,) = plans
    assert alone.memory.peak > 80 * GIB
    (placed,) = on_gpus(plans, 8, [80 * GIB])
    assert placed.setup.shards > 1 and 8 % placed.setup.shards == 0
    assert placed.memory.peak <= 80 * GIB and placed.memory == placed.setup.memory()
    teacher = placed.setup.teacher
    assert teacher is not None and 70e9 < teacher.num_parameters() < 71e9
    assert 8e9 < placed.setup.model.num_parameters() < 8.1e9


def test_the_command_shows_the_mesh_and_how_to_serve_each_of_them(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(llama), "--gpus", "8", "--gpu-memory", "80GiB", "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"mesh, replicate × shard +\d × \d\s*\n", printed)
    assert re.search(r"80 GiB, 1 × 1 +8 +14\.96 .*\d of \d+", printed)
    assert "1 GPU without options, in 8 replicas." in printed
    assert "Estimates by arithmetic" in printed and "nothing was measured" in printed
    assert main(["plan", str(llama), "serve.model=teacher", "--gpus", "8", "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"80 GiB, 1 × 1 +8 +131\.42 +1\.\d+ +0\.00 +does not fit *\n", printed)
    assert "2 GPUs with --tensor-parallel-size 2, in 4 replicas." in printed


def test_figures_are_those_of_the_arithmetic(llama: Path, tmp_path: Path) -> None:
    recipe = load_recipe(llama, ["serve.model=small", "serve.kv_cache_dtype=fp8"])
    table = serving_plan(recipe, tmp_path, gpus=2, budgets=[48 * GIB], gpu=GPUS["l40s"])
    assert [row[0] for row in table.rows] == ["48 GiB, 1 × 1", "48 GiB, 2 × 1", "48 GiB, 1 × 2"]
    served = served_models(recipe, tmp_path)["small"]
    assert served.kv_dtype == torch.float8_e4m3fn
    placed = OnGpus(served, 2, 1)
    roofline = Roofline(placed, GPUS["l40s"])
    row = [str(cell) for cell in table.rows[1]]
    assert row[2] == f"{placed.weights / GIB:,.2f}"
    assert row[6:8] == [f"{1e3 * roofline.ttft_s(1024, budget=2048):.1f}", f"{1e3 * roofline.tpot_s(1, 2048):.1f}"]


def test_tokens_are_those_that_the_engine_finds_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own count, on a GPU of which weights alone are taken."""
    model = load_model(write_teacher(tmp_path / "model"), dtype=torch.bfloat16)
    total, served = 4 * GIB, Served(model.config)
    weights = OnGpus(served).weights
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total - weights, total))
    models = Models(model, toy_tokenizer(), dtype=torch.bfloat16, device=torch.device("cuda"))
    pages = count_pages(OPTIONS, models, models.kv_bytes_per_token(torch.bfloat16))
    (one,) = placements(served, None, gpus=1, budgets=[total])
    assert one.num_tokens == pages * PAGE_SIZE > 0


def test_quantized_weights_and_a_draft_count(llama: Path, tmp_path: Path) -> None:
    models = served_models(load_recipe(llama, ["serve.model=rounded"]), tmp_path)
    (dense,), (rounded,), (pair,) = (
        placements(models[name], draft, gpus=1, budgets=[80 * GIB])
        for name, draft in (("taught", None), ("rounded", None), ("taught", models["rounded"]))
    )
    ends = 2 * 2 * 128_256 * 4096  # embeddings and head stay in bf16
    assert (rounded.weights - ends) / (dense.weights - ends) == pytest.approx(5 / 16, rel=1e-3)  # scales are in fp32
    assert pair.weights == dense.weights + rounded.weights and pair.page_bytes == 2 * dense.page_bytes
    assert pair.temporaries > dense.temporaries and pair.num_tokens < dense.num_tokens / 2


def test_a_folder_that_is_quantized_is_planned_so(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "8b" / "config.json"
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": entry}))
    recipe = load_recipe(llama, ["stages=[]", "serve.model=small"])
    served = served_models(recipe, tmp_path)["small"]
    assert len(served.formats) == 7 * 32
    assert 5 * GIB < OnGpus(served).weights < 6 * GIB


def test_divisions_are_all_that_come_out_even_and_those_that_the_model_allows() -> None:
    assert divisions(1) == [(1, 1)]
    assert divisions(4) == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
    assert divisions(6)[:5] == [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3)]


def test_gpus_that_a_model_cannot_be_divided_among_are_left_out(llama: Path, tmp_path: Path) -> None:
    recipe = load_recipe(llama, ["serve.model=small"])
    table = serving_plan(recipe, tmp_path, gpus=3, budgets=[80 * GIB], gpu=None)
    assert [(row[0], row[1]) for row in table.rows] == [("80 GiB, 1 × 1", "3"), ("80 GiB, 1 × 3", "1")]


def test_so_are_those_that_would_cut_groups_of_weights(llama: Path, tmp_path: Path) -> None:
    recipe = load_recipe(llama, ["stages.1.quantize.weights={format: int4, group: 512}", "serve.model=rounded"])
    table = serving_plan(recipe, tmp_path, gpus=8, budgets=[80 * GIB], gpu=None)
    tensors = {int(str(row[0]).split(" × ")[0].split()[-1]) for row in table.rows}
    assert tensors == {1, 2, 4}  # 14,336 neurons are 28 groups


def test_what_fits_nowhere_is_said(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(llama), "stages=[]", "serve.model=teacher", "--gpus", "2", "--gpu-memory", "24GiB"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"GiB, \d × \d .*does not fit *\n", printed)) == 3
    assert "teacher does not fit so many GPUs." in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "h1000"], "--gpu is 'h1000'; known are a100, h100, h200, l40s, rtx4090."),
        (["--gpus", "0", "--gpu", "h100"], "--gpus 0 needs a number of GPUs"),
        (["stages=[]", "--gpus", "-1"], "--gpus -1 needs a number of GPUs"),
        (["stages=[]", "serve=null"], "No stage of the recipe llama trains, so there is nothing to plan."),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(llama), "serve.model=small", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1


def test_a_gpu_brings_its_memory(capsys: pytest.CaptureFixture[str], llama: Path) -> None:
    assert gpu_named(None) is None and gpu_named("H100") is GPUS["h100"]
    with pytest.raises(UserError):
        gpu_named("")
    arguments: list[Any] = ["plan", str(llama), "stages=[]", "serve.model=small", "--gpu", "rtx4090"]
    assert main(arguments) == 0
    assert "24 GiB, 1 × 1" in capsys.readouterr().out
    assert main([*arguments, "--gpu-memory", "20GiB"]) == 0
    assert "20 GiB, 1 × 1" in capsys.readouterr().out
