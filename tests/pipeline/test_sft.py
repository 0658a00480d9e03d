"""Stage `sft` on a tiny model: the whole of it, or an adapter that is merged; conversations; what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.files.checkpoint import load_model
from model.training_memory import Setup
from pipeline.errors import GateRefused
from pipeline.plan import plan_recipe
from pipeline.recipe import load_recipe
from pipeline.results import Result
from tests.pipeline.tiny_run import RECIPE, WORDS, run_stages
from tests.tiny import full_logits
from train.loop import Trainer

STAGE = {
    "model": "teacher",
    "data": "text",
    "tokens": "4k",
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "learning_rate": 1e-2,
    "precision": "fp32",
    "held_out_tokens": 512,
    "out": "tuned",
}
ADAPTER = {"rank": 4, "alpha": 8, "dropout": 0.0}


def run(home: Path, folder: str = "run", **changes: object) -> Result:
    return run_stages(home, {"sft": STAGE | changes}, serve="tuned", folder=folder)[-1]


def weights(home: Path, folder: str = "run", stage: str = "01-sft") -> dict[str, torch.Tensor]:
    return load_model(home / folder / stage / "model").state_dict()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sft")


@pytest.fixture(scope="module")
def full(home: Path) -> Result:
    return run(home)


@pytest.fixture(scope="module")
def adapted(home: Path) -> Result:
    return run(home, "adapted", adapter=ADAPTER)


def test_training_lowers_the_held_out_loss_of_the_model(home: Path, full: Result) -> None:
    before, after = full.models
    assert (before.label, after.label) == ("teacher", "tuned") and before.parameters == after.parameters
    assert after.quality.nll.value < before.quality.nll.value - 0.05
    assert full.details.steps == 16
    assert full.parity is not None and full.parity.passed


def test_an_adapter_changes_only_what_it_adapts_and_is_merged(home: Path, adapted: Result) -> None:
    before, after = adapted.models
    assert after.quality.nll.value < before.quality.nll.value - 0.05
    origin, tuned = weights(home, "adapted", "00-teacher"), weights(home, "adapted")
    rounded = {name: weight.bfloat16().float() for name, weight in origin.items()}
    changed = {name for name in origin if not torch.equal(rounded[name], tuned[name])}
    assert changed == {name for name in origin if "_proj" in name}
    for name in changed:
        assert torch.linalg.matrix_rank((tuned[name] - origin[name]).double(), rtol=0.05) <= 4, "of the adapter's rank"


@pytest.mark.parametrize("folder", ["run", "adapted"])
def test_transformers_opens_the_result(home: Path, full: Result, adapted: Result, folder: str) -> None:
    published = home / folder / "01-sft" / "model"
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.arange(3, 60)[None]).logits[0]
    torch.testing.assert_close(full_logits(load_model(published), list(range(3, 60))), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"adapter": ADAPTER | {"dropout": 0.1}}])
def test_a_run_that_dies_goes_on_to_the_same_weights(
    home: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = changes | {"tokens": "1k", "checkpoint_every_s": 0.0}
    run(home, f"whole-{len(changes)}", **changes)
    step = Trainer._run_step

    def dies_at_the_third(trainer: Trainer, *arguments: object) -> object:
        if trainer.counters.step == 2:
            raise KeyboardInterrupt
        return step(trainer, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_run_step", dies_at_the_third)
        run(home, f"died-{len(changes)}", **changes)
    run(home, f"died-{len(changes)}", **changes)
    whole, again = (weights(home, f"{name}-{len(changes)}") for name in ("whole", "died"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_of_conversations_the_assistant_is_learnt(tmp_path: Path) -> None:
    """It answers with one word whatever is asked: then that is what the model expects."""
    asked = [f"{number}: {word}" for number in range(4) for word in WORDS]
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "copper"}]} for text in asked
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = {"source": str(tmp_path / "chat.jsonl"), "chat": True}
    tuned = run_stages(tmp_path, {"sft": STAGE}, serve="tuned", data=data)[-1]
    before, after = (row.quality for row in tuned.models)
    assert after.perplexity < 1.5 < before.perplexity


def test_a_gate_on_the_loss_refuses(home: Path) -> None:
    with pytest.raises(GateRefused, match="01-sft is below its gate"):
        run(home, "refused", gate={"max_bits_per_byte": 0.01}, tokens=256)
    assert not (home / "refused" / "01-sft" / "model").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gate": {"max_kl": 0.1}}, "sft.gate.max_kl has nothing to bound: it has no teacher"),
        ({"adapter": {"init": "loftq"}}, "sft.adapter.init is loftq, which starts from the error of quantization"),
        ({"adapter": {"rank": 0}}, "sft.adapter.rank is 0; it must lie between"),
        ({"adapter": {"ranks": 4}}, "sft.adapter has the unknown key 'ranks'. Did you mean 'rank'?"),
        ({"adapter": 4}, "sft.adapter must be a map, not 4"),
        ({"adapter": {"targets": ["nowhere"]}}, "sft: "),
        ({"adapter": {"targets": ["embed_tokens"]}}, "The adapter of tied embeddings changes the input only"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(home: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        run(home, "wrong", **changes)


def test_it_is_planned(home: Path, full: Result) -> None:
    def planned(**changes: object) -> Setup:
        overrides = [
            f"models={json.dumps({'teacher': {'from': str(home / 'teacher')}})}",
            f"stages={json.dumps([{'sft': STAGE | changes}])}",
            "serve={model: tuned}",
        ]
        (plan,) = plan_recipe(load_recipe(RECIPE, overrides), home / "cache")
        return plan.setup

    assert planned().memory().gradients > planned(adapter=ADAPTER).memory().gradients > 0
