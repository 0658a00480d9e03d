"""Stage `quantize` on a tiny teacher: what it publishes, compares, recovers, and how it goes on after a kill."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.quantize import calibrated
from model.files.artifact import open_artifact
from model.files.checkpoint import load_model
from model.quantized import quantized_layers
from pipeline.cli import main
from pipeline.errors import UserError
from pipeline.recipe import load_recipe
from pipeline.results import Result
from pipeline.stages.base import kind_of, read_result
from pipeline.stages.quantize.config import Quantize, Weights
from pipeline.stages.quantize.run import formats
from pipeline.stages.shared import training
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from tests.compare import check_close
from tests.forked import end_of, ranks
from tests.pipeline.tiny_run import RECIPE, run_stages
from tests.serve.test_kv_cache_dtype import FixedAttention
from tests.tiny import full_logits, tiny_config

STAGE: dict[str, Any] = {
    "model": "teacher",
    "method": "gptq",
    "compare": ["round", "weighted", "autoround"],
    "iterations": 40,
    "weights": {"format": "int4", "group": 16},
    "calibration_tokens": "512",
    "data": "text",
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "precision": "fp32",
    "held_out_tokens": 512,
    "out": "small",
}


def run(home: Path, **changes: object) -> list[Result[Any]]:
    return run_stages(home, {"quantize": STAGE | changes}, serve="small")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result[Any]]:
    home = tmp_path_factory.mktemp("quantize")
    return home, run(home)[-1]


def test_it_publishes_four_bits_that_serve_as_they_were_measured(finished: tuple[Path, Result[Any]]) -> None:
    home, result = finished
    folder = home / "run" / "01-quantize" / "model"
    assert open_artifact(folder).digest == result.output
    layers = quantized_layers(load_model(folder))
    assert {layer.format.name for name, layer in layers.items() if name.endswith("_proj")} == {"int4"}
    assert result.parity is not None and result.parity.passed
    assert result.details.format == "INT4 and INT8" and 4 < result.details.bits_per_weight < 8
    teacher, _, small = result.models
    assert small.weight_bytes < teacher.weight_bytes


def test_transformers_reads_it_where_embeddings_are_dense(finished: tuple[Path, Result[Any]], tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    run(tmp_path, compare=[], embeddings="none")
    folder, tokens = tmp_path / "run" / "01-quantize" / "model", list(range(3, 40))
    assert "opens in transformers" in (folder / "README.md").read_text()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0]
    check_close(full_logits(load_model(folder, dtype=torch.float32), tokens), logits, dtype=torch.float16)
    run(tmp_path / "zeros", compare=[], embeddings="none", weights={"format": "int4", "symmetric": False})
    assert "opens in vLLM." in (tmp_path / "zeros" / "run" / "01-quantize" / "model" / "README.md").read_text()
    home, _ = finished
    assert "Only potstill reads it" in (home / "run" / "01-quantize" / "model" / "README.md").read_text()


def test_methods_stand_side_by_side_and_calibration_pays(finished: tuple[Path, Result[Any]]) -> None:
    _, result = finished
    found = {row.method: row.quality.kl.value for row in result.details.compared}
    assert list(found) == ["gptq", "round", "weighted", "autoround"]
    assert all(found[method] < found["round"] for method in ("gptq", "weighted", "autoround"))
    assert len({one.name for one in result.details.errors}) == 7 * 3


def test_two_processes_share_the_text_and_round_as_one(finished: tuple[Path, Result[Any]], tmp_path: Path) -> None:
    """What needs no text, and what one of them learns alone, to the bit."""
    home, one = finished
    changes = {"compare": ["round", "autoround"]}
    words = ["run", str(RECIPE), f"models.teacher.from={home / 'teacher'}", f"data.text.source={home / 'text'}"]
    words += [f"stages={json.dumps([{'quantize': STAGE | changes}])}", "serve={model: small}"]
    words += ["--folder", str(tmp_path / "run"), "--cache", str(home / "cache")]
    with ranks(2, main, words, log=tmp_path / "log", environment={"OMP_NUM_THREADS": "1"}) as started:
        assert not any(end_of(started)), (tmp_path / "log").read_text()[-3000:]
    two = read_result(tmp_path / "run" / "01-quantize")
    assert two is not None and two.parity is not None and two.parity.passed
    expected, found = ({row.method: row.quality for row in result.details.compared} for result in (one, two))
    assert all(found[method] == expected[method] for method in ("round", "autoround"))
    assert found["gptq"].kl.value == pytest.approx(expected["gptq"].kl.value, rel=0.1)
    errors = [[of.error for of in result.details.errors] for result in (one, two)]
    assert errors[1] == pytest.approx(errors[0], rel=0.2)


def test_the_report_shows_methods_and_layers(finished: tuple[Path, Result[Any]]) -> None:
    home, _ = finished
    page = (home / "run" / "report.html").read_text()
    assert "Quantized weights: 01-quantize" in page and "weighted" in page and "gate, up" in page
    assert "quality against bytes" in page and "<title>autoround: " in page


@pytest.mark.parametrize(
    ("train", "changes"),
    [
        ("scales", {}),
        ("all", {}),
        ("all", {"weights": {"format": "ternary"}, "embeddings": "none", "learning_rate": 1e-2}),
    ],
    ids=["scales", "all", "ternary"],
)
def test_recovery_brings_it_closer_to_its_parent(train: str, changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"learning_rate": 1e-3} | changes
    result = run(tmp_path, compare=[], method="round", train=train, tokens="4k", **changes)[-1]
    _, before, after = (row.quality for row in result.models)
    assert before and after and before.kl and after.kl
    assert after.kl.value < 0.9 * before.kl.value
    assert result.parity is not None and result.parity.passed


def test_a_recovery_pays_with_nothing_set_but_its_tokens(tmp_path: Path) -> None:
    told = {name: value for name, value in STAGE.items() if not name.endswith("batch_tokens")}
    result = run_stages(tmp_path, {"quantize": told | {"compare": [], "tokens": "32k"}}, serve="small")[-1]
    _, before, after = (row.quality for row in result.models)
    assert before and after and before.kl and after.kl and before.acceptance and after.acceptance
    assert after.kl.value < 0.97 * before.kl.value and after.acceptance.value > before.acceptance.value


def test_a_recovery_that_changes_no_rounded_weight_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps so small that no weight leaves its level and no scale its number in bf16."""
    caplog.set_level(logging.INFO, logger="pipeline")
    how: dict[str, Any] = {"compare": [], "method": "round", "train": "all", "tokens": "512"}
    run(tmp_path / "slow", **how, learning_rate=1e-5)
    assert "recovery has changed levels or scales of 0 of 21 projections" in caplog.text
    assert "no level and no scale of small: a higher learning_rate than 1e-05 or more tokens may help" in caplog.text
    caplog.clear()
    run(tmp_path / "fast", **how, learning_rate=0.3)
    assert "of 21 of 21 projections" in caplog.text and "no level and no scale" not in caplog.text


