"""A newer draft under a running server: kept when it is as good, taken back when it is worse; the text is the same."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import openai
import pytest

from model.files.artifact import publish
from model.files.checkpoint import load_model
from model.files.label_shards import label_shards
from model.files.labels import read_labels
from model.text.tokenizer import Tokenizer
from model.transformer import Transformer
from serve.config import EngineConfig
from serve.engine import draft_watch
from serve.engine.drafts.trial import Acceptance, is_worse
from serve.engine.engine import Engine
from serve.engine.loading import load_models
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import generate, greedy, greedy_oracle
from tests.tiny import tiny_model
from train.data import prepare
from train.sources import DataConfig

PROMPTS = [[5, 9, 7], [20, 21, 22, 23], [300, 2]]


def publish_draft(folder: Path, model: Transformer, change: Callable[[Path], None] = lambda made: None) -> None:
    """As a stage of a run does, in place of what is there."""

    def write(staging: Path) -> None:
        change(save_tiny_folder(staging / "made", model))
        for file in (staging / "made").iterdir():
            file.rename(staging / file.name)
        (staging / "made").rmdir()

    publish(folder, write, stage="distill", recipe={"at": time.monotonic_ns()}, parents=(), gates={})


def trial(share: float, old: Acceptance, seed: int) -> tuple[bool, int]:
    """Whether a draft of this share is taken back within 600 tokens, and after how many."""
    random, new = np.random.default_rng(seed), Acceptance(memory=1.0)
    while new.tested < 600:
        right = random.random(3) < share
        num_accepted = int(right.argmin()) if not right.all() else 3
        new.observe(3, num_accepted)
        if is_worse(new, old):
            return True, int(new.tested)
    return False, 600


@pytest.mark.parametrize("share", [0.3, 0.95])
def test_a_draft_as_good_is_kept_and_a_worse_one_is_not(share: float) -> None:
    old = Acceptance(accepted=1_500 * share, rejected=1_500 * (1 - share))
    wronged = sum(trial(share, old, seed)[0] for seed in range(40))
    assert wronged <= 2, "of 40, where one in a hundred is allowed"
    caught = [trial(0.5 * share, old, seed) for seed in range(20)]
    assert sum(worse for worse, _ in caught) >= 19
    is_caught, tokens = trial(0.0, old, 0)
    assert is_caught and tokens <= 20
    assert not is_worse(Acceptance(0, 500), Acceptance()), "nothing is known of the old one"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(draft_watch, "LOOK_S", 0.02)
    target = save_tiny_folder(tmp_path / "target")
    draft = save_tiny_folder(tmp_path / "draft", noisy_twin(load_model(target)))
    config = EngineConfig(str(target), str(draft), dtype="float32", num_pages=256, num_speculative_tokens=3,
                          watch_draft=str(tmp_path / "newer"), watch_draft_tokens=60)  # fmt: skip
    yield Engine(config, load_models(config))


@cache
def wanted() -> list[list[int]]:
    """What the model says alone."""
    return [greedy_oracle(tiny_model(), prompt, 24) for prompt in PROMPTS]


def serve_until(engine: Engine, what: Callable[[], bool]) -> None:
    """Generate until that holds; all of it is what the model says alone."""
    deadline = time.monotonic() + 60
    while not what():
        assert generate(engine, PROMPTS, greedy(24)) == wanted()
        assert time.monotonic() < deadline
    assert generate(engine, PROMPTS, greedy(24)) == wanted()


def test_better_stays_and_random_goes_back_while_requests_run(engine: Engine, tmp_path: Path) -> None:
    serve_until(engine, lambda: engine.stats().num_draft_tokens > 200)
    watch: Any = engine.draft_watch
    before = watch._acceptance.share
    publish_draft(tmp_path / "newer", tiny_model())
    serve_until(engine, lambda: engine.stats().num_draft_swaps == 1 and not engine.stats().draft_on_trial)
    assert engine.stats().num_draft_rollbacks == 0
    serve_until(engine, lambda: watch._acceptance.tested > 100)
    assert watch._acceptance.share == 1.0 > before, "the draft is the target itself"
    publish_draft(tmp_path / "newer", tiny_model(seed=9))
    serve_until(engine, lambda: engine.stats().num_draft_rollbacks == 1)
    assert engine.stats().num_draft_swaps == 2
    drafted, accepted = engine.stats().num_draft_tokens, engine.stats().num_accepted_tokens
    serve_until(engine, lambda: engine.stats().num_draft_tokens > drafted + 50)
    assert engine.stats().num_accepted_tokens - accepted == engine.stats().num_draft_tokens - drafted


def exchange_two_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(spec))


@pytest.mark.parametrize("change", ["shape", "vocabulary"])
def test_what_cannot_take_the_drafts_place_is_left_alone(
    engine: Engine, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "potstill.engine"):
        if change == "shape":
            publish_draft(tmp_path / "newer", tiny_model(num_layers=1))
        else:
            publish_draft(tmp_path / "newer", tiny_model(), exchange_two_tokens)
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.02)
    [record] = caplog.records
    said = {"shape": "holds a model of another configuration", "vocabulary": "their vocabularies differ: token "}
    assert said[change] in record.getMessage() and record.exc_info is None
    serve_until(engine, lambda: engine.stats().num_draft_tokens > 20)
    assert engine.stats().num_draft_swaps == 0


KEYS = {"keys": [{"name": "gives", "key": "g"}, {"name": "keeps", "key": "k"}]}
STREAMED = {"g": [5, 9, 7], "k": [6, 9, 7]}
"""By key: one agrees to being stored, the other does not."""
LENGTH = 60


class Streams:
    """One client for each key, which streams the same answer again and again."""

    def __init__(self, server: RunningServer) -> None:
        self.said: dict[str, list[list[int]]] = {key: [] for key in STREAMED}
        self._server, self._stop = server, threading.Event()
        self._threads = [threading.Thread(target=self._stream, args=item) for item in STREAMED.items()]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _stream(self, key: str, prompt: list[int]) -> None:
        client = self._server.client(api_key=key, timeout=120)
        while not self._stop.is_set():
            answer = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=LENGTH, temperature=0, stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            self.said[key].append(
                [token for part in answer for choice in part.choices for token in choice.token_ids or ()]  # type: ignore[attr-defined]
            )


def test_drafts_and_labels_under_streams_of_two_accounts(tmp_path: Path) -> None:
    """Over HTTP: a better draft stays and a random one goes, no text changes; stored is whose account agrees alone."""
    target = save_tiny_folder(tmp_path / "target")
    draft = save_tiny_folder(tmp_path / "draft", noisy_twin(load_model(target)))
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    options = ["--verify", str(target), "--dtype", "float32", "--kv-cache-bytes", "16M", "--served-model-name", "tiny"]
    options += ["--speculative-config", '{"num_speculative_tokens": 3}', "--api-keys-file", str(tmp_path / "keys.json")]
    options += ["--watch-draft", str(tmp_path / "newer"), "--watch-draft-tokens", "60"]
    options += ["--label-folder", str(tmp_path / "labels"), "--label-consent", "gives"]
    expected = {key: greedy_oracle(tiny_model(), prompt, LENGTH) for key, prompt in STREAMED.items()}
    with running_server(draft, tmp_path / "log", *options) as server:
        with Streams(server) as streams:
            publish_draft(tmp_path / "newer", tiny_model())
            server.wait_for("potstill:draft_swaps_total", 1, timeout_s=60)
            server.wait_for("potstill:draft_on_trial", 0, timeout_s=60)
            publish_draft(tmp_path / "newer", tiny_model(seed=9))
            server.wait_for("potstill:draft_rollbacks_total", 1, timeout_s=60)
            assert server.metric("vllm:draft_swaps_total") == 2
            with pytest.raises(openai.BadRequestError, match="store can only be false here"):
                server.client(api_key="k").completions.create(
                    model="tiny", prompt=[6, 6], max_tokens=4, extra_body={"store": True}
                )
            server.client(api_key="g").completions.create(
                model="tiny", prompt=[8, 8], max_tokens=4, extra_body={"store": False}
            )
        assert all(streams.said[key] and all(one == expected[key] for one in streams.said[key]) for key in STREAMED)
        assert server.terminate() == 0
    log = (tmp_path / "log").read_text()
    assert "is on trial" in log and "is kept" in log and "is taken back" in log
    stored = [one.tokens.tolist() for shard in label_shards(tmp_path / "labels") for one in read_labels(shard)]
    assert stored == [STREAMED["g"] + expected["g"]] * len(streams.said["g"])
    data = prepare(
        DataConfig(str(tmp_path / "labels"), sequence_length=128, held_out=0.0),
        Tokenizer.load(target),
        tmp_path / "c",
    )
    assert data.train.num_documents == len(stored) and data.train.distributions is not None
