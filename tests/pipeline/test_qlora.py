"""Stage `qlora` on a tiny teacher: what it publishes, what it refuses, and what each way of merging costs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.files.artifact import open_artifact
from model.files.checkpoint import is_quantized, load_model
from model.lazy import open_published
from model.lora import adapted_layers, detach_lora
from model.quantized import quantized_layers
from model.transformer import Transformer
from pipeline.errors import GateRefused, UserError
from pipeline.report.page import render
from pipeline.results import Result
from pipeline.run_folder import RunFolder, Served, resolve_served
from pipeline.stages.qlora.config import Qlora
from pipeline.stages.qlora.report import merges_table
from pipeline.stages.shared.training import TrainingStage
from tests.compare import check_close, relative_rms
from tests.pipeline.tiny_run import run_stages
from tests.serve.http_server import running_server
from tests.tiny import full_logits

STAGE = {
    "model": "teacher",
    "adapter": {"rank": 4, "alpha": 8, "dropout": 0.0},
    "data": "text",
    "tokens": "4k",
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "learning_rate": 2e-2,
    "precision": "fp32",
    "held_out_tokens": 512,
    "out": "adapted",
}


def run(home: Path, folder: str = "run", **changes: object) -> list[Result]:
    return run_stages(home, {"qlora": STAGE | changes}, serve="adapted", folder=folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    home = tmp_path_factory.mktemp("qlora")
    return home, run(home)[-1]


def test_the_artifact_is_a_quantized_base_with_its_adapter(finished: tuple[Path, Result]) -> None:
    home, result = finished
    folder = home / "run" / "01-qlora" / "model"
    assert open_artifact(folder).digest == result.output
    assert is_quantized(folder) and open_artifact(folder / "base").stage == "quantize"
    model = load_model(folder, dtype=torch.float32)
    assert len(adapted_layers(model)) == 7 * model.config.num_layers
    assert any(layer.lora.b.abs().sum() > 0 for layer in adapted_layers(model).values())


def test_training_lowers_the_held_out_loss_of_the_base(finished: tuple[Path, Result]) -> None:
    _, result = finished
    dense, base, adapted = (row.quality for row in result.models)
    assert dense and base and adapted
    assert adapted.nll.value < base.nll.value - 0.05
    assert result.parity and result.parity.passed


def test_the_table_counts_bytes_as_they_are_stored(finished: tuple[Path, Result]) -> None:
    _, result = finished
    dense, base, adapted = result.models
    assert base.weight_bytes < dense.weight_bytes
    assert adapted.weight_bytes - base.weight_bytes == 4 * result.details.adapter.parameters
    assert 4.0 < result.details.quantized.bits_per_weight < 4.6


def test_peft_reads_the_adapter_on_a_dense_base(finished: tuple[Path, Result], tmp_path: Path) -> None:
    from peft import PeftModel

    home, _ = finished
    folder = home / "run" / "01-qlora" / "model"
    ours = load_model(home / "run" / "00-teacher" / "model", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(home / "run" / "00-teacher" / "model", dtype=torch.float32)
    from model.files.adapter import load_adapter

    load_adapter(ours, folder)
    adapted = PeftModel.from_pretrained(theirs, str(folder)).eval()
    tokens = list(range(3, 60))
    with torch.no_grad():
        expected = adapted(torch.tensor([tokens])).logits[0]
    check_close(full_logits(ours.eval(), tokens), expected, what="logits")


def test_each_way_of_merging_is_measured(finished: tuple[Path, Result]) -> None:
    _, result = finished
    named = [row[0] for row in merges_table(result.details).rows]
    assert named == ["adapter beside its base", "merged, bf16", "merged, quantized again"]
    rows = {row.way: row for row in result.details.merges}
    assert rows["adapter"].kl.value == pytest.approx(0.0, abs=1e-6)
    assert rows["merged"].kl.value < rows["requantized"].kl.value


def test_the_server_says_over_http_what_the_trainer_knows(
    finished: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base in NF4, its adapter unmerged: log-probabilities of a text, and of what is greedily written after it.

    They are compared with those of the very model that was trained, as training in fp32 left it. That it is trained for
    the second time shows in no digest.
    """
    models: list[Transformer] = []

    class Keeping(TrainingStage):
        def train(self, model: Transformer, **named: Any) -> Any:
            models.append(model)
            return super().train(model, **named)

    monkeypatch.setattr("pipeline.stages.qlora.run.QloraStage", Keeping)
    home, first = finished
    assert run(home, "again")[-1].output == first.output
    (trained,), folder = models, home / "again" / "01-qlora" / "model"
    assert open_artifact(folder.parent / "base").created != open_artifact(home / "run" / "01-qlora" / "base").created
    assert open_artifact(folder / "base").digest == open_artifact(folder.parent / "base").digest
    tokens, written = list(range(3, 75)), 8
    options = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "256", "--served-model-name", "own"]
    with running_server(folder, tmp_path / "log", *options) as server:
        answer = server.client().completions.create(
            model="own", prompt=tokens, echo=True, logprobs=2, max_tokens=written, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    got: Any = answer.choices[0].logprobs
    assert len(got.token_logprobs) == len(tokens) + written
    for _ in range(written):
        tokens.append(int(full_logits(trained, tokens)[-1].argmax()))
    expected = full_logits(trained, tokens).log_softmax(-1)
    chosen = expected[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert got.token_logprobs[1:] == pytest.approx(chosen.tolist(), rel=1e-3)
    best = [max(top.values()) for top in got.top_logprobs[1:]]
    assert best == pytest.approx(expected[:-1].amax(-1).tolist(), rel=1e-3)
    detach_lora(trained)
    assert relative_rms(full_logits(trained, tokens).log_softmax(-1), expected) > 0.02, "else the adapter says nothing"


def test_its_folder_can_be_named_where_a_model_is_served(finished: tuple[Path, Result]) -> None:
    home, _ = finished
    adapted, base = (str(home / "run" / "01-qlora" / name) for name in ("model", "base"))
    assert resolve_served(adapted, verify=adapted) == Served(adapted, adapted, None)
    assert resolve_served(str(home / "run"), verify=base) == Served(adapted, base, "tiny")


def test_the_default_dropout_passes_parity_and_is_not_measured(tmp_path: Path) -> None:
    """Quality and parity are those of the model as it is served: the same files measured twice give the same."""
    adapter = {"rank": 4, "alpha": 64}
    result = run(tmp_path, adapter=adapter)[-1]
    config = RunFolder(tmp_path / "run").recipe().stages[0][1]
    assert config.adapter.dropout == 0.05, "the default"
    assert result.parity is not None and result.parity.passed and result.output is not None
    folder = tmp_path / "run" / "01-qlora" / "model"
    tokens = list(range(3, 75))
    first, second = (full_logits(load_model(folder), tokens) for _ in range(2))
    assert torch.equal(first, second)


def test_a_server_that_loses_the_adapter_fails_the_parity_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(*args: Any) -> tuple[Transformer, Callable[[int], object]]:
        model, load_layer = open_published(*args)
        detach_lora(model)
        return model, load_layer

    monkeypatch.setattr("serve.engine.loading.open_published", losing)
    with pytest.raises(GateRefused, match="01-qlora fails parity, trainer and server differ by") as refused:
        run(tmp_path)
    assert "gate" not in str(refused.value), "the recipe sets none"
    folder = RunFolder(tmp_path / "run")
    parity = folder.results(folder.recipe())[-1].parity
    assert parity and not parity.passed and not (folder.path / "01-qlora" / "model").exists()


def test_the_report_shows_the_section(finished: tuple[Path, Result]) -> None:
    home, result = finished
    folder = RunFolder(home / "run")
    page = render(folder.recipe(), [result], {})
    assert "Adapter: 01-qlora" in page and "merged, quantized again" in page
    assert f", {result.details.quantized.bits_per_weight:.3f} bits each." in page


def test_a_requantized_model_above_the_gate_is_not_published(finished: tuple[Path, Result]) -> None:
    home, _ = finished
    with pytest.raises(GateRefused):
        run(home, "requantized", publish="requantized", max_merge_kl=1e-6)
    folder = RunFolder(home / "requantized")
    result = folder.results(folder.recipe())[-1]
    assert result.output is None and not (home / "requantized" / "01-qlora" / "model").exists()
    assert [check.name for check in result.gate if not check.passed] == ["max_merge_kl"]


def test_a_merged_model_is_plain_and_close_to_the_unmerged(finished: tuple[Path, Result]) -> None:
    home, unmerged = finished
    result = run(home, "merged", publish="merged", max_merge_kl=0.05)[-1]
    folder = home / "merged" / "01-qlora" / "model"
    assert result.output == open_artifact(folder).digest and not is_quantized(folder)
    AutoModelForCausalLM.from_pretrained(folder)
    before, after = unmerged.models[-1].quality, result.models[-1].quality
    assert before and after and after.nll.value == pytest.approx(before.nll.value, abs=0.02)


def test_the_base_may_be_in_another_format(finished: tuple[Path, Result]) -> None:
    """Made, trained on, gated for parity with the server, published; twice the bits, and closer to the dense model."""
    home, four_bits = finished
    result = run(home, "int8", quantization="int8")[-1]
    assert result.output and 8 < result.details.quantized.bits_per_weight < 9
    formats = {
        layer.format.name for layer in quantized_layers(load_model(home / "int8" / "01-qlora" / "model")).values()
    }
    assert formats == {"int8"}
    losses = [[row.quality.nll.value for row in one.models if row.quality] for one in (result, four_bits)]
    assert abs(losses[0][1] - losses[0][0]) < abs(losses[1][1] - losses[1][0])


def test_the_defaults_are_those_of_the_paper() -> None:
    stage = Qlora(tokens=1, model="teacher", data="text")
    assert (stage.adapter.rank, stage.adapter.alpha, stage.adapter.targets) == (64, 16.0, ("*_proj",))
    assert (stage.learning_rate, stage.schedule, stage.warmup_fraction) == (2e-4, "constant", 0.03)
    assert (stage.optimizer, stage.max_grad_norm, stage.activation_checkpointing) == ("paged_adamw", 0.3, True)
    assert (stage.quantization, stage.double_quantization, stage.publish) == ("nf4", True, "adapter")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter": {"targets": ["gate_prjo"]}}, "gate_prjo"),
        ({"quantization": "none", "adapter": {"init": "loftq"}}, "loftq"),
        ({"quantization": "none", "publish": "requantized"}, "requantized"),
        (
            {"quantization": "int6"},
            "groups of 64 do not divide rows of 32 weights. Set quantization: nf4, whose blocks",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    finished: tuple[Path, Result], changes: dict[str, object], words: str
) -> None:
    home, _ = finished
    with pytest.raises(UserError, match=words):
        run(home, "refused", **changes)


def test_a_rank_of_zero_is_refused(finished: tuple[Path, Result]) -> None:
    home, _ = finished
    with pytest.raises(UserError, match="rank"):
        run(home, "refused", adapter={"rank": 0})


BUDGET = {"data": "text", "tokens": "512", "batch_tokens": 256, "micro_batch_tokens": 128, "out": "next"}
NEXT: dict[str, dict[str, object]] = {
    "qlora": {"model": "adapted"} | BUDGET,
    "gqa": {"model": "adapted", "kv_heads": 1} | BUDGET,
    "mod": {"model": "adapted", "capacity": 0.5} | BUDGET,
    "distill": {"teacher": "adapted", "student": {"from": "adapted"}} | BUDGET,
}


@pytest.mark.parametrize("kind", NEXT)
def test_stages_refuse_a_model_with_an_unmerged_adapter(finished: tuple[Path, Result], kind: str) -> None:
    home, _ = finished
    with pytest.raises(UserError, match=f"{kind}: adapted carries an adapter"):
        run_stages(home, {"qlora": STAGE}, {kind: NEXT[kind]}, serve="next")


@pytest.mark.parametrize("kind", NEXT)
def test_stages_refuse_a_quantized_model(finished: tuple[Path, Result], kind: str) -> None:
    home, _ = finished
    base = home / "run" / "01-qlora" / "model" / "base"
    with pytest.raises(UserError, match=f"{kind}: adapted is quantized already"):
        run_stages(home, {kind: NEXT[kind]}, serve="next", teacher=base, called="adapted", folder="again")


def test_a_folder_with_an_adapter_is_not_imported(finished: tuple[Path, Result]) -> None:
    home, _ = finished
    with pytest.raises(UserError, match="holds an adapter"):
        run_stages(home, {"qlora": STAGE}, serve="adapted", teacher=home / "run" / "01-qlora" / "model", folder="twice")
