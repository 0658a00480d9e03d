"""A teacher behind a server: a real one gives what the teacher gives, one that dies costs nothing it has said."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from model.files.checkpoint import load_model
from model.text.tokenizer import Tokenizer
from pipeline.errors import StageFailed, UserError
from pipeline.recipe import RecipeError, parse_recipe
from pipeline.stages.precompute import run as precompute
from pipeline.stages.shared import served
from tests.pipeline.test_precompute import distill, stored
from tests.pipeline.tiny_run import run_stages, write_teacher
from tests.serve.http_server import running_server
from tests.tiny import full_logits


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "PAUSES_S", (0.01, 0.02))


def ask(url: str, **more: Any) -> dict[str, object]:
    server = {"url": f"{url}/v1", "model": "large"}
    return {"precompute": {"model": "teacher", "data": "text", "server": server} | more}


def taught(**more: Any) -> dict[str, object]:
    """A student of no teacher."""
    stage = distill("taught", "student", **more)
    del stage["distill"]["teacher"]
    return stage


@dataclass
class Scripted:
    """Answers as vLLM does, from the logits of a small model; does what it is told to after so many requests."""

    folder: Path
    dies_after: int = 10**9
    busy_every: int = 10**9
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model, self.tokenizer = load_model(self.folder, dtype=torch.float32), Tokenizer.load(self.folder)
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        with self.lock:
            self.asked.append(body)
            if len(self.asked) > self.dies_after:
                return None
            if len(self.asked) % self.busy_every == 0:
                return 503, {"error": {"message": "the queue is full"}}
            if body["model"] != "large":
                return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
            choice = self.chat(body) if path.endswith("chat/completions") else self.score(body)
            return 200, {"choices": [choice], "usage": {"completion_tokens": 5}}

    def score(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, spelled = body["prompt"], self.tokenizer.token_bytes()
        places: list[Any] = [None]
        for token, row in zip(ids[1:], torch.log_softmax(full_logits(self.model, ids), -1), strict=False):
            listed = {token, *row.topk(body["prompt_logprobs"]).indices.tolist()}
            texts = {one: spelled[one].decode(errors="replace") for one in listed}
            places.append({str(one): {"logprob": float(row[one]), "decoded_token": texts[one]} for one in listed})
        return {"prompt_logprobs": places, "finish_reason": "length"}

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        said = " ".join(body["messages"][-1]["content"].split()[::-1])
        ends = "cask" not in said
        return {"message": {"content": f"the answer is {said}"}, "finish_reason": "stop" if ends else "length"}


@contextmanager
def serving(scripted: Scripted) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = scripted.answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if answer is None:  # gone in the middle of a request
                self.close_connection = True
                return
            self.send_response(answer[0])
            self.end_headers()
            self.wfile.write(json.dumps(answer[1]).encode())

        def log_message(self, *given: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_our_server_teaches_what_the_teacher_teaches(tmp_path: Path) -> None:
    """What a real server lists is what the logits say; the student comes near one that had the teacher's passes.

    Not quite there: this teacher's 20 most probable tokens leave much out.
    """
    teacher, compare = write_teacher(tmp_path / "teacher"), {"model": "student", "against": "teacher", "data": "text"}
    compare |= {"held_out_tokens": 512, "speed": {"batch_sizes": []}}
    longer = {"tokens": "10k"}
    dense = run_stages(tmp_path, distill("text", "student", **longer), serve="student", folder="dense")
    options = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--served-model-name", "large"]
    with running_server(teacher, tmp_path / "log", *options) as server:
        stages = (ask(server.url), taught(**longer), {"evaluate": compare})
        _, kept, learnt, found = run_stages(tmp_path, *stages, serve="student")
        with pytest.raises(UserError, match="refuses other: 404, the requested model is not"):
            other = {"url": f"{server.url}/v1", "model": "other"}
            run_stages(tmp_path, ask(server.url, server=other), serve="teacher", folder="other")
    before, wanted = (row.quality.kl.value for row in dense[-1].models[-2:])
    (kl,) = (row.quality.kl.value for row in found.models if row.label == "student")
    assert wanted < kl < 1.25 * wanted < 0.7 * before
    with serving(Scripted(teacher)) as url:
        run_stages(tmp_path, ask(url), serve="teacher", folder="plain")
    real, plain = (load_file(next(stored(tmp_path, run).glob("*.safetensors"))) for run in ("run", "plain"))
    assert np.array_equal(real["starts"], plain["starts"]) and np.array_equal(real["ids"], plain["ids"])
    assert np.abs(real["counts"].astype(int) - plain["counts"]).max() <= 2
    assert [row.label for row in learnt.models] == ["student, before", "student"]
    assert learnt.models[1].quality.kl is None
    assert kept.details.draws == 0 and 0 < kept.details.rest < 0.5
    assert "Stored distributions" in (tmp_path / "run" / "report.html").read_text()


def test_a_server_that_dies_costs_nothing_that_it_has_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back at another address, and is asked for what is missing; busy or not, the files are the same."""
    monkeypatch.setattr(precompute, "SHARD_TOKENS", 500)
    scripted = Scripted(write_teacher(tmp_path / "teacher"))
    with serving(scripted) as url:
        run_stages(tmp_path, ask(url, top=8), serve="teacher", folder="whole")
    whole = {path.name: path.read_bytes() for path in stored(tmp_path, "whole").glob("*.safetensors")}
    requests = len(scripted.asked)
    scripted.asked, scripted.dies_after = [], requests // 2
    with (
        serving(scripted) as url,
        pytest.raises(StageFailed, match=r"does not answer any more \(.*\); what it has said"),
    ):
        run_stages(tmp_path, ask(url, top=8), serve="teacher")
    kept = {path.name for path in (tmp_path / "run" / "01-precompute" / "shards").glob("*.safetensors")}
    assert len(kept) > 1
    scripted.asked, scripted.dies_after, scripted.busy_every = [], 10**9, 7
    with serving(scripted) as url:
        first = run_stages(tmp_path, ask(url, top=8), serve="teacher")
    assert {path.name: path.read_bytes() for path in stored(tmp_path).glob("*.safetensors")} == whole
    assert len(scripted.asked) < requests
    again = run_stages(tmp_path, ask("http://127.0.0.1:1", top=8), serve="teacher")
    assert again[1].finished_at == first[1].finished_at, "an address is no part of what was said"


