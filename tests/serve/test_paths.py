"""The files that one request enters are those that serve/README.md draws, and they are few."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.http_server import ROOT, running_server, save_tiny_folder

TRACED = (str(Path(__file__).with_name("traced_server.py")),)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}}
COMPLETION = {"prompt": "hi", "logprobs": 1, "n": 2}


def drawn(folder: str) -> set[str]:
    """The files of a folder in the drawing of a request's path."""
    text = (ROOT / "serve" / "README.md").read_text()
    section = text[text.index("## The path of a request") :].partition("\n## ")[0]
    return set(re.findall(rf"{folder}/[\w/]+\.py", section))


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
