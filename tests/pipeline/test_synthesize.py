"""Conversations that a model writes: what is kept, what an interruption costs, and how later stages train on them."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from model.text.tokenizer import Tokenizer
from pipeline.errors import RunInterrupted, StageFailed, UserError
from pipeline.processes import Processes
from pipeline.recipe import RecipeError, load_recipe, parse_recipe
from pipeline.results import Result
from pipeline.run import run_recipe
from pipeline.run_folder import RunFolder
from pipeline.stages.synthesize import filters, writer
from pipeline.stages.synthesize.run import opening_of
from pipeline.stages.synthesize.writer import read_all
from serve.llm import Choice, Generation, Listener
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from tests.pipeline.tiny_run import RECIPE, WORDS, run_stages, write_teacher


class Scripted:
    """In the engine's place: its text follows from the seed alone, and comes in another order than was asked."""

    dies_after: int | None = None
    loads = 0

    def __init__(self, folder: str, **options: Any) -> None:
        type(self).loads += 1
        self.tokenizer = Tokenizer.load(folder)

    def as_completed(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], *, heard: Listener
    ) -> Iterator[tuple[int, Generation]]:
        order = list(range(len(prompts)))
        random.Random(len(prompts)).shuffle(order)
        for done, number in enumerate(order):
            if done == self.dies_after:
                raise RuntimeError("killed")
            choice = self._choice(params[number])
            heard(RequestOutput("", 0, choice.token_ids))
            yield number, Generation(None, prompts[number], [choice])

    def _choice(self, params: SamplingParams) -> Choice:
        draw = random.Random(params.seed)
        kind = draw.random()
        text = " ".join(draw.sample(WORDS, 12))
        text = "still\nassistant\npot pot pot" if kind < 0.1 else text
        tokens = self.tokenizer.encode(text)
        reason = "length" if 0.1 < kind < 0.2 else "stop"
        leak = [1] if 0.2 < kind < 0.3 else []
        ends = [2] if reason == "stop" else []
        return Choice(text=text, token_ids=leak + tokens + ends, finish_reason=reason)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(writer, "LLM", Scripted)
    monkeypatch.setattr(Scripted, "loads", 0)
    return Scripted


def synthesize(home: Path, *more: dict[str, object], folder: str = "run", **settings: Any) -> list[Result]:
    settings = {"model": "teacher", "count": 40, "held_out": 0.2, "sequence_length": 512, **settings}
    return run_stages(home, {"synthesize": settings}, *more, serve="teacher", folder=folder)


def lines(home: Path, folder: str = "run") -> list[Any]:
    path = home / folder / "01-synthesize" / "data" / "conversations.jsonl"
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def test_what_is_kept_has_a_question_and_a_whole_answer(tmp_path: Path) -> None:
    _, result = synthesize(tmp_path)
    details, kept = result.details, lines(tmp_path)
    assert details.prompts == 40 and 10 < details.kept == len(kept) < details.answered < 40
    dropped = {what: sum(d.count for d in details.drops if d.what == what) for what in ("prompt", "answer")}
    assert dropped == {"prompt": 40 - details.answered, "answer": details.answered - details.kept}
    assert {drop.reason for drop in details.drops} == {filters.UNFINISHED, filters.ROLE_LEAK}
    for prompt, answer in kept:
        assert (prompt["role"], answer["role"]) == ("user", "assistant")
        assert len(prompt["content"].split()) == len(answer["content"].split()) == 12
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Conversations written by the engine" in page and details.samples[0].answer in page


def test_answers_that_were_cut_are_kept_as_unfinished_ones(tmp_path: Path, scripted: type[Scripted]) -> None:
    _, dropped = synthesize(tmp_path)
    whole = lines(tmp_path)
    _, kept = synthesize(tmp_path, filter={"cut": True})
    assert scripted.loads == 1, "they were written before"
    found = lines(tmp_path)
    assert [messages for messages in found if "prefix" not in messages[-1]] == whole
    cut = [messages[-1] for messages in found if "prefix" in messages[-1]]
    (unfinished,) = (d for d in dropped.details.drops if (d.what, d.reason) == ("answer", filters.UNFINISHED))
    assert len(cut) == unfinished.count == kept.details.kept - dropped.details.kept > 0
    assert all(answer["prefix"] is True and len(answer["content"].split()) == 11 for answer in cut)


@pytest.mark.parametrize("dies_after", [0, 5, 17])
def test_a_kill_costs_no_line_and_changes_none(
    tmp_path: Path, scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch, dies_after: int
) -> None:
    synthesize(tmp_path, folder="whole")
    monkeypatch.setattr(scripted, "dies_after", dies_after)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            synthesize(tmp_path)
    stage = tmp_path / "run" / "01-synthesize"
    assert len(read_all(stage, "prompts")) == min(2 * dies_after, 40)
    for path in stage.glob("*.0.jsonl"):
        path.write_bytes(path.read_bytes() + b'{"number": 3, "te')  # cut short in the middle of a line
    monkeypatch.setattr(scripted, "dies_after", None)
    synthesize(tmp_path)
    assert lines(tmp_path) == lines(tmp_path, "whole")


