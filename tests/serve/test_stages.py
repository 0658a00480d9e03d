"""Each stage of a model computes another step, and nothing of what is said changes."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from model.tensor_parallel import ShardedTransformer
from serve.engine import scheduler
from serve.engine.engine import Engine
from serve.engine.scheduler import Schedule
from serve.llm import LLM
from serve.sampling_params import SamplingParams
from tests import trials
from tests.serve.http_server import save_tiny_folder
from tests.serve.test_overlap import PROMPTS, mixed_params, news
from tests.serve.test_speculation import noisy_twin
from tests.serve.test_token_mask import Alternating
from tests.serve.toys import drain, greedy
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("follower_threads", "few_are_divided")


@pytest.fixture
def few_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "WORTH_DIVIDING", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home, model = tmp_path_factory.mktemp("stages"), tiny_model(seed=3, num_layers=3)
    save_tiny_folder(home / "twin", noisy_twin(model, noise=0.002))
    return save_tiny_folder(home / "model", model)


@contextmanager
def engine_of(folder: Path, stages: int, **options: Any) -> Iterator[Engine]:
    options = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_pages": 64} | options
    engine = LLM(str(folder), pipeline_parallel_size=stages, **options).engine
    try:
        yield engine
    finally:
        engine.close()


def ask(engine: Engine, max_tokens: int = 16, **changes: Any) -> None:
    """With a draft, what has neither a seed nor likeliest tokens is only distributed alike, so it gets a seed there."""
    for number, (prompt, params) in enumerate(zip(PROMPTS, mixed_params(max_tokens), strict=True)):
        if engine.draft is not None and not params.is_greedy:
            params = replace(params, seed=number)
        engine.add_request(str(number), prompt, replace(params, **changes))


@pytest.mark.parametrize(
    ("stages", "options"),
    [(2, {}), (3, {"num_pages": 7, "max_model_len": 110}), (2, {"num_pages": 7, "max_num_batched_tokens": 9})],
    ids=str,
)
def test_the_output_is_that_of_one_process(folder: Path, stages: int, options: dict[str, Any]) -> None:
    results = []
    for count in (1, stages):
        with engine_of(folder, count, **options) as engine:
            ask(engine)
            results.append(news(engine))
            assert (engine.stats().num_preemptions > 0) == ("num_pages" in options)
    assert results[0] == results[1]


DRAFTS = {"ngram": {"draft": "ngram"}, "suffix": {"draft": "suffix"}, "model": {}, "both": {"draft": "suffix"}}


def drafting(kind: str, folder: Path) -> dict[str, Any]:
    """Options of an engine with such a draft; a model is one that is mostly right."""
    twin = str(folder.with_name("twin"))
    models = {"model": {"draft": twin}, "both": {"draft_model": twin}}
    return DRAFTS[kind] | models.get(kind, {})


SCARCE = {"num_pages": 7, "max_model_len": 110}


FEW = [("suffix", 2, {"num_speculative_tokens": None}), ("both", 3, SCARCE)]
ALL = [
    (kind, stages, {"num_speculative_tokens": length} | room)
    for kind, stages, length in product(DRAFTS, (2, 3), (None, 3))
    for room in ({}, SCARCE, {"max_num_batched_tokens": 9})
]


@pytest.mark.parametrize(("kind", "stages", "options"), ALL if trials.in_full else FEW, ids=str)
def test_so_is_it_with_a_draft(folder: Path, kind: str, stages: int, options: dict[str, Any]) -> None:
    """Greedy and seeded, with penalties, several choices and log-probabilities; of few tokens, so texts repeat."""
    results, few = list[Any](), dict.fromkeys((7, 9, 11, 12), 30.0)
    options = {"num_speculative_tokens": 3} | options | drafting(kind, folder)
    for count in (1, stages):
        with engine_of(folder, count, **options) as engine:
            ask(engine, 10, logit_bias=few)
            results.append(news(engine))
            stats = engine.stats()
            assert (stats.num_preemptions > 0) == ("num_pages" in options)
            assert stats.num_accepted_tokens > 0
    assert results[0] == results[1]


class Meetings:
    """Where the stages of a model wait for each other, each amid a pass: stage 0 in the one behind that of stage 1."""

    def __init__(self, first: int, last: int) -> None:
        self.numbers = range(first, last + 1)
        """Of the passes of stage 1 that wait."""
        self.num_met = 0
        self.sizes: list[int] = []
        """Tokens of each pass of stage 0."""
        self._count: Counter[int] = Counter()
        self._barrier = threading.Barrier(2, timeout=20)

    def amid(self, stage: int, num_tokens: int) -> None:
        number = self._count[stage]
        self._count[stage] += 1
        if stage == 0:
            self.sizes.append(num_tokens)
        if number - (stage == 0) in self.numbers and not self._barrier.broken:
            try:
                self._barrier.wait()
            except threading.BrokenBarrierError:
                return
            self.num_met += stage


@pytest.mark.parametrize("length", [0, 2], ids=["decoding", "drafting"])
def test_a_stage_computes_a_step_while_the_next_computes_the_one_before(
    folder: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other in the midst of its pass: one after the other they would never meet."""
    pass_on = ShardedTransformer.pass_on
    options = drafting("model", folder) | {"num_speculative_tokens": length} if length else {}
    with engine_of(folder, 2, **options) as engine:
        meetings = Meetings(1, 9)

        def watched(model: ShardedTransformer, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
            meetings.amid(model._stage.index, len(delta))
            return pass_on(model, delta, residual)

        monkeypatch.setattr(ShardedTransformer, "pass_on", watched)
        for number in range(8):
            engine.add_request(str(number), [5 + number] * 5, greedy(6 + 10 * length))
        drain(engine)
    assert meetings.num_met == 9
    assert meetings.sizes[:11] == [8 * 5, *[4 * (1 + length)] * 10], "all prompts, then the two halves in turn"


def plans_of(engine: Engine) -> list[Schedule]:
    """Filled with what it plans from here on."""
    plans, schedule = list[Schedule](), engine.scheduler.schedule

    def noted(*args: Any, **options: Any) -> Schedule:
        plans.append(schedule(*args, **options))
        return plans[-1]

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    return plans


def test_one_sequence_is_never_in_two_steps_but_for_parts_of_its_prompt(folder: Path) -> None:
    with engine_of(folder, 3, max_num_batched_tokens=16) as engine:
        plans = plans_of(engine)
        engine.add_request("long", [7] * 60, greedy(3))
        for number in range(5):
            engine.add_request(str(number), [5 + number] * 9, greedy(12))
        steps = 0
        while engine.has_work():
            engine.step()
            steps += 1
            assert len(engine._pending) <= 2
            plan = plans[-1].chunks
            near = [chunk for other in plans[-3:-1] for chunk in other.chunks]
            decoding = {chunk.sequence_id for chunk in plan if chunk.num_tokens == 1}
            assert not decoding & {chunk.sequence_id for chunk in near}
    assert steps > 12


class Failing(Alternating):
    """Raises behind three tokens."""

    def allowed(self, output: Sequence[int]) -> np.ndarray:
        if len(output) == 3:
            raise OSError("a mask cannot be made")
        return super().allowed(output)


@pytest.mark.parametrize("kind", [None, *(("ngram", "both") if trials.in_full else ())])
def test_who_ends_or_is_masked_meanwhile(folder: Path, kind: str | None) -> None:
    """An abort amid a pass is final, what raises while a token is drawn ends one request, and the others go on."""
    results = []
    options = drafting(kind, folder) | {"num_speculative_tokens": 2} if kind else {}
    for count in (1, 2):
        with engine_of(folder, count, **options) as engine:
            ask(engine)
            engine.add_request("gone", [9] * 7, greedy(50, n=2))
            told = [output for _ in range(5) for output in engine.step() if output.request_id != "gone"]
            assert count == 1 or engine._pending
            engine.abort("gone")
            engine.add_request("masked", [9] * 8, greedy(12))
            engine.set_token_mask("masked", Alternating())
            engine.add_request("failing", [9] * 8, greedy(12))
            engine.set_token_mask("failing", Failing())
            answers = news(engine)
        tokens, _, reason, *_ = answers.pop(("failing", 0))
        assert (len(tokens) == 3 or (kind and len(tokens) < 3)) and reason == "error"
        assert answers.pop(("gone", 0))[2] == answers.pop(("gone", 1))[2] == "abort"
        whole = {key: [] for key in answers}
        for output in told:
            whole[output.request_id, output.index] = whole.get((output.request_id, output.index), [])
            whole[output.request_id, output.index] += output.new_token_ids
        results.append({key: tokens + (answers[key][0] if key in answers else []) for key, tokens in whole.items()})
    assert results[0] == results[1]


def test_embeddings_and_scores_of_prompts(folder: Path) -> None:
    """Of prompts in parts, several of which are under way."""
    results = []
    for count in (1, 3):
        with engine_of(folder, count, max_num_batched_tokens=8) as engine:
            for number, prompt in enumerate(PROMPTS[:4]):
                params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, pooling="mean")
                engine.add_request(str(number), prompt, params)
            results.append(drain(engine))
    for key, output in results[0].items():
        other = results[1][key]
        assert other.embedding == pytest.approx(output.embedding, rel=1e-4, abs=1e-5)
        scores = [[one and one.logprob for one in each.prompt_logprobs] for each in (output, other)]
        assert scores[1][1:] == pytest.approx(scores[0][1:], abs=1e-4) and scores[1][0] is scores[0][0] is None


def test_an_engine_is_closed_amid_steps(folder: Path) -> None:
    with engine_of(folder, 3) as engine:
        ask(engine)
        while len(engine._pending) < 2:
            engine.step()
