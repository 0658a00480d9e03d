"""Stage `distill`: students of their own, whose tokens must be the teacher's, and those that are a part of a model."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from model.files.checkpoint import load_config, load_model
from model.text.tokenizer import Tokenizer
from pipeline.errors import UserError
from pipeline.processes import Processes
from pipeline.recipe import load_recipe
from pipeline.results import Result
from pipeline.run import run_recipe
from pipeline.run_folder import RunFolder
from pipeline.stages.distill.report import sections
from tests.pipeline.tiny_run import RECIPE, run_stages, write_teacher, write_text
from tests.tiny import full_logits
from train.data import load_cache
from train.loop import Trainer


def distill(home: Path, **settings: Any) -> list[Result]:
    """Four steps with `home/teacher` as teacher and `home/small` as student."""
    stage = {"teacher": "teacher", "student": {"from": "small"}, "data": "text", "out": "student"}
    budget = {"tokens": "1k", "batch_tokens": 256, "micro_batch_tokens": 128, "held_out_tokens": 256}
    overrides = [
        f"models={json.dumps({name: {'from': str(home / name)} for name in ('teacher', 'small')})}",
        f"stages={json.dumps([{'distill': stage | budget | {'precision': 'fp32', 'learning_rate': 3e-3} | settings}])}",
        "serve={model: student}",
        f"data.text.source={write_text(home / 'text')}",
    ]
    recipe = load_recipe(RECIPE, overrides)
    return run_recipe(recipe, RunFolder(home / "run"), cache=home / "cache", processes=Processes())


@pytest.mark.parametrize(("teacher_rows", "student_rows"), [(320, 384), (384, 320)])
def test_differently_padded_embeddings_are_no_obstacle(tmp_path: Path, teacher_rows: int, student_rows: int) -> None:
    write_teacher(tmp_path / "teacher", rows=teacher_rows)
    write_teacher(tmp_path / "small", seed=1, layers=2, rows=student_rows)
    result = distill(tmp_path)[-1]
    before, after = result.models[1].quality, result.models[2].quality
    assert before is not None and after is not None and before.kl is not None and after.kl is not None
    assert after.kl.value < before.kl.value, "it has learnt"
    assert result.parity is not None and result.parity.passed
    [published] = (tmp_path / "run").glob("*-distill/model")
    assert load_config(published).vocab_size == student_rows


def test_training_that_makes_a_student_worse_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The student is the teacher itself; with such a learning rate it leaves it."""
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "small")
    distill(tmp_path, learning_rate=0.1)
    said = (
        r"training made student worse: held-out KL 0\.0\d\d became [\d.]+ nats a token; a lower learning_rate than 0\.1"
    )
    assert re.search(said, caplog.text)


def test_a_deep_cut_learns_hidden_states_too(tmp_path: Path) -> None:
    student = {"from": "teacher", "layers": 2}
    write_teacher(tmp_path / "teacher", layers=4)
    write_teacher(tmp_path / "small")
    distill(tmp_path, student=student, loss={"hidden_weight": 1.0}, tokens="4k")
    [logged] = (tmp_path / "run").glob("*-distill/metrics.jsonl")
    distances = [row["hidden_distance"] for row in map(json.loads, logged.read_text().splitlines())]
    assert distances[-1] < 0.9 * distances[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"student": {"from": "teacher", "hidden": 16}, "loss": {"hidden_weight": 1}},
            r"the student has 16 channels and the teacher 32",
        ),
        ({"loss": {"kind": "cross_entropy", "hidden_weight": 1.0}}, r"loss.hidden_weight is 1, but cross_entropy runs"),
    ],
)
def test_hidden_states_that_cannot_be_compared_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "small")
    with pytest.raises(UserError, match=said):
        distill(tmp_path, **settings)


def test_other_tokens_are_refused_by_name(tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "small", tokens=270)
    with pytest.raises(UserError, match=r"tokenizers: small has 270 tokens, teacher \d+; they must be equal"):
        distill(tmp_path)


def test_a_student_learns_from_what_it_writes_itself(tmp_path: Path) -> None:
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "small", seed=1, layers=2)
    results = distill(tmp_path, on_policy={"share": 1.0, "prompt_tokens": 8, "max_tokens": 16})
    before, after = results[-1].models[1].quality, results[-1].models[2].quality
    assert before is not None and after is not None and before.kl is not None and after.kl is not None
    assert after.kl.value < before.kl.value
    [metrics] = (tmp_path / "run").glob("*-distill/metrics.jsonl")
    assert '"on_policy": 1.0' in metrics.read_text()


