"""What is timed: the models as a server would load them, on prompts that change."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.measure import speed
from pipeline.measure.speed import TURNS, engines_for_speed, measure_speed
from pipeline.stages.shared.config import Speed
from serve.llm import Choice, Generation
from serve.sampling_params import SamplingParams
from tests.pipeline.tiny_run import write_teacher

SPEED = Speed(batch_sizes=(2, 1), prompt_tokens=4, new_tokens=3)


class Recorded:
    """In an engine's place: what it is asked."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def generate(self, prompts: list[list[int]], params: Any) -> list[Generation]:
        if params.max_tokens == SPEED.new_tokens:
            self.log.append((self.name, [prompt[0] for prompt in prompts]))
        return [Generation(None, prompt, [Choice(token_ids=[1] * params.max_tokens)]) for prompt in prompts]


def test_each_turn_asks_other_prompts_and_every_engine_the_same() -> None:
    log: list[Any] = []
    prompts = [[number] * SPEED.prompt_tokens for number in range(2 * TURNS)]
    engines: Any = [Recorded(log, "one"), Recorded(log, "two")]
    points = measure_speed(engines, prompts, SPEED)
    assert [[point.batch_size for point in own] for own in points] == [[1, 2], [1, 2]]
    orders = [("one", "two"), ("two", "one")]
    alone = [(name, [turn]) for turn in range(TURNS) for name in orders[turn % 2]]
    paired = [(name, [2 * turn, 2 * turn + 1]) for turn in range(TURNS) for name in orders[turn % 2]]
    assert log == alone + paired


class Slowing(Recorded):
    """Takes as long for a request as is listed, one after another."""

    now = 0.0

    def __init__(self, seconds: list[float]) -> None:
        super().__init__([], "")
        self.seconds = iter(seconds)

    def generate(self, prompts: list[list[int]], params: Any) -> list[Generation]:
        if params.max_tokens == SPEED.new_tokens:
            Slowing.now += next(self.seconds)
        return super().generate(prompts, params)


def test_turns_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down makes no model slower than another."""
    monkeypatch.setattr(speed.time, "perf_counter", lambda: Slowing.now)
    seconds = [2.0**turn for turn in range(TURNS)]
    ratios = (2, 3, 2, 1, 2, 3, 2, 1, 2)
    engines: Any = [
        Slowing(seconds),
        Slowing([each / ratio for each, ratio in zip(seconds, ratios, strict=True)]),
    ]
    ((first,), (second,)) = measure_speed(engines, [[7]], replace(SPEED, batch_sizes=(1,)))
    assert first.beside is None and second.beside == 2
    assert (first.tokens_per_s, second.tokens_per_s) == (SPEED.new_tokens / 16, SPEED.new_tokens / 8)


def test_few_prompts_are_asked_again() -> None:
    log: list[Any] = []
    engines: Any = [Recorded(log, "one")]
    measure_speed(engines, [[7], [8]], replace(SPEED, batch_sizes=(3,)))
    assert log[0] == ("one", [7, 8, 7])


def test_a_draft_is_timed_with_the_tokens_that_it_drafts_with(tmp_path: Path) -> None:
    teacher, whole = write_teacher(tmp_path / "teacher"), write_teacher(tmp_path / "whole")
    shutil.copytree(whole, draft := tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"draft_vocabulary": "0-39"}))
    target, alone, pair = engines_for_speed(str(draft), str(teacher), SPEED)
    assert target.engine.draft is None
    assert len(alone.engine.runner.model.head_weight) == config["vocab_size"]
    drafting: Any = pair.engine.draft
    assert len(drafting.runner.model.head_weight) == 40
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    answers = [engine.generate([[5, 6, 7]], greedy)[0].choices[0].token_ids for engine in (target, pair)]
    assert answers[0] == answers[1]