def test_what_a_server_cannot_teach_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_teacher(tmp_path / "teacher")
    foreign = Scripted(write_teacher(tmp_path / "foreign"))
    foreign.tokenizer = _reversed(foreign.tokenizer)
    with serving(foreign) as url, pytest.raises(UserError, match=r"large at .* has another tokenizer: token \d+ is '"):
        run_stages(tmp_path, ask(url), serve="teacher")
    monkeypatch.setattr(Scripted, "score", lambda self, body: {"text": "", "finish_reason": "length"})
    with serving(foreign) as url, pytest.raises(UserError, match="lists no prompt_logprobs; vLLM and `potstill serve`"):
        run_stages(tmp_path, ask(url), serve="teacher")


class _reversed:
    """A tokenizer that numbers the same tokens from the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.spelled = tokenizer.token_bytes()

    def token_bytes(self) -> list[bytes]:
        return [self.spelled[319 - at] for at in range(320)]


def test_a_server_answers_prompts(tmp_path: Path) -> None:
    words = ["copper pot", "mash the grain", "boil steam", "cut the cask", "heart and tail"]
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps({"text": f"say {one} again"}) for one in words))
    scripted = Scripted(write_teacher(tmp_path / "teacher"), busy_every=3)
    with serving(scripted) as url:
        server = {"url": f"{url}/v1", "model": "large"}
        sampling = {"temperature": 0.3, "max_tokens": 40}
        stage = {"model": "teacher", "prompts": "text", "server": server, "answering": sampling, "sequence_length": 128}
        source = {"source": str(tmp_path / "asked.jsonl")}
        result = run_stages(tmp_path, {"synthesize": stage}, serve="teacher", data=source)[-1]
    assert result.details.kept == 4
    assert {(drop.reason, drop.count) for drop in result.details.drops} == {("did not end in time", 1)}
    lines = (tmp_path / "run" / "01-synthesize" / "data" / "conversations.jsonl").read_text().splitlines()
    assert [message["content"] for message in json.loads(lines[0])["messages"]] == [
        "say copper pot again",
        "the answer is again pot copper say",
    ]
    assert {body["temperature"] for body in scripted.asked} == {0.3}
    assert len({body["seed"] for body in scripted.asked}) == 5


RECIPE_TEXT = """
name: x
models: {base: {from: x}}
data: {text: {source: python-stdlib, sequence_length: 256}}
stages:
  - precompute: {model: base, data: text, server: {url: "http://host:8000/v1", model: large}}
  - distill: {student: {from: base}, data: taught, tokens: 2k}
"""


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("distill.data=text", "distill.teacher is not given, and text holds no distributions to learn from"),
        ("distill.loss.kind=cross_entropy", "distill.teacher is not given"),
        ("distill.gate={max_kl: 1}", "gate.max_kl has nothing to bound: no teacher is here"),
        ("distill.student.candidates=[{layers: 1}, {layers: 2}]", "ranked by how near they come to a teacher"),
        ("precompute.server.url=host:8000", "must be an address like http://host:8000/v1"),
        ("precompute.server={url: http://x}", "model"),
        (
            "stages=[{synthesize: {model: base, server: {url: http://x, model: y}}}]",
            "prompts is not given, but a server",
        ),
    ],
)
def test_mistakes_are_said_when_the_recipe_is_read(override: str, sentence: str) -> None:
    parse_recipe(RECIPE_TEXT)
    with pytest.raises(RecipeError, match=sentence):
        parse_recipe(RECIPE_TEXT, [override])
