"""The files that one request and one decoding step enter are those that serve/README.md draws, and they are few."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.engine.engine import Engine
from serve.sampling_params import SamplingParams
from tests.serve.http_server import ROOT, running_server, save_tiny_folder
from tests.serve.toys import make_engine, random_prompts
from tests.tiny import tiny_model

TRACED = (str(Path(__file__).with_name("traced_server.py")),)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}}
COMPLETION = {"prompt": "hi", "logprobs": 1, "n": 2}


def drawn(folder: str) -> set[str]:
    """The files of a folder in the drawing of a request's path."""
    text = (ROOT / "serve" / "README.md").read_text()
    section = text[text.index("## The path of a request") :].partition("\n## ")[0]
    lines = "\n".join(line for line in section.splitlines() if line.startswith("    "))
    return set(re.findall(rf"{folder}/[\w/]+\.py", lines))


@pytest.mark.parametrize(
    ("route", "body", "other"),
    [("chat/completions", CHAT, "completions"), ("completions", COMPLETION, "chat")],
)
def test_a_request_enters_the_files_that_are_drawn(
    tmp_path: Path, route: str, body: dict[str, Any], other: str
) -> None:
    """A stream and a whole response, from connection to last byte; each enters one of the two routes."""
    folder = save_tiny_folder(tmp_path / "model")
    with running_server(folder, tmp_path / "log", program=TRACED) as server:
        answer = httpx.post(f"{server.url}/v1/{route}", json=body | {"max_tokens": 3}, timeout=20)
        assert answer.status_code == 200, answer.text
        server.terminate()
        assert server.process.stdout is not None
        entered = {name for name in json.loads(server.process.stdout.read()) if name.startswith("serve/http/")}
    assert entered == drawn("serve/http") - {f"serve/http/{other}.py"}
    assert len(entered) <= 8


@pytest.mark.parametrize(
    ("route", "body", "files"),
    [
        ("v1/responses", {"input": "hi", "max_output_tokens": 3}, {"base", "responses", "response_items"}),
        ("v1/messages", {"messages": CHAT["messages"], "max_tokens": 3}, {"base", "messages"}),
        (
            "api/chat",
            {"model": "MODEL", "messages": CHAT["messages"], "options": {"num_predict": 3}},
            {"base", "ollama"},
        ),
    ],
)
def test_a_translation_adds_its_own_files_alone(
    tmp_path: Path, route: str, body: dict[str, Any], files: set[str]
) -> None:
    """The rest of its way is that of chat."""
    with running_server(save_tiny_folder(tmp_path / "model"), tmp_path / "log", program=TRACED) as server:
        named = {name: str(tmp_path / "model") if value == "MODEL" else value for name, value in body.items()}
        answer = httpx.post(f"{server.url}/{route}", json=named | {"stream": True}, timeout=20)
        assert answer.status_code == 200, answer.text
        server.terminate()
        assert server.process.stdout is not None
        entered = {name for name in json.loads(server.process.stdout.read()) if name.startswith("serve/http/")}
    own = {f"serve/http/translations/{name}.py" for name in files}
    assert entered == drawn("serve/http") - {"serve/http/completions.py"} | own


def entered_by_step(engine: Engine) -> set[str]:
    """The files of serve/engine/ of which a step calls anything."""
    files: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    room = ROOT / "serve" / "engine"
    return {str(Path(name).relative_to(ROOT)) for name in files if Path(name).is_relative_to(room)}


@pytest.mark.eager
@pytest.mark.parametrize("draft", [None, "model", "ngram", "suffix"])
def test_a_decoding_step_enters_the_files_that_are_drawn(draft: str | None) -> None:
    """From a step amid decoding to one that ends a request; requests with penalties, seeds and log-probabilities."""
    options: dict[str, Any] = {"num_speculative_tokens": 2} if draft else {}
    engine = make_engine(tiny_model(seed=3), tiny_model(seed=3) if draft == "model" else draft, **options)
    params = ({"temperature": 0.0}, {"seed": 1, "repetition_penalty": 1.2}, {"logprobs": 2, "stop": ("never",)})
    for number, (prompt, own) in enumerate(zip(random_prompts(3), params, strict=True)):
        engine.add_request(str(number), prompt * 2, SamplingParams(max_tokens=20, ignore_eos=True, **own))
    while engine.scheduler.waiting:  # whom to admit is no matter of a decoding step
        engine.step()
    entered = set()
    while engine.has_work():
        step = entered_by_step(engine)
        assert len(step) <= 9
        entered |= step
    path = drawn("serve/engine") - {"serve/engine/graphs.py"}  # in the place of runner.py, where graphs are
    drafts = {name for name in path if "/drafts/" in name}
    kinds = {f"serve/engine/drafts/{kind}.py" for kind in ("model", "ngram", "suffix")}
    own = {f"serve/engine/drafts/{draft}.py"}
    assert entered == (path - drafts if draft is None else path - kinds | own)