@pytest.mark.parametrize(("rate", "remedy"), [(1e-6, "higher"), (0.3, "lower")])
def test_a_recovery_that_makes_it_worse_names_one_remedy(
    rate: float, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no level and no scale has changed, smaller steps would be no remedy."""
    monkeypatch.setattr(training, "describe_loss", lambda before, after: "by a little")
    run(tmp_path, compare=[], method="round", train="all", tokens="256", learning_rate=rate)
    assert f"training made small worse: by a little; a {remedy} learning_rate than {rate:g} or more" in caplog.text
    assert set(re.findall(r"a (higher|lower) learning_rate", caplog.text)) == {remedy}


def test_figures_and_gate_are_those_with_the_cache_in_8_bits(
    finished: tuple[Path, Result[Any]], tmp_path: Path
) -> None:
    plain, rounded = finished[1], run(tmp_path, compare=[], kv_cache="int8")[-1]
    (*_, before), (*_, after) = plain.models, rounded.models
    assert after.kv_bytes_per_token < 0.8 * before.kv_bytes_per_token
    assert before.quality and after.quality and after.quality.nll != before.quality.nll
    assert after.quality.perplexity == pytest.approx(before.quality.perplexity, rel=0.02)


def test_layers_may_have_other_formats_or_none(tmp_path: Path) -> None:
    run(tmp_path, compare=[], layers={"*.down_proj": "int8", "model.layers.0.*": "none"})
    layers = quantized_layers(load_model(tmp_path / "run" / "01-quantize" / "model"))
    names = {name: layer.format.name for name, layer in layers.items()}
    assert names["model.layers.1.mlp.down_proj"] == "int8" and names["model.layers.1.mlp.up_proj"] == "int4"
    assert not any(name.startswith("model.layers.0.self_attn") for name in names)


def test_a_budget_of_bits_goes_to_the_layers_that_rounding_costs_most(tmp_path: Path) -> None:
    result = run(tmp_path, compare=[], average_bits=7.5, embeddings="none")[-1]
    found = {one.name: one.format for one in result.details.errors}
    assert set(found.values()) == {"INT4", "INT8"}
    assert all(found[n] == found[n.replace("q_proj", "k_proj")] for n in found if n.endswith("q_proj"))
    assert 7 < result.details.bits_per_weight <= 7.5
    ((kind, config),) = load_recipe(tmp_path / "run" / "recipe.yaml").stages
    shapes = {"teacher": load_model(tmp_path / "run" / "01-quantize" / "model").config}
    planned = kind_of(kind).weight_bytes(config, shapes, tmp_path)
    assert planned == pytest.approx(result.models[-1].weight_bytes, rel=0.02), "which layers is not known, how much is"
    costs = {one.name: one.nats for one in result.details.costs}
    assert costs.keys() == found.keys() and min(costs.values()) > 0
    assert {one.name for one in result.details.costs if one.enlarged} == {n for n, f in found.items() if f == "INT8"}
    assert "What rounding each layer alone would cost" in (tmp_path / "run" / "report.html").read_text()


def test_after_a_kill_in_any_layer_it_goes_on_behind_the_last_one(
    finished: tuple[Path, Result[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = calibrated._quantize_layer, []

    def dies_once_in_each_layer(layer: Any, number: int, *others: Any) -> Any:
        seen.append(number)
        if seen.count(number) == 1:
            raise KeyboardInterrupt
        return real(layer, number, *others)

    monkeypatch.setattr(calibrated, "_quantize_layer", dies_once_in_each_layer)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, compare=[])
    assert run(tmp_path, compare=[])[-1].output is not None
    assert seen == [0, 0, 1, 1, 2, 2]
    home, _ = finished
    whole, resumed = (load_model(place / "run" / "01-quantize" / "model") for place in (home, tmp_path))
    for name, layer in quantized_layers(whole).items():
        assert torch.equal(layer.weight.dequantize(), quantized_layers(resumed)[name].weight.dequantize())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weights": {"format": "int4", "group": 48}}, "groups of 48 do not divide"),
        ({"average_bits": 2.0}, "2.0 bits a weight are less than"),
        ({"layers": {"*.down_proj": "int5"}}, "layers"),
        ({"method": "magic"}, "method"),
        ({"weights": {"format": "ternary"}, "method": "round"}, "cannot hold weights in TERNARY and in formats of"),
        ({"calibration_tokens": 16, "data": "text"}, "calibration text has"),
        (
            {"weights": {"format": "nf4"}, "method": "round", "embeddings": "none", "kv_cache": "fp8-static"},
            "beside weights of compressed-tensors, not bitsandbytes",
        ),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        run(tmp_path, compare=[], **changes)
    assert "\n" not in str(caught.value).strip()


EVEN: dict[str, Any] = {"model": "teacher", "embeddings": "int8"}


@pytest.mark.parametrize(
    ("changes", "told", "then"),
    [
        ({}, "weights.group: 16", {"weights": Weights(group=16)}),
        (
            {"weights": Weights(activations=True)},
            "weights.group: 16 and weights.activations: false",
            {"weights": Weights(group=16)},
        ),
        ({"weights": Weights("ggml")}, "weights: {format: int8}", {"weights": Weights("int8")}),
        ({"weights": Weights(group=7)}, "weights: {format: int8}", {"weights": Weights("int8")}),
        (
            {"weights": Weights("int8"), "layers": {"*.up_proj": "int4"}},
            'layers: {"*.up_proj": int8}',
            {"layers": {"*.up_proj": "int8"}},
        ),
        (
            {"weights": Weights("int8"), "average_bits": 9.0, "larger": "int6", "layers": {"lm_head": "none"}},
            "larger: int8",
            {"larger": "int8"},
        ),
        ({"weights": Weights("int8"), "embeddings": "int4"}, "embeddings: int8", {"embeddings": "int8"}),
    ],
)
def test_rows_that_groups_do_not_divide_name_what_works(
    changes: dict[str, Any], told: str, then: dict[str, Any], tmp_path: Path
) -> None:
    shapes = {"teacher": tiny_config(hidden_size=48, intermediate_size=80)}
    config = Quantize(data="text", **EVEN | changes)
    with pytest.raises(UserError, match=re.escape(f"Set {told}.") + "$"):
        formats(config, shapes, tmp_path)
    assert formats(replace(config, **then), shapes, tmp_path)


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="quantized already"):
        run_stages(
            tmp_path, {"quantize": STAGE}, {"quantize": STAGE | {"model": "small", "out": "smaller"}}, serve="smaller"
        )


def test_scales_of_a_static_cache_are_published_and_served(tmp_path: Path) -> None:
    """The engine over the folder says what full passes say whose keys and values the oracle rounds by these scales."""
    result = run(tmp_path, compare=[], method="round", kv_cache="fp8-static")[-1]
    folder, tokens = tmp_path / "run" / "01-quantize" / "model", list(range(3, 60))
    model = load_model(folder, dtype=torch.float32)
    assert len(model.cache_scales) == 3 and not any((scale == 1).any() for both in model.cache_scales for scale in both)
    attention = FixedAttention(model.config, torch.tensor([0, len(tokens)], dtype=torch.int32), model.cache_scales)
    with torch.no_grad():
        states = model(torch.tensor(tokens), torch.arange(len(tokens)), attention)
        expected = model.logits(states).log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    engine = LLM(str(folder), dtype="float32", num_pages=16, kv_cache_dtype="fp8")
    (served,) = engine.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=1))
    found = torch.tensor([entry.logprob for entry in served.prompt_logprobs or () if entry is not None])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    (*_, before), (*_, own) = result.models, run(tmp_path, compare=[], method="round", kv_cache="fp8")[-1].models
    assert before.quality and own.quality and before.quality.nll != own.quality.nll
