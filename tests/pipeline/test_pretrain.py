"""Stage `pretrain` on a little text: a model from nothing, with a part of another model's vocabulary."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.config import MixtureOfDepths
from model.cost import training_flops_per_token
from model.files.artifact import open_artifact
from model.files.checkpoint import load_config, load_model
from model.text.tokenizer import Tokenizer
from pipeline.errors import UserError
from pipeline.recipe import RecipeError, load_recipe
from pipeline.report.page import logged_curves
from pipeline.results import Result
from pipeline.run_folder import RunFolder
from pipeline.stages.pretrain.config import Architecture
from pipeline.stages.pretrain.report import compute_chart, sections
from pipeline.stages.pretrain.run import model_config
from tests.compare import check_close
from tests.pipeline.tiny_run import RECIPE, run_stages
from tests.tiny import full_logits, tiny_config

SHAPE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "layers": 2, "query_heads": 4, "kv_heads": 4}
STAGE = {
    "tokenizer": "words",
    "architecture": SHAPE,
    "data": "text",
    "tokens": "4k",
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "learning_rate": 1e-2,
    "precision": "fp32",
    "evaluate_every_tokens": "2k",
    "held_out_tokens": 512,
    "out": "parent",
}
GQA = {name: STAGE[name] for name in ("data", "batch_tokens", "micro_batch_tokens", "precision", "held_out_tokens")} | {
    "model": "parent",
    "kv_heads": 2,
    "tokens": 512,
    "loss": {"kind": "cross_entropy"},
    "long_context": {"context_tokens": 20, "new_tokens": 2, "batch_sizes": [1]},
    "out": "narrow",
}


def run(home: Path, *stages: dict[str, object]) -> list[Result]:
    return run_stages(home, *stages, serve="parent", called="words")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Result]]:
    home = tmp_path_factory.mktemp("pretrain")
    return home, run(home, {"pretrain": STAGE}, {"gqa": GQA})


def test_it_publishes_what_transformers_reads(finished: tuple[Path, list[Result]]) -> None:
    home, (_, result, _) = finished
    folder = home / "run" / "01-pretrain" / "model"
    assert open_artifact(folder).digest == result.output
    model = load_model(folder, dtype=torch.float32)
    assert (model.config.vocab_size, model.config.num_kv_heads, model.config.head_dim) == (300, 4, 8)
    tokens = AutoTokenizer.from_pretrained(folder)("steam and copper, mash and wort")["input_ids"]
    assert tokens == Tokenizer.load(folder).encode("steam and copper, mash and wort") and max(tokens) < 300
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        check_close(full_logits(model, tokens), theirs(torch.tensor([tokens])).logits[0], dtype=torch.float16)


def test_it_learns_and_says_how_well(finished: tuple[Path, list[Result]]) -> None:
    home, (_, result, _) = finished
    (parent,) = result.models
    assert parent.quality is not None and parent.quality.kl is None
    assert parent.quality.perplexity < 100, "it began at about 300, the size of the vocabulary"
    assert result.parity is not None and result.parity.passed
    curve = [json.loads(line) for line in (home / "run" / "01-pretrain" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["held_out_cross_entropy"] for row in curve if "held_out_cross_entropy" in row]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_what_it_made_is_a_parent_like_any_other(finished: tuple[Path, list[Result]]) -> None:
    """Converted, and uptrained on the text alone."""
    home, (_, _, narrow) = finished
    before, after = (row.quality for row in narrow.models[1:])
    assert before and after and after.nll.value < before.nll.value
    rows = [json.loads(line) for line in (home / "run" / "02-gqa" / "metrics.jsonl").read_text().splitlines()]
    assert "cross_entropy" in rows[0] and "kl" not in rows[0]


def test_the_same_recipe_gives_the_same_weights(finished: tuple[Path, list[Result]], tmp_path: Path) -> None:
    run(tmp_path, {"pretrain": STAGE})
    once, again = (home / "run" / "01-pretrain" / "model" / "model.safetensors" for home in (finished[0], tmp_path))
    assert once.read_bytes() == again.read_bytes()


def test_its_shape_is_known_before_the_tokenizer_is_read() -> None:
    whole = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "query_heads": 4, "kv_heads": 4}
    words = tiny_config(vocab_size=512)
    assert model_config(Architecture(**whole), words).vocab_size == 512
    assert model_config(Architecture(**whole, vocab_size=300), words).vocab_size == 300


def test_a_routed_one_learns_from_nothing(tmp_path: Path) -> None:
    """It publishes its routers, is served as it was measured, and the report shows both models by their compute."""
    routers = {"mixture_of_depths": {"every": 2, "capacity": 0.25}}
    routed = {**STAGE, "architecture": SHAPE | routers, "evaluate_every_tokens": "1k", "out": "routed"}
    _, dense, result = run(tmp_path, {"pretrain": STAGE}, {"pretrain": routed})
    mixture = load_config(tmp_path / "run" / "02-pretrain" / "model").mixture_of_depths
    assert mixture is not None and (mixture.layers, mixture.route, mixture.capacity) == ((1,), "block", 0.25)
    assert mixture.thresholds != (0.0,) and result.parity is not None and result.parity.passed
    (model,) = result.models
    assert model.quality is not None and model.quality.perplexity < 100
    assert result.details.realised == [pytest.approx(0.25, abs=0.15)]
    operations = [one.details.training_flops for one in (dense, result)]
    assert operations[1].per_token < operations[0].per_token
    assert operations[0].total == operations[0].per_token * dense.cost.trained_tokens
    (table,) = sections([dense, result], {})[0].tables
    assert [row[0] for row in table.rows] == ["parent", "routed"] and str(table.rows[1][-1]).endswith("in 1 layers")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "From nothing, by training compute" in page and page.count("Held-out loss by training compute") == 2
    folder = RunFolder(tmp_path / "run")
    drawn = compute_chart([dense, result], logged_curves(folder, folder.recipe())).html(alone=True)
    image = ElementTree.fromstring(drawn)
    marks = [one for one in image.iter() if one.get("class") in ("dot c1", "dot c2")]
    assert image.tag.endswith("svg") and [one.get("class") for one in marks] == ["dot c1"] * 2 + ["dot c2"] * 4


def test_training_operations_are_those_of_the_products() -> None:
    """Counted by hand: 2 multiplications and additions a weight and token, thrice for forward and backward."""
    config = replace(tiny_config(num_layers=2), mixture_of_depths=None)
    hidden, head, context = config.hidden_size, config.head_dim, 64
    heads = config.num_query_heads * head
    weights = hidden * head * 2 * (config.num_query_heads + config.num_kv_heads) + 3 * hidden * config.intermediate_size
    scores = 2 * 2 * heads * context / 2
    dense = 3 * (2 * (2 * weights + scores) + 2 * hidden * config.vocab_size)
    assert training_flops_per_token(config, context) == pytest.approx(dense)
    routed = replace(config, mixture_of_depths=MixtureOfDepths("block", (1,), 0.25))
    saved = 3 * (2 * weights * 0.75 + scores * (1 - 0.25**2) - 2 * hidden)
    assert training_flops_per_token(routed, context) == pytest.approx(dense - saved)


def test_the_iso_flop_recipe_spends_the_same_on_each_model() -> None:
    recipe = load_recipe(RECIPE.with_name("mod-isoflop.yaml"))
    words = tiny_config(vocab_size=49_152)
    spent = {
        stage.out: stage.tokens * training_flops_per_token(model_config(stage.architecture, words), 512)
        for _, stage in recipe.stages
    }
    assert list(spent) == ["dense", "routed", "routed-deeper", "dense-shallower"]
    assert all(total == pytest.approx(spent["dense"], rel=0.01) for total in spent.values())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mixture_of_depths": {"every": 3}}, "mixture_of_depths.every is 3, but there are 2 layers"),
        ({"query_heads": 3}, "hidden_size 32 is no multiple of 3 query_heads; set head_dim"),
        ({"kv_heads": 3}, "num_attention_heads .4. must be a multiple of num_key_value_heads .3."),
        ({"vocab_size": 100}, "vocab_size is 100; it can be 260 to"),
    ],
)
def test_an_impossible_shape_is_one_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"pretrain: .*{sentence}"):
        run(tmp_path, {"pretrain": STAGE | {"architecture": SHAPE | changes}})


@pytest.mark.parametrize("bound", ["max_kl", "min_acceptance", "max_kl_ratio"])
def test_its_gate_has_no_teacher_to_bound_against(tmp_path: Path, bound: str) -> None:
    with pytest.raises(RecipeError, match=rf"stages.0.pretrain.gate.{bound} has nothing to bound"):
        run(tmp_path, {"pretrain": STAGE | {"gate": {bound: 0.5}}})