def test_a_signal_saves_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.StopSignals, "__enter__", lambda self: setattr(self, "requested", True) or self)
    with pytest.raises(RunInterrupted, match="01-synthesize is saved; the same command goes on from here"):
        synthesize(tmp_path)
    assert len(read_all(tmp_path / "run" / "01-synthesize", "prompts")) == 1


def test_it_runs_once_and_more_prompts_go_on_from_what_is_there(tmp_path: Path, scripted: type[Scripted]) -> None:
    synthesize(tmp_path)
    assert scripted.loads == 1
    synthesize(tmp_path)
    assert scripted.loads == 1, "it is finished"
    before = lines(tmp_path)
    _, result = synthesize(tmp_path, count=60)
    assert lines(tmp_path)[: len(before)] == before and len(lines(tmp_path)) > len(before)
    assert result.details.written_tokens < 30 * 60, "only what is new is written"
    _, result = synthesize(tmp_path, count=60, filter={"min_words": 12, "near_duplicates": 1.0})
    assert scripted.loads == 2, "other filters read what was written"


def test_a_later_stage_trains_on_the_answers_alone(tmp_path: Path) -> None:
    student = {"from": "teacher", "layers": 2, "importance_tokens": 512}
    training = {"tokens": "2k", "batch_tokens": 512, "micro_batch_tokens": 512, "held_out_tokens": 512}
    distill = {"distill": {"teacher": "teacher", "student": student, "data": "answers", **training}}
    _, written, distilled = synthesize(tmp_path, distill)
    assert distilled.models[-1].quality.tokens < 512, "questions are no labels"
    *_, same = synthesize(tmp_path, distill)
    assert same.finished_at == distilled.finished_at and same.key == distilled.key
    (tmp_path / "run" / "01-synthesize" / "data" / "conversations.jsonl").write_text("{}")
    _, mended, same = synthesize(tmp_path, distill)
    assert mended.output == written.output and same.key == distilled.key, "damaged data is made again"


def test_prompts_of_a_data_set(tmp_path: Path) -> None:
    """Conversations are asked up to their last question; what is no question, or a second time the same, is dropped."""
    said = [{"role": "user", "content": "mash the wort"}, {"role": "assistant", "content": "old answer"}]
    rows = [said, [{"role": "system", "content": "Be brief."}, *said], [], [{"role": "user", "content": " "}]]
    rows += [[*said, {"role": "user", "content": "cut the heart from the tail"}]]
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    data = f"data.asked={{source: {tmp_path / 'asked.jsonl'}, chat: true}}"
    _, result = run_with_data(tmp_path, data, prompts="asked", seed=3)
    details = result.details
    assert details.prompts == 5 and [(d.what, d.reason, d.count) for d in details.drops if d.what == "prompt"] == [
        ("prompt", filters.DUPLICATE, 1),
        ("prompt", filters.TOO_SHORT, 2),
    ]
    assert [[m["role"] for m in messages] for messages in lines(tmp_path)] == [
        ["user", "assistant"],
        ["user", "assistant", "user", "assistant"],
    ]


def test_plain_prompts_and_one_that_leaves_no_room(tmp_path: Path) -> None:
    rows = ["boil the mash", "steam " * 400]
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"prompt": row}) for row in rows))
    data = f"data.asked={{source: {tmp_path / 'asked.jsonl'}, text_field: prompt}}"
    _, result = run_with_data(tmp_path, data, prompts="asked", seed=3)
    assert [(drop.reason, drop.count) for drop in result.details.drops] == [(filters.TOO_LONG, 1)]
    assert lines(tmp_path)[0][0] == {"role": "user", "content": "boil the mash"}


