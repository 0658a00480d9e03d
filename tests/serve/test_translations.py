"""What all translated routes share with chat: formats of output, log lines, metrics, clients that leave, limits."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pydantic
import pytest

from tests.serve.http_server import RunningServer, running_server, save_tiny_folder

KEY = "a-key"
OPTIONS = ["--dtype", "float32", "--kv-cache-bytes", "16M", "--max-model-len", "2048", "--served-model-name", "tiny"]
HEADERS = {"Authorization": f"Bearer {KEY}"}
HI: list[Any] = [{"role": "user", "content": "What is a token?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "What is a token?", "max_output_tokens": 5, "ignore_eos": True},
    "/v1/messages": {"messages": HI, "max_tokens": 5, "ignore_eos": True},
    "/api/chat": {"model": "tiny", "messages": HI, "options": {"num_predict": 5, "temperature": 0}, "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "a", "options": {"num_predict": 5, "temperature": 0}, "stream": False},
    "/v1/embeddings": {"input": "What is a token?"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("translations")
    options = [*OPTIONS, "--api-key", KEY, "--max-num-seqs", "4", "--max-queue", "0"]
    with running_server(save_tiny_folder(root / "model"), root / "log", *options) as running:
        running.api_key = KEY
        yield running


class Kind(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["noun", "verb"]
    known: bool


def test_responses_parse_into_a_model(server: RunningServer) -> None:
    answer = server.client().responses.parse(model="tiny", input="What is a token?", text_format=Kind)
    assert isinstance(answer.output_parsed, Kind)


def test_messages_parse_into_a_model(server: RunningServer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    answer = client.messages.parse(model="tiny", max_tokens=1500, messages=HI, output_format=Kind)
    assert isinstance(answer.parsed_output, Kind)


def test_ollamas_format_is_a_schema(server: RunningServer) -> None:
    ollama = pytest.importorskip("ollama", reason="the ollama client is not installed")
    client = ollama.Client(host=server.url, headers=HEADERS)
    answer = client.chat("tiny", HI, format=Kind.model_json_schema(), options={"num_predict": 1500})
    generated = client.generate("tiny", "a", format=Kind.model_json_schema(), options={"num_predict": 1500})
    for text in (answer.message.content, generated.response):
        assert isinstance(Kind.model_validate_json(text), Kind)


@pytest.mark.parametrize("path", BODIES)
def test_each_request_has_one_log_line_and_is_counted(server: RunningServer, path: str) -> None:
    name = f"line{path.replace('/', '-')}"
    before = server.metric("potstill:request_success_total")
    answer = httpx.post(server.url + path, json=BODIES[path], headers=HEADERS | {"X-Request-Id": name}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == name
    server.wait_for("potstill:request_success_total", before + 1)
    [line] = [text for text in server.log.read_text().splitlines() if name in text]
    assert f"POST {path} 200" in line and "key=key1 model=tiny" in line and "finish=" in line
    text = httpx.get(f"{server.url}/metrics", timeout=20).text
    assert f'potstill:http_requests_total{{model_name="tiny",route="{path}",status="200"}}' in text


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/responses", {"max_output_tokens": 1900}),
        ("/v1/messages", {"max_tokens": 1900}),
        ("/api/chat", {"options": {"num_predict": 1900}}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(
    server: RunningServer, path: str, more: dict[str, Any], stream: bool
) -> None:
    body = BODIES[path] | more | {"stream": stream}
    try:
        with httpx.stream("POST", server.url + path, json=body, headers=HEADERS, timeout=0.5) as answer:
            next(answer.iter_bytes())
    except httpx.ReadTimeout:
        assert not stream
    deadline = time.monotonic() + 5
    while httpx.get(f"{server.url}/load", headers=HEADERS, timeout=20).json()["server_load"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.wait_for("potstill:num_requests_running", 0)


@pytest.mark.parametrize("path", BODIES)
def test_the_limits_of_chat_hold_in_each_protocol(server: RunningServer, path: str) -> None:
    """A body that is too large, that is no JSON, a wrong key, and a wrong method: each in the protocol's own shape."""
    sent: list[tuple[int, dict[str, Any]]] = [
        (413, {"content": b'{"a": "' + b"x" * 5_000_000 + b'"}', "headers": HEADERS}),
        (400, {"content": b"{", "headers": HEADERS}),
        (401, {"content": b"{}", "headers": {}}),
    ]
    for status, settings in sent:
        settings["headers"] = settings["headers"] | {"Content-Type": "application/json"}
        check_shape(path, httpx.post(server.url + path, timeout=30, **settings), status)
    check_shape(path, httpx.get(server.url + path, headers=HEADERS, timeout=30), 405)


def check_shape(path: str, answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status
    body = answer.json()
    if path.startswith("/api/"):
        assert list(body) == ["error"] and isinstance(body["error"], str)
    elif path == "/v1/messages":
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}


def test_adapters_and_other_names_are_known_everywhere(tmp_path: Path) -> None:
    options = [*OPTIONS[:-1], "first", "second"]
    with running_server(save_tiny_folder(tmp_path / "model"), tmp_path / "log", *options) as server:
        for path, body in BODIES.items():
            answer = httpx.post(server.url + path, json=body | {"model": "second"}, timeout=60)
            assert answer.status_code == 200 and answer.json()["model"] == "first"
            assert httpx.post(server.url + path, json=body | {"model": "third"}, timeout=60).status_code == 404
        names = [model["name"] for model in httpx.get(f"{server.url}/api/tags", timeout=20).json()["models"]]
        assert names == ["first", "second"]
