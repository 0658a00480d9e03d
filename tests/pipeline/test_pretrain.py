"""Stage `pretrain` on a little text: a model from nothing, with a part of another model's vocabulary."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.artifact import open_artifact
from model.checkpoint import load_model
from model.tokenizer import Tokenizer
from pipeline.errors import UserError
from pipeline.recipe import RecipeError
from pipeline.result import Result
from pipeline.schema import Architecture
from pipeline.stages.pretrain import model_config
from tests.compare import check_close
from tests.pipeline.tiny_run import run_stages
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"query_heads": 3}, "hidden_size 32 is no multiple of 3 query_heads; set head_dim"),
        ({"kv_heads": 3}, "num_attention_heads .4. must be a multiple of num_key_value_heads .3."),
        ({"vocab_size": 100}, "vocab_size is 100; it can be 260 to"),
    ],
)
def test_an_impossible_shape_is_one_sentence(tmp_path: Path, changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError, match=f"pretrain: .*{sentence}"):
        run(tmp_path, {"pretrain": STAGE | {"architecture": SHAPE | changes}})


@pytest.mark.parametrize("bound", ["max_kl", "min_acceptance", "max_kl_ratio"])
def test_its_gate_has_no_teacher_to_bound_against(tmp_path: Path, bound: str) -> None:
    with pytest.raises(RecipeError, match=rf"stages.0.pretrain.gate.{bound} has nothing to bound"):
        run(tmp_path, {"pretrain": STAGE | {"gate": {bound: 0.5}}})