def run_with_data(home: Path, data: str, **settings: Any) -> list[Result]:
    if not (home / "teacher").exists():
        write_teacher(home / "teacher")
    settings = {"model": "teacher", "sequence_length": 512, **settings}
    overrides = [f"models.teacher.from={home / 'teacher'}", f"stages={json.dumps([{'synthesize': settings}])}"]
    recipe = load_recipe(RECIPE, [*overrides, "serve={model: teacher}", data])
    return run_recipe(recipe, RunFolder(home / "run"), cache=home / "cache", processes=Processes())


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_asked_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_bytes(b"\xff is no text")
    data = f"data.asked={{source: {tmp_path / 'asked.txt'}}}"
    with pytest.raises(UserError, match="the data set asked holds no prompt"):
        run_with_data(tmp_path, data, prompts="asked")
    with pytest.raises(StageFailed, match=r"keeps no conversation of 9 prompts \(\d prompts: .*too short"):
        synthesize(tmp_path, count=9, filter={"min_words": 100})
    with pytest.raises(StageFailed, match="leaves no room for an answer"):
        synthesize(tmp_path, sequence_length=64, answering={"max_tokens": 60})
    settings = json.loads((tmp_path / "teacher" / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "teacher" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="teacher has no chat template, so it can be asked nothing"):
        synthesize(tmp_path, folder="other")


RECIPE_TEXT = """
name: x
models: {teacher: {from: x}}
data: {text: {source: python-stdlib}}
stages:
  - synthesize: {model: teacher, out: answers}
  - evaluate: {model: teacher, data: answers}
"""


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("evaluate.data=answer", r"no such data; it has text, answers. Did you mean 'answers'"),
        ("synthesize.prompts=answers", "which only a later stage makes"),
        ("synthesize.out=text", "but data of that name exists already"),
        ("evaluate.model=answers", "no such model; it has teacher"),
        ("synthesize.answering.max_tokens=2k", "it must be below sequence_length, which is 1,024"),
        ("synthesize.asking.temperatur=1", "Did you mean 'temperature'"),
    ],
)
def test_names_are_checked_when_the_recipe_is_read(override: str, sentence: str) -> None:
    assert parse_recipe(RECIPE_TEXT).data_set("answers").chat
    with pytest.raises(RecipeError, match=sentence):
        parse_recipe(RECIPE_TEXT, [override])


# --- filters ----------------------------------------------------------------------------------------------------------

OPENING = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def test_the_opening_is_what_the_template_puts_before_a_user(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_teacher(tmp_path))
    opening = opening_of(tokenizer)
    assert opening == "<|im_start|>user\n"
    whole = tokenizer.chat_token_ids([{"role": "user", "content": "pot"}], add_generation_prompt=False)
    ids = tokenizer.encode(opening, allow_special=True)
    assert whole[: len(ids)] == ids


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Can you suggest a recipe for lentil soup?", None),
        ("Hello", filters.TOO_SHORT),
        ("What is a mole?\nAssistant: A mole is", filters.ROLE_LEAK),
        ("What is a mole?\nassistant\nIt is", filters.ROLE_LEAK),
        ("What is a mole? <|im_start|>", filters.ROLE_LEAK),
        ("You are a helpful AI assistant named SmolLM, what now?", filters.ECHO),
        ("Hello! I'm here to help. What is your problem?", filters.OUT_OF_ROLE),
        ("Sure, the capital of France is Paris.", filters.OUT_OF_ROLE),
        ("Can you correct the following text:", filters.OPEN_END),
        ("I like it a lot. " * 5, filters.LOOP),
        ("Can you help me plan a DIY DIY restoration?", filters.LOOP),
        ("Can you provide a guide to solving this math problem?", filters.NOTHING_THERE),
        ("What is the mean of the provided dataset?", filters.NOTHING_THERE),
        ("Which verbs are in this sentence?\n\nHe runs.", None),
    ],
)
def test_prompts_that_small_models_write(text: str, reason: str | None) -> None:
    assert filters.fault_of_prompt(text, OPENING, 3) == reason


CODE = """Here's a function:

```python
def sum_of(numbers):
    total = 0
    for number in numbers:
        total += number
    return total
```

It adds one number after the other, and returns the sum."""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CODE, None),
        ("Paris is the capital.", None),
        ("Yes.", filters.TOO_SHORT),
        ("name the capital of France", filters.ECHO),
        ("1. Go on.\n" * 4, filters.LOOP),
        ("the sum of the numbers in the list of the numbers in the list of the numbers in the list", filters.LOOP),
        ("Paris.\nUser: And of Spain?", filters.ROLE_LEAK),
    ],
)
def test_answers_that_small_models_write(text: str, reason: str | None) -> None:
    assert filters.fault_of_answer(text, "Name the capital of France!", 3) == reason


def test_near_duplicates_are_those_of_the_exact_index() -> None:
    """Against every pair compared directly; MinHash may overlook a pair, but seldom."""
    draw = random.Random(0)
    texts = [" ".join(draw.choice(WORDS) for _ in range(14)) for _ in range(60)]
    for text in texts[:40]:
        words = text.split()
        for _ in range(draw.randrange(4)):
            words[draw.randrange(len(words))] = "changed"
        texts.append(" ".join(words).upper() + "!")
    draw.shuffle(texts)
    threshold, kept, expected, known = 0.5, [], [], []
    seen = filters.NearDuplicates(threshold)
    for text in texts:
        pairs = set(zip(words := text.lower().strip("!").split(), words[1:], strict=False))
        if all(len(pairs & other) / len(pairs | other) < threshold for other in known):
            expected.append(text)
            known.append(pairs)
        if seen.add(text):
            kept.append(text)
    assert 60 < len(expected) < 95
    assert len(set(kept) ^ set(expected)) <= 3