def test_nobody_grades_what_a_student_writes_for_the_text_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="with the loss cross_entropy no teacher grades it"):
        distill(tmp_path, on_policy={"share": 0.5}, loss={"kind": "cross_entropy"})
    write_teacher(tmp_path / "teacher")
    write_teacher(tmp_path / "small", seed=1, layers=2)
    with pytest.raises(UserError, match="positions, too few for a sequence_length of"):
        distill(tmp_path, on_policy={"share": 0.5, "max_tokens": 100_000})


def test_a_student_drafts_with_the_most_common_tokens_of_its_text(tmp_path: Path) -> None:
    for name in ("teacher", "small"):
        write_teacher(tmp_path / name, rows=384)
    result = distill(tmp_path, draft_vocabulary=100)[-1]
    [cache] = (tmp_path / "cache" / "data").iterdir()
    data, [published] = load_cache(cache, "text"), (tmp_path / "run").glob("*-distill/model")
    chosen = load_config(published).draft_vocabulary
    counts = Counter(data.train.tokens.tolist())
    tokenizer = Tokenizer.load(published)
    control = set(tokenizer.control_tokens)
    assert len(chosen) == 100 and control and control < set(chosen), "control tokens are always there"
    most_common = sorted(set(range(tokenizer.vocab_size)) - control, key=lambda token: (-counts[token], token))
    assert set(chosen) == control | set(most_common[: 100 - len(control)])
    held_out = data.held_out.tokens.tolist()
    vocabulary = result.details.draft_vocabulary
    assert vocabulary.coverage == pytest.approx(sum(token in chosen for token in held_out) / len(held_out))
    (table,) = sections([result], {})[0].tables
    assert table.rows[0][:3] == ["tokens", "100", "384"]
    assert "Alone it says all tokens." in RunFolder(tmp_path / "run").report.read_text()


@pytest.mark.parametrize("size", [3, 308])
def test_a_draft_vocabulary_of_too_few_or_all_tokens_is_refused(tmp_path: Path, size: int) -> None:
    for name in ("teacher", "small"):
        write_teacher(tmp_path / name, rows=384)
    with pytest.raises(UserError, match=r"draft_vocabulary is \d+; it must be above the 3 control tokens and below 3"):
        distill(tmp_path, draft_vocabulary=size)


# --- students that are a part of their origin -------------------------------------------------------------------------

STAGE = {
    "teacher": "teacher",
    "data": "text",
    "tokens": "1k",
    "batch_tokens": 256,
    "micro_batch_tokens": 128,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "held_out_tokens": 256,
    "out": "student",
}
CANDIDATES = [{"layers": 2}, {"mlp": 40}, {"layers": 2, "heads": 2, "hidden": 24}]


def cut(home: Path, folder: str = "run", **student: object) -> Result:
    """The stage on a teacher of 3 layers, 32 channels, 4 heads over 2 KV heads, and 64 neurons."""
    stage = {"distill": STAGE | {"student": {"from": "teacher", "importance_tokens": 256} | student}}
    return run_stages(home, stage, serve="student", folder=folder)[-1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distill")


@pytest.fixture(scope="module")
def chosen(home: Path) -> Result:
    return cut(home, "chosen", candidates=CANDIDATES, candidate_tokens="2k")


def test_a_student_that_is_narrower_and_shallower_opens_in_transformers(home: Path) -> None:
    from transformers import AutoModelForCausalLM

    result = cut(home, layers=2, heads=2, mlp=40, hidden=24)
    folder = home / "run" / "01-distill" / "model"
    config = load_config(folder)
    assert (config.num_layers, config.num_query_heads, config.num_kv_heads, config.head_dim) == (2, 2, 2, 8)
    assert (config.intermediate_size, config.hidden_size) == (40, 24)
    assert result.models[-1].parameters == config.num_parameters()
    assert result.parity is not None and result.parity.passed
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.arange(3, 40)[None]).logits[0]
    torch.testing.assert_close(full_logits(load_model(folder), list(range(3, 40))), expected, rtol=1e-4, atol=1e-4)
    width = result.details.width
    assert (width.heads.kept, width.heads.of, width.mlp.kept, width.hidden.of) == (2, 4, 40, 32)
    assert len(width.heads.importance) == len(width.mlp.importance) == 2 and len(width.hidden.importance) == 1
    assert all(0.5 < share < 1 for share in (*width.heads.importance, *width.mlp.importance)), "the larger part"
    page = RunFolder(home / "run").report.read_text()
    assert "What the student keeps: 01-distill" in page and "Importance that is kept in each layer" in page
    (table,) = sections([result], {})[0].tables
    assert [row[:3] for row in table.rows] == [
        ["heads", "2", "4"],
        ["MLP neurons", "40", "64"],
        ["channels", "24", "32"],
    ]


