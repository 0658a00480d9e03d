"""Stage `dpo` on a tiny model: planted preferences are learnt, published, served and reported; what is refused."""

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import preference_pairs
from model.files.artifact import open_artifact
from model.files.checkpoint import is_quantized
from model.text.tokenizer import Tokenizer
from pipeline.data import counts_table, cut_sentence
from pipeline.errors import GateRefused
from pipeline.measure.quality import HeldOut
from pipeline.recipe import RecipeError, load_recipe
from pipeline.report.page import logged_curves, render
from pipeline.results import Result
from pipeline.run_folder import RunFolder
from pipeline.stages.dpo import run as dpo
from pipeline.stages.dpo.report import DpoDetails, pairs_table
from pipeline.stages.dpo.run import pair_figures
from pipeline.stages.shared import training
from serve import LLM, SamplingParams
from tests.pipeline.tiny_run import RECIPE, ROOT, WORDS, run_stages, write_teacher
from tests.train.toy import toy_pairs
from train.config import PreferenceLoss
from train.data import PreparedData, prepare

POLITE, CURT = "copper", "tail"
"""Words with which the better answers end, and the worse ones."""
STAGE = {
    "model": "teacher",
    "adapter": {"rank": 4, "alpha": 8},
    "data": "text",
    "tokens": "6k",
    "batch_tokens": 256,
    "micro_batch_tokens": 256,
    "learning_rate": 1e-2,
    "precision": "fp32",
    "evaluate_every_tokens": "3k",
    "held_out_tokens": 1024,
    "out": "preferred",
}
Pair = dict[str, str]


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Answers that differ in their last word."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        asked, said = (" ".join(draw.choice(WORDS) for _ in range(length)) for length in (2, 3))
        rows.append({"prompt": f"{number} {asked}", "chosen": f"{said} {POLITE}", "rejected": f"{said} {CURT}"})
    return rows


def run(home: Path, folder: str = "run", **changes: object) -> Result[DpoDetails]:
    if not (home / "pairs.jsonl").exists():
        (home / "pairs.jsonl").write_text("\n".join(map(json.dumps, make_pairs(64, seed=0))))
    data = {"source": str(home / "pairs.jsonl"), "preference": True, "chat": True, "max_documents": None}
    return run_stages(home, {"dpo": STAGE | changes}, serve="preferred", folder=folder, data=data)[-1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result[DpoDetails]]:
    home = tmp_path_factory.mktemp("dpo")
    return home, run(home)


def test_planted_preferences_are_learnt(finished: tuple[Path, Result[DpoDetails]]) -> None:
    home, result = finished
    found, trained = result.details.held_out, result.details.trained
    assert found.pairs + trained.pairs == 64 and found.pairs > 8
    assert found.accuracy.low > 0.7, "well above chance, with the whole interval"
    assert found.margin.value > 1 and found.loss < found.loss_before == pytest.approx(0.6931, abs=1e-4)
    assert result.parity is not None and result.parity.passed
    logged = logged_curves(RunFolder(home / "run"), RunFolder(home / "run").recipe())["01-dpo"]
    assert logged[0]["loss"] == pytest.approx(0.693147, abs=1e-5), "the adapter begins as nothing"
    assert logged[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and logged[-1]["rewards/accuracies"] > 0.9
    assert logged[-1]["held_out_reward_accuracy"] == found.accuracy.value
    assert logged[-1]["held_out_nll_loss"] == pytest.approx(found.nll, rel=0.01), "by bf16 of what is published"


def test_held_out_answers_are_timed_as_often_as_they_are_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []

    def counting(weight: int, asked: Callable[..., Any]) -> Callable[..., Any]:
        def count(*given: Any, **how: Any) -> Any:
            passed.append(weight)
            return asked(*given, **how)

        return count

    for name in ("quality", "states"):
        monkeypatch.setattr(HeldOut, name, counting(1, getattr(HeldOut, name)))
    monkeypatch.setattr(dpo, "pair_logps", counting(2, dpo.pair_logps))
    run(tmp_path, tokens="1k", evaluate_every_tokens=512)
    config = load_recipe(tmp_path / "run" / "recipe.yaml", []).plan()[-1].config
    assert sum(passed) == config.measured_tokens / config.held_out_tokens


def test_chosen_answers_that_lost_name_what_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training, "describe_loss", lambda before, after: "by a little")
    run(tmp_path, tokens=256, evaluate_every_tokens=None, beta=0.3)
    assert "training made preferred worse: by a little; where answers are driven far apart" in caplog.text
    assert "a larger nll_weight than 0 teaches them beside that" in caplog.text
    assert "a larger beta than 0.3, a lower learning_rate than 0.01 or fewer tokens" in caplog.text


