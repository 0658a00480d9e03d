"""lm-evaluation-harness over our engine, beside the harness's own adapter for transformers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from model.text.tokenizer import Tokenizer
from pipeline.cli import main
from pipeline.errors import StageFailed, UserError
from pipeline.recipe import RecipeError
from pipeline.stages.base import read_result
from pipeline.stages.evaluate.config import Harness
from tests.pipeline.tiny_run import WORDS, TinyRun, write_teacher

SENTENCES = [" ".join(WORDS[index:] + WORDS[:index]) for index in range(12)]
CHOICE = {
    "task": "copper_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITE = {
    "task": "copper_write",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["zz"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match"}],
}
ROLLING = {
    "task": "copper_text",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Three tasks of our own on a local file."""
    pytest.importorskip("lm_eval")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"question": text, "choices": [" copper", " steam and grain", " x"], "label": index % 3}
        for index, text in enumerate(SENTENCES)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
    shared["dataset_kwargs"] = {"data_files": {"test": str(folder / "rows.jsonl")}}
    for task in (CHOICE, WRITE, ROLLING):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))
    return folder


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    folder = write_teacher(tmp_path / "teacher")
    Tokenizer.load(folder).save(folder)  # with the class that transformers looks for
    return folder


@pytest.fixture
def models(teacher: Path, tmp_path: Path) -> tuple[Any, Any]:
    """Ours and the harness's own, in fp32 on the CPU, with room for equally many tokens."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from pipeline.stages.evaluate.harness import EngineLM

    ours = EngineLM(teacher, tmp_path / "kept.jsonl", dtype="float32", device="cpu", max_model_len=98)
    peer = HFLM(pretrained=str(teacher), device="cpu", dtype="float32", batch_size=1, max_length=ours.max_length)
    return ours, peer


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def test_loglikelihoods_are_those_of_the_peer(models: tuple[Any, Any]) -> None:
    """With and without a context, with its trailing spaces, with a control token, and cut from the left."""
    pairs = [(text, f" {word}") for text, word in zip(SENTENCES, WORDS, strict=False)]
    pairs += [
        ("", "copper steam"),
        ("still ", "pot"),
        ("<|im_start|>still", " pot copper"),
        (" ".join(SENTENCES), " pot"),
    ]
    ours, peers = (model.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True) for model in models)
    assert [found for found, _ in ours] == pytest.approx([found for found, _ in peers], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in peers]


def test_what_greedy_decoding_writes_is_greedy(models: tuple[Any, Any]) -> None:
    ours, peer = models
    prompt = "still pot"
    context = ours.tok_encode(prompt)
    best = peer.model(torch.tensor([context])).logits[0, -1].argmax().item()
    found = ours._loglikelihood_tokens([(None, context, [best]), (None, context, [(best + 1) % 320])])
    assert [greedy for _, greedy in found] == [True, False] and found[0][0] > found[1][0]


def test_rolling_loglikelihoods_are_those_of_the_peer(models: tuple[Any, Any]) -> None:
    """Of texts that fit, and of one that takes several windows."""
    texts = [(SENTENCES[0],), ("still",), (" ".join(SENTENCES),)]
    asked = requests("loglikelihood_rolling", texts)
    ours, peers = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in models)
    assert len(models[0].tok_encode(texts[2][0])) > models[0].max_length
    assert ours == pytest.approx(peers, rel=1e-5)


def test_generations_are_those_of_the_peer(models: tuple[Any, Any]) -> None:
    """To their end, to a stop string that occurs, and from a prompt that is cut."""
    plain = models[0].generate_until(requests("generate_until", [(SENTENCES[0], {"max_gen_toks": 16})]))[0]
    stop = plain[len(plain) // 2 :][:2]
    settings = [
        (SENTENCES[0], {"until": [], "max_gen_toks": 16}),
        (SENTENCES[0], {"until": [stop], "max_gen_toks": 16}),
        (SENTENCES[1], {"until": "zz", "max_new_tokens": 9, "do_sample": False, "temperature": 0.7}),
        (" ".join(SENTENCES), {"until": ["zz"], "max_gen_toks": 8}),
    ]
    asked = requests("generate_until", settings)
    ours, peers = (model.generate_until(asked, disable_tqdm=True) for model in models)
    assert ours == peers and stop and ours[1] == plain[: plain.index(stop)]


def test_templates_are_those_of_the_peer(models: tuple[Any, Any]) -> None:
    said = [
        {"role": "user", "content": "still"},
        {"role": "assistant", "content": "pot"},
        {"role": "user", "content": "?"},
    ]
    ours, peers = (model.apply_chat_template(said) for model in models)
    assert ours == peers and models[0].tok_encode(ours) == models[1].tok_encode(peers)


def test_whole_tasks_give_the_figures_of_the_peer(models: tuple[Any, Any], tasks: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = [task["task"] for task in (CHOICE, WRITE, ROLLING)]
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    ours, peers = (
        simple_evaluate(model, tasks=names, num_fewshot=0, task_manager=manager, bootstrap_iters=100)["results"]
        for model in models
    )
    assert set(ours) == set(names)
    for name in names:
        figures = {key: value for key, value in peers[name].items() if isinstance(value, float)}
        assert figures and {key: ours[name][key] for key in figures} == pytest.approx(figures, rel=1e-4)


def test_sampled_answers_differ_and_come_again(models: tuple[Any, Any], teacher: Path, tmp_path: Path) -> None:
    """One prompt asked three times; then the same by another engine that finds the kept answers or computes them."""
    from pipeline.stages.evaluate.harness import EngineLM

    settings = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "max_gen_toks": 12}
    asked = requests("generate_until", [("still", settings)] * 3)
    first = models[0].generate_until(asked)
    assert len(set(first)) == 3
    other = EngineLM(teacher, tmp_path / "other.jsonl", dtype="float32", device="cpu")
    assert other.generate_until(asked) == first
    with pytest.raises(StageFailed, match="sets num_beams for its answers"):
        other.generate_until(requests("generate_until", [("still", {"num_beams": 2})]))
    with pytest.raises(StageFailed, match="answers of 9,999 tokens; the engine holds 510, prompt included"):
        other.generate_until(requests("generate_until", [("still", {"max_gen_toks": 9999})]))


def test_after_a_kill_only_the_piece_at_hand_is_computed_again(
    models: tuple[Any, Any], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.stages.evaluate import harness

    monkeypatch.setattr(harness, "PIECE", 4)
    asked = requests("loglikelihood", [(text, " pot") for text in SENTENCES])
    expected = models[0].loglikelihood(asked, disable_tqdm=True)
    kept = tmp_path / "kept.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:9]) + lines[9][:20])
    computed: list[Any] = []
    resumed = harness.EngineLM(teacher, kept, dtype="float32", device="cpu", max_model_len=98)
    score = resumed._score
    monkeypatch.setattr(resumed, "_score", lambda pairs: computed.extend(pairs) or score(pairs))
    assert resumed.loglikelihood(asked, disable_tqdm=True) == expected and len(computed) == 4
    again = harness.EngineLM(teacher, kept, dtype="float32", device="cpu", max_model_len=98)
    monkeypatch.setattr(again, "_score", lambda pairs: pytest.fail("nothing is left to compute"))
    assert again.loglikelihood(asked, disable_tqdm=True) == expected


# --- the stage --------------------------------------------------------------------------------------------------------


def test_a_stage_puts_tasks_to_both_models(
    copied_run: TinyRun, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"tasks": ["copper_choice", "copper_text"], "folder": str(tasks), "limit": 8}
    command = copied_run.arguments(f"evaluate.lm_eval={json.dumps(settings)}", "evaluate.speed.batch_sizes=[]")
    assert main(command) == 0
    result = read_result(copied_run.folder.path / "02-evaluate")
    assert result is not None
    found = {(score.model, score.task, score.metric): score for score in result.details.harness}
    assert {key[:2] for key in found} == {(m, t) for m in ("teacher", "student") for t in settings["tasks"]}
    accuracy = found["teacher", "copper_choice", "acc"]
    assert accuracy.samples == 8 and accuracy.value.margin is not None and 0 <= accuracy.value.value <= 1
    shown, page = capsys.readouterr().out, copied_run.folder.report.read_text()
    for text in ("lm-evaluation-harness", "copper_choice: acc", f"{accuracy.value.value:.3f} ± "):
        assert text in shown and text in page
    (tasks / "rows.jsonl").write_text((tasks / "rows.jsonl").read_text().replace("copper", "grain"))
    assert main(command) == 0
    assert read_result(copied_run.folder.path / "02-evaluate").key != result.key, "the tasks changed"


def test_a_task_that_nobody_knows_is_one_sentence(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness knows only our tasks here: to read all that it brings takes a while."""
    from pipeline.stages.evaluate import harness
    from pipeline.stages.evaluate.harness import open_tasks

    monkeypatch.setattr(harness, "TaskManager", partial(harness.TaskManager, include_defaults=False))
    with pytest.raises(UserError, match="'coper_choice', which is no task of lm-evaluation-harness or"):
        open_tasks(Harness(tasks=("coper_choice",), folder=str(tasks)))


def test_mistakes_are_sentences(copied_run: TinyRun, tasks: Path) -> None:
    from pipeline.stages.evaluate.harness import open_tasks

    (tasks / "rows.jsonl").unlink()
    with pytest.raises(StageFailed, match="the data of the task copper_text cannot be read: ") as caught:
        open_tasks(Harness(tasks=("copper_text",), folder=str(tasks)))
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"lm_eval\.folder is nowhere, which is no folder"):
        copied_run.run("evaluate.lm_eval={tasks: [x], folder: nowhere}")


def test_without_the_extra_a_recipe_says_what_is_missing(copied_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        RecipeError, match=r"needs lm-evaluation-harness, which `pip install 'potstill\[eval\]'` brings"
    ):
        copied_run.run("evaluate.lm_eval={tasks: [arc_easy]}")