def test_the_best_candidate_becomes_the_student_that_it_would_be_alone(home: Path, chosen: Result) -> None:
    tried = chosen.details.candidates
    assert [candidate.shape for candidate in tried] == ["layers 2", "mlp 40", "layers 2, heads 2, hidden 24"]
    (best,) = (candidate for candidate in tried if candidate.chosen)
    assert best.after.kl.value == min(candidate.after.kl.value for candidate in tried)
    farthest = max(tried, key=lambda candidate: candidate.before.kl.value)
    assert farthest.after.kl.value < farthest.before.kl.value, "it has learnt"
    assert chosen.models[-1].parameters == best.parameters
    alone = cut(home, "alone", **CANDIDATES[tried.index(best)])
    weights = [
        (home / name / "01-distill" / "model" / "model.safetensors").read_bytes() for name in ("chosen", "alone")
    ]
    assert weights[0] == weights[1] and alone.models == chosen.models
    page = RunFolder(home / "chosen").report.read_text()
    assert "KL, trained briefly" in page and "layers 2, heads 2, hidden 24" in page


def test_candidates_that_are_done_are_not_trained_again(
    home: Path, chosen: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies while the second candidate trains goes on with that one."""
    trained = []
    train = Trainer.train

    def train_until_it_dies(trainer: Trainer) -> object:
        trained.append(trainer.checkpoints.parent.name)
        if trained == ["layers-2", "mlp-40"]:
            raise KeyboardInterrupt
        return train(trainer)

    monkeypatch.setattr(Trainer, "train", train_until_it_dies)
    with pytest.raises(KeyboardInterrupt):
        cut(home, "died", candidates=CANDIDATES, candidate_tokens="2k")
    again = cut(home, "died", candidates=CANDIDATES, candidate_tokens="2k")
    assert trained[2:] == ["mlp-40", "layers-2-heads-2-hidden-24", "01-distill"]
    assert again.output == chosen.output and again.details == chosen.details
    assert not list((home / "died").glob("01-distill/ranked/*/checkpoints"))


def test_only_whole_layers_leave_a_model_with_routers(tmp_path: Path) -> None:
    routed = {"model": "teacher", "layers": [1], "capacity": 0.5, "calibration_tokens": 256, "out": "routed"}
    small = {name: value for name, value in STAGE.items() if name not in ("teacher", "out")}
    speed = {"prefill_tokens": 16, "context_tokens": 16, "new_tokens": 2, "batch_sizes": [1]}
    stages = [
        {"mod": small | routed | {"speed": speed, "tokens": 256}},
        {"distill": STAGE | {"student": {"from": "routed", "mlp": 40}}},
    ]
    with pytest.raises(UserError, match="routed has routers, so only whole layers can leave it"):
        run_stages(tmp_path, *stages, serve="student")


@pytest.mark.parametrize(
    ("student", "sentence"),
    [
        ({"layers": 4}, "teacher has 3 layers, so 4 cannot be kept"),
        (
            {"heads": 3},
            "no student of teacher has heads 3: heads is 3; it must be a multiple of the model's 2 KV heads",
        ),
        (
            {"candidates": [{"mlp": 8}, {"mlp": 65}]},
            "no student of teacher has mlp 65: mlp is 65, but the model has 64",
        ),
        ({"layers": 2, "candidates": [{"mlp": 8}]}, "distill.student has candidates, and layers 2 beside them"),
        ({"candidates": [{"mlp": 8}, {"mlp": 8}]}, "distill.student.candidates names a shape twice"),
        ({"candidates": [{"width": 8}]}, "student.candidates.0 has the unknown key 'width'"),
        ({"candidates": [{"mlp": 0}]}, "student.candidates.0.mlp is 0; it must lie between"),
        ({"candidates": [{"mlp": "wide"}]}, "student.candidates.0.mlp is 'wide'; it must be "),
    ],
)
def test_a_student_that_cannot_be_is_refused(home: Path, student: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        cut(home, "refused", **student)