def test_what_is_served_prefers_what_was_chosen(finished: tuple[Path, Result[DpoDetails]]) -> None:
    """Of new prompts, by log-probabilities of the serving engine over the published files."""
    home, result = finished
    folder = home / "run" / "01-dpo" / "model"
    assert open_artifact(folder).digest == result.output
    margins = {}
    for name, served in (("base", home / "run" / "00-teacher" / "model"), ("preferred", folder)):
        llm = LLM(str(served), max_model_len=128, num_pages=64)
        sides = []
        for side in ("chosen", "rejected"):
            rows = make_pairs(12, seed=1)
            talks = [
                [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
                for row in rows
            ]
            texts = [llm.tokenizer.assistant_mask(talk)[0] for talk in talks]
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
            answers = llm.generate(texts, params)
            sides.append([sum(one.logprob for one in answer.prompt_logprobs[1:]) for answer in answers])
        margins[name] = torch.tensor(sides[0]) - torch.tensor(sides[1])
    assert ((margins["preferred"] - margins["base"]) > 0).all()


def test_the_report_says_what_was_learnt(finished: tuple[Path, Result[DpoDetails]]) -> None:
    home, result = finished
    folder = RunFolder(home / "run")
    page = render(folder.recipe(), [result], logged_curves(folder, folder.recipe()))
    for text in ("Preferences: 01-dpo", "Rewards while training", "Reward accuracy", "NLL of", "Adapter: 01-dpo"):
        assert text in page
    base, preferred = pairs_table(result).rows
    assert (base[0], preferred[0]) == ("preferred, before", "preferred")
    assert preferred[2] == f"{result.details.held_out.accuracy.value:.1%}"
    assert result.models[-1].quality.kl is not None and result.models[-1].quality.kl.value > 0.001


def test_gates_hold_the_accuracy_and_the_distance_to_the_reference(
    finished: tuple[Path, Result[DpoDetails]],
) -> None:
    """They decide no weight: what is trained is measured again, and refused."""
    home, result = finished
    shutil.copytree(home / "run", home / "refused")
    with pytest.raises(GateRefused):
        run(home, "refused", gate={"min_reward_accuracy": 1.0, "max_kl": 1e-4})
    refused = json.loads((home / "refused" / "01-dpo" / "result.json").read_text())
    checks = {check["name"]: check for check in refused["gate"]}
    assert not checks["max_kl"]["passed"] and not checks["min_reward_accuracy"]["passed"]
    assert checks["min_reward_accuracy"]["worst"] == pytest.approx(result.details.held_out.accuracy.low)
    assert not (home / "refused" / "01-dpo" / "model").exists()


@pytest.mark.slow
def test_a_base_in_4_bits_is_its_own_reference(finished: tuple[Path, Result[DpoDetails]]) -> None:
    home, _ = finished
    result = run(home, "nf4", quantization="nf4", tokens="1k", evaluate_every_tokens=None, loss="ipo", beta=0.3)
    assert is_quantized(home / "nf4" / "01-dpo" / "model") and result.details.quantized is not None
    logged = logged_curves(RunFolder(home / "nf4"), RunFolder(home / "nf4").recipe())["01-dpo"]
    assert logged[0]["loss"] == pytest.approx((1 / 0.6) ** 2, rel=1e-5), "(h - 1/2β)² where h is 0"
    assert result.details.held_out.loss < result.details.held_out.loss_before


def test_figures_of_pairs_are_those_of_their_formulas() -> None:
    logps = torch.tensor([[-10.0, -12.0], [-9.0, -8.0], [-20.0, -20.5], [-7.0, -9.0]])
    reference = torch.tensor([[-11.0, -11.0], [-9.0, -7.0], [-20.0, -21.0], [-7.0, -8.0]])
    found = pair_figures(logps, reference, torch.full((4, 2), 2), PreferenceLoss(beta=0.5))
    assert (found.pairs, found.likelier_before, found.likelier) == (4, 0.5, 0.75)
    assert found.accuracy.value == 0.75 and found.accuracy.low == pytest.approx(0.3006, abs=1e-3)
    assert found.margin.value == pytest.approx(0.5 * (2 + 1 - 0.5 + 1) / 4)
    assert found.nll == pytest.approx((10 + 9 + 20 + 7) / 2 / 4)
    assert found.nll_before == pytest.approx((11 + 9 + 20 + 7) / 2 / 4)
    taught = pair_figures(logps, reference, torch.full((4, 2), 2), PreferenceLoss(beta=0.5, nll_weight=2.0))
    assert taught.loss == pytest.approx(found.loss + 2 * found.nll)
    assert taught.loss_before == pytest.approx(found.loss_before + 2 * found.nll_before)
    by_token = pair_figures(logps, reference, torch.full((4, 2), 2), PreferenceLoss("ipo", beta=0.5))
    assert by_token.margin.value == pytest.approx(found.margin.value / 2)
    assert by_token.loss_before == pytest.approx(1.0)


@pytest.mark.slow
def test_the_documented_pairs_are_made_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of configs/dpo.yaml: the chosen answer is where the rejected one could have stopped."""
    path = tmp_path / "runs" / "pairs.jsonl"
    monkeypatch.setattr(sys, "argv", ["preference_pairs", str(path)])
    preference_pairs.main()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) > 100 and all(row["rejected"].startswith(row["chosen"] + " ") for row in rows)
    config = load_recipe(ROOT / "configs" / "dpo.yaml").data["pairs"]
    tokenizer = Tokenizer.load(write_teacher(tmp_path / "teacher"))
    data = prepare(replace(config, source=str(path)), tokenizer, tmp_path / "cache", progress=False)
    assert data.train.paired and data.train.num_documents + data.held_out.num_documents == 2 * len(rows)


def test_what_is_cut_of_pairs_is_said_before_they_are_trained_on() -> None:
    whole, some = toy_pairs((12, 17, 9, 9)), toy_pairs((12, 17, 40, 9, 20, 20), prompt=4)
    assert cut_sentence(whole, 16) == (
        "No answer is longer than the sequence_length of 16 with its prompt: all 2 pairs are whole."
    )
    assert cut_sentence(some, 16).startswith(
        "Of 3 pairs 2 have an answer that ends with the sequence_length of 16, 0 are"
    )
    assert counts_table(PreparedData(some, whole), 16).rows[0][:4] == ["train, answers, two a pair", "6", "118", "94"]


@pytest.mark.parametrize(
    ("changes", "data", "sentence"),
    [
        ({}, {}, "stages.0.dpo.data is 'text', which is read as documents; dpo learns from pairs"),
        (
            {"micro_batch_tokens": 64},
            {"preference": True},
            "at least twice the sequence_length of its data, which is 64",
        ),
        ({"loss": "ipo", "label_smoothing": 0.1}, {"preference": True}, "label_smoothing is 0.1, but ipo knows none"),
        ({"loss": "sigmoyd"}, {"preference": True}, "Did you mean 'sigmoid'?"),
        ({"gate": {"max_kl_ratio": 0.5}}, {"preference": True}, "gate.max_kl_ratio has nothing to bound"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_at_once(
    changes: dict[str, object], data: dict[str, object], sentence: str
) -> None:
    overrides = [f"stages={json.dumps([{'dpo': STAGE | changes}])}", "serve={model: preferred}"]
    overrides += [f"data.text.{name}={json.dumps(value)}" for name, value in data.items()]
    with pytest.raises(RecipeError) as refused:
        load_recipe(RECIPE, overrides)
    assert sentence in str(refused.value)


def test_stages_that_read_documents_refuse_pairs() -> None:
    with pytest.raises(RecipeError, match="which is read as pairs of answers; distill reads documents"):
        load_recipe(RECIPE, ["data.text.preference=true"])
