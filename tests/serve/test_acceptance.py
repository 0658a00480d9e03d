"""Acceptance by position: what engine, metrics and every route say of it, beside a script and beside each other."""

import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, ClassVar, Literal

import httpx
import pytest
import torch

from serve.config import DRAFTS
from serve.engine.drafts.base import DraftContext
from serve.engine.drafts.tree import DraftTree, Wanted
from serve.engine.requests import Sequence
from serve.http.generation import UsageCounter
from serve.http.metrics import Metrics
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder
from tests.serve.toys import VOCAB_SIZE, greedy, greedy_oracle, make_engine
from tests.tiny import tiny_model

MESSAGES = [{"role": "user", "content": "a b a b a b a"}]
LONGEST = 3
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SCRIPT = [2, 0, 3, 1, 3, 0, 0, 2]
"""Tokens of each proposal that are right; the one behind them is wrong."""


class ScriptedDraft:
    """Knows what the target will say, and is wrong where the script says so."""

    model_use: ClassVar[Literal["none"]] = "none"
    needs_text: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    runs_passes = True
    first_tokens = 1
    text: ClassVar[list[int]] = []

    def __init__(self, context: DraftContext) -> None:
        self.state = context.sampler.state
        self.script = iter(SCRIPT)

    def at_hand(self, sequence: Sequence) -> None: ...

    def propose(self, wanted: list[Wanted]) -> dict[int, DraftTree]:
        [(sequence, k, _)] = wanted
        if (right := next(self.script, None)) is None:
            return {}
        tokens = self.text[sequence.num_tokens :][:k]
        tokens[right:] = [(token + 1) % VOCAB_SIZE for token in tokens[right:]]
        self.state.write_drafts(torch.tensor([sequence.batch_row]), torch.tensor([tokens]))
        return {sequence.id: DraftTree(k)}

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None: ...

    def copy_pages(self, copies: tuple[tuple[int, int], ...]) -> None: ...

    def rehearse(self) -> None: ...

    def forget_captures(self) -> None: ...

    def num_missing(self, sequence: Sequence) -> int:
        return 0


def test_counts_are_those_of_a_scripted_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTS, "scripted", f"{__name__}.ScriptedDraft")
    model, prompt = tiny_model(seed=3), [5, 9, 7]
    monkeypatch.setattr(ScriptedDraft, "text", prompt + greedy_oracle(model, prompt, 40))
    engine = make_engine(model, "scripted", num_speculative_tokens=LONGEST)
    usage, metrics = UsageCounter(), Metrics("tiny")
    metrics.record_stats(engine.stats())
    engine.add_request("r", prompt, greedy(36))
    while engine.has_work():
        for output in engine.step():
            usage.record(0, output)
        metrics.record_stats(engine.stats())
    per_position = [sum(right > place for right in SCRIPT) for place in range(LONGEST)]
    assert engine.stats().accepted_per_position[:LONGEST] == tuple(per_position)
    exposed = metrics.expose().decode()
    for place, count in enumerate(per_position):
        assert f'{PER_POSITION}{{model_name="tiny",position="{place}"}} {count:.1f}' in exposed
    found: Any = usage.metrics()
    counted = found.speculative_decoding
    assert counted.acceptance_histogram == [SCRIPT.count(number) for number in range(LONGEST + 1)]
    assert (counted.num_spec_steps, counted.num_spec_tokens) == (len(SCRIPT), LONGEST)
    assert (counted.num_draft_tokens, counted.num_accepted_draft_tokens) == (LONGEST * len(SCRIPT), sum(SCRIPT))
    assert counted.draft_acceptance_rate == sum(SCRIPT) / (LONGEST * len(SCRIPT))
    assert counted.mean_acceptance_length == 1 + sum(SCRIPT) / len(SCRIPT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model that also looks up how its text went on, beside another that drafts for it."""
    root = tmp_path_factory.mktemp("acceptance")
    target, noisy = save_tiny_folder(root / "target"), tiny_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    draft = save_tiny_folder(root / "draft", noisy)
    speculation = {"method": "suffix", "model": str(draft), "num_speculative_tokens": LONGEST}
    options = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--speculative-config", json.dumps(speculation)]
    with running_server(target, root / "server.log", *options, "--served-model-name", "tiny") as running:
        yield running


def accepted_at_each_place(server: RunningServer) -> list[float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(PER_POSITION)]


def sse(text: str) -> dict[str, Any]:
    """The last event of a stream that has metrics, of the parts that it names by type merged in."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [event for event in (event.get("response", event) for event in events) if "metrics" in event][-1]


CHAT = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
PLAIN = {"model": "tiny", "prompt": "a b a b a b a", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
OLLAMA = {"model": "tiny", "messages": MESSAGES, "options": {"temperature": 0, "num_predict": 16}}
ITEMS = {"model": "tiny", "input": "a b a b a b a", "temperature": 0, "max_output_tokens": 16}
USAGE = {"stream_options": {"include_usage": True}}
ROUTES = [
    ("chat/completions", CHAT | {"max_tokens": 16} | USAGE, True),
    ("completions", PLAIN | {"n": 2}, False),
    ("completions", PLAIN | USAGE, True),
    ("responses", ITEMS, False),
    ("responses", ITEMS, True),
    ("messages", CHAT | {"max_tokens": 16}, False),
    ("messages", CHAT | {"max_tokens": 16}, True),
    ("../api/chat", OLLAMA, True),
]


@pytest.mark.parametrize(("route", "body", "streamed"), ROUTES)
def test_every_route_says_what_the_metrics_say(
    server: RunningServer, route: str, body: dict[str, Any], streamed: bool
) -> None:
    url = httpx.URL(f"{server.url}/v1/").join(route)
    before = accepted_at_each_place(server)
    answer = httpx.post(url, json=body | {"stream": streamed}, timeout=60).raise_for_status()
    read: Callable[[str], dict[str, Any]] = json.loads
    if streamed:
        read = sse if "api" not in str(url) else lambda text: json.loads(text.splitlines()[-1])
    said = read(answer.text)
    counted = said["metrics"]["speculative_decoding"]
    histogram = counted["acceptance_histogram"]
    at_least = list(accumulate(reversed(histogram)))[::-1][1:]  # verifications that accepted the token at each place
    after = accepted_at_each_place(server)
    found = [now - then for now, then in zip(after, before, strict=True)]
    assert found[: len(at_least)] == at_least and not any(found[len(at_least) :])
    assert sum(histogram) == counted["num_spec_steps"] > histogram[0]
    usage = said.get("usage", {})
    details = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    if details is not None:
        assert details["accepted_prediction_tokens"] == counted["num_accepted_draft_tokens"]
        rejected = counted["num_draft_tokens"] - counted["num_accepted_draft_tokens"]
        assert details["rejected_prediction_tokens"] == rejected


def test_a_model_that_looks_up_and_is_drafted_for_says_what_it_says_alone(server: RunningServer) -> None:
    model = tiny_model()
    prompt = [11, 12, 13, 11, 12, 13, 11]
    body = PLAIN | {"prompt": prompt, "return_token_ids": True}
    said = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert said["choices"][0]["token_ids"] == greedy_oracle(model, prompt, 16)
