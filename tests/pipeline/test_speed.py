"""What is timed: the models as a server would load them, on prompts that change."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.measure import speed
from pipeline.measure.speed import TURNS, engines_for_speed, measure_decoding, measure_speed, within
from pipeline.stages.mod.config import RoutedSpeed
from pipeline.stages.shared.config import Decoding, Speed
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


@given(
    positions=st.integers(64, 5_000),
    asked=st.integers(1, 5_000),
    new_tokens=st.integers(2, 5_000),
    sizes=st.lists(st.integers(1, 4_096), max_size=3).map(tuple),
)
def test_what_is_timed_fits_the_positions_of_the_models(
    positions: int, asked: int, new_tokens: int, sizes: tuple[int, ...]
) -> None:
    plain = within(Speed(sizes, asked, new_tokens), positions)
    assert plain.prompt_tokens + plain.new_tokens + speed.BEHIND_A_PROMPT <= positions
    long = within(RoutedSpeed(asked, new_tokens, sizes), positions)
    assert isinstance(long, RoutedSpeed) and long.new_tokens >= 2
    needed = long.context_tokens + speed._tokens_after(long.context_tokens, long, long.new_tokens)
    assert needed <= positions or long.context_tokens == 1
    assert within(plain, positions) == plain and within(long, positions) == long


@pytest.mark.parametrize("asked", [Speed(), Decoding()], ids=["speed", "decoding"])
def test_models_of_few_positions_are_timed_with_nothing_set(
    asked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By default prompts and what follows took more: a run ended in an error after all of its training."""
    folder = write_teacher(tmp_path, max_position_embeddings=128)
    with caplog.at_level("WARNING", logger=speed.__name__):
        settings = within(asked, speed.known_positions([folder]))
    assert settings != asked and within(asked, 2**20) == asked
    assert caplog.messages == ["speed is measured on shorter texts than asked for: its models know 128 positions"]
    if isinstance(settings, Decoding):
        found = measure_decoding({"one": folder}, [[1, 2, 3]] * 8, settings)
        assert found["one"].keys() == {"1", "8"}
        return
    (engine,) = engines_for_speed(str(folder), None, settings)
    ((one, eight),) = measure_speed([engine], [[1] * settings.prompt_tokens], settings)
    assert one.tokens_per_s and eight.tokens_per_s
