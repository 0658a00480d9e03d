"""Requests that must be refused, over the wire: malformed, too large, without a key. The server lives on."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.http_server import ROOT, SCRIPTED, RunningServer, children_of, running_server, save_tiny_folder

KEYS = ("first-key-of-the-test", "second-key")
CANARY = "canary-7d1f"
GOOD = {"prompt": [1], "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("requests") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    keys = [word for key in KEYS for word in ("--api-key", key)]
    log = folder.parent / "server.log"
    options = ["--served-model-name", "tiny", "also", "--max-body-bytes", "1M", *keys]
    with running_server(folder, log, *options, program=SCRIPTED) as running:
        running.api_key = KEYS[0]
        yield running
        text = log.read_text()
    assert CANARY not in text, "a prompt was logged"
    assert not any(key in text for key in KEYS), "a key was logged"
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S+: ", line) for line in text.splitlines())


def post(server: RunningServer, path: str, body: bytes | Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    base = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[0]}"}
    return httpx.post(server.url + path, content=content, headers=base | headers, timeout=20)


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """OpenAI's error body, and a server that still works."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["code"]
    assert answer.headers["x-request-id"]
    return error


def with_prompt(fields: str) -> bytes:
    return b'{"prompt": "' + CANARY.encode() + b'", ' + fields.encode() + b"}"


MALFORMED: list[tuple[str, bytes]] = [
    ("/v1/completions", body)
    for body in (
        b"",
        b"null",
        b"7",
        b"[]",
        b'"text"',
        b"{",
        b"{}",
        b"\x00",
        b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"prompt": "x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        rb'{"prompt": "\ud800"}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a"} trailing',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b"[" * 33 + b"]" * 33 + b"}",
        b'{"prompt": []}',
        b'{"prompt": ""}',
        b'{"prompt": [[]]}',
        b'{"prompt": [[1], []]}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [512]}',
        b'{"prompt": [[1], [512]]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [1.0]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": [7]}',  # the engine itself refuses this one
        with_prompt('"max_tokens": 0'),
        with_prompt('"max_tokens": -1'),
        with_prompt('"max_tokens": 1.5'),
        with_prompt('"max_tokens": "5"'),
        with_prompt('"max_tokens": ' + "9" * 100_000),
        with_prompt('"max_tokens": 100000'),
        with_prompt('"temperature": NaN'),
        with_prompt('"temperature": Infinity'),
        with_prompt('"temperature": 1e400'),
        with_prompt('"temperature": -1'),
        with_prompt('"temperature": true'),
        with_prompt('"top_p": 0'),
        with_prompt('"n": 0'),
        with_prompt('"n": 16385'),
        with_prompt('"logprobs": 21'),
        with_prompt('"logit_bias": {"512": 1}'),
        with_prompt('"logit_bias": {"5.0": 1}'),
        with_prompt('"logit_bias": {"5": "1"}'),
        with_prompt('"logit_bias": {"5": 1, "5": 2}'),
        with_prompt('"stop": [1]'),
        with_prompt('"stop": ["a", "b", "c", "d", "e"]'),
        with_prompt('"stop": "' + "a" * 1025 + '"'),
        with_prompt('"stop_token_ids": [512]'),
        with_prompt('"min_tokens": 5, "max_tokens": 4'),
        with_prompt('"seed": 1e3'),
        with_prompt('"suffix": "x"'),
        with_prompt('"best_of": 2'),
        with_prompt('"unheard_of": 0'),
        with_prompt('"stream": 1'),
        with_prompt('"stream_options": {}'),
        with_prompt('"stream": true, "stream_options": {"x": 1}'),
        with_prompt('"stream": true, "unheard_of": 1'),
    )
] + [
    ("/v1/chat/completions", body)
    for body in (
        b"{}",
        b'{"prompt": "a"}',
        b'{"messages": []}',
        b'{"messages": [{}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0}',
        b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}',
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1}}',
        b'{"messages": [{"role": "user", "content": "a"}], "continue_final_message": true}',
    )
]


@pytest.mark.parametrize(("path", "body"), MALFORMED, ids=[f"{number}" for number in range(len(MALFORMED))])
def test_malformed_requests_get_400(server: RunningServer, path: str, body: bytes) -> None:
    error = check_error(post(server, path, body), 400)
    assert error["type"] == "invalid_request_error"
    assert CANARY not in error["message"]


def test_the_server_and_its_engine_outlive_all_of_them(server: RunningServer) -> None:
    engine = children_of(server.process.pid)
    for path, body in MALFORMED:
        post(server, path, body)
    assert children_of(server.process.pid) == engine
    assert post(server, "/v1/completions", GOOD).status_code == 200
    assert server.metric("potstill:num_requests_running") == 0
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_the_message_names_the_field(server: RunningServer) -> None:
    for fields, param in (
        ({"unheard_of": 1}, "unheard_of"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 16385}, "n"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"min_tokens": 3}, "min_tokens"),
    ):
        error = check_error(post(server, "/v1/completions", GOOD | fields), 400)
        assert error["param"] == param
        assert param in error["message"]


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_only_json_is_read(server: RunningServer, content_type: str) -> None:
    answer = post(server, "/v1/completions", GOOD, **{"Content-Type": content_type})
    assert check_error(answer, 400)["param"] == "Content-Type"


def test_charset_parameters_are_no_obstacle(server: RunningServer) -> None:
    answer = post(server, "/v1/completions", GOOD, **{"Content-Type": "application/json; charset=utf-8"})
    assert answer.status_code == 200


def test_paths_and_methods(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEYS[0]}"}) as http:
        check_error(http.get("/nothing/here"), 404)
        check_error(http.get("/v1/completions"), 405)
        assert http.get("/v1/completions").headers["allow"] == "POST"
        check_error(http.delete("/v1/models"), 405)
        check_error(http.post("/v1/completions/", json=GOOD), 404)
        assert http.get("/version").json() == {"version": "0.1.0"}
        assert http.get("/ping").status_code == 200
        assert http.post("/ping").status_code == 200
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny", "also"]


def test_a_body_over_one_mebibyte_is_refused_while_reading(server: RunningServer) -> None:
    at_limit = b'{"prompt": "' + b"a" * (2**20 - 14) + b'"}'
    assert len(at_limit) == 2**20
    assert post(server, "/v1/completions", at_limit).json()["error"]["code"] == "context_length_exceeded"
    check_error(post(server, "/v1/completions", at_limit + b" "), 413)
    address = server.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEYS[0]}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
        connection.sendall(head.encode())
        for _ in range(17):
            connection.sendall(b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /load HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
        b"GET /load HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100_000,
    ],
    ids=lambda value: repr(value[:40]),
)
def test_bytes_that_are_not_http(server: RunningServer, request_bytes: bytes) -> None:
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while portion := connection.recv(65536):
                answer += portion
        except ConnectionResetError:
            pass
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
    if answer.startswith(b"HTTP/1.1 400"):
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_value"
    assert httpx.get(f"{server.url}/health").status_code == 200


WRONG_KEYS: list[dict[str, str]] = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": KEYS[0]},
    {"Authorization": f"Basic {KEYS[0]}"},
    {"Authorization": f"Bearer {KEYS[0][:-1]}"},
    {"Authorization": f"Bearer {KEYS[0]}x"},
    {"Authorization": f"Bearer {KEYS[0]},{KEYS[1]}"},
    {"Authorization": f"Bearer  {KEYS[0]}"},
    {"Authorization": f"Bearer {KEYS[0].upper()}"},
    {"X-Api-Key": KEYS[0][:-1]},
    {"X-Api-Key": KEYS[0], "Authorization": f"Bearer {KEYS[0]}"},
    {"Cookie": f"key={KEYS[0]}"},
    {"Host": "localhost", "X-Forwarded-For": "127.0.0.1"},
    {"Authorization": "Bearer " + "k" * 15_000},
]


@pytest.mark.parametrize("headers", WRONG_KEYS, ids=str)
def test_without_a_right_key_everything_is_closed(server: RunningServer, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=server.url, headers=headers) as http:
        for path in ("/v1/models", "/version", "/load", "/nothing", "//health", "/health/", "/metrics/x", "/docs/x"):
            error = check_error(http.get(server.url + path), 401)  # whole, or httpx reads //health as a host
            assert error["code"] == "invalid_api_key"
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            check_error(http.post(path, json=GOOD), 401)
        for path in ("/health", "/ping", "/metrics", "/docs", "/openapi.json"):
            assert http.get(path).status_code == 200


def test_two_authorization_headers_are_none(server: RunningServer) -> None:
    headers = [("Authorization", f"Bearer {KEYS[0]}"), ("Authorization", "Bearer x")]
    check_error(httpx.get(f"{server.url}/version", headers=headers), 401)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(server: RunningServer, key: str) -> None:
    assert server.client(api_key=key).models.list().data
    for headers in ({"Authorization": f"bearer {key}"}, {"X-Api-Key": key}):
        assert httpx.get(f"{server.url}/version", headers=headers).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="other").models.list()


def test_request_ids_are_echoed_when_they_are_harmless(server: RunningServer) -> None:
    def echoed(value: str | bytes) -> str:
        return httpx.get(f"{server.url}/health", headers=[("X-Request-Id", value)]).headers["x-request-id"]

    assert echoed("abc-1.2:3_4") == "abc-1.2:3_4"
    for value in ("a b", "x" * 129, "a\tb", "", "é".encode(), "<script>"):
        assert re.fullmatch(r"[0-9a-f]{32}", echoed(value))


def test_strange_paths_make_no_new_metric(server: RunningServer) -> None:
    def series() -> int:
        return len(httpx.get(f"{server.url}/metrics").text.splitlines())

    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=server.url, headers=headers) as http:

        def ask(number: int) -> None:
            assert http.get(f"/path-{number}").status_code == 404
            assert http.post("/v1/completions", json=GOOD | {"model": f"m{number}"}).status_code == 404

        ask(0)  # the first of each kind has series of its own
        before = series()
        for number in range(1, 50):
            ask(number)
    assert series() <= before + 4


def test_the_http_process_needs_no_torch(folder: Path) -> None:
    code = "import sys, serve.http.server, model.text.tokenizer; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "transformers", "numpy"}


def test_logs_are_one_line_a_record_and_hold_no_prompt(server: RunningServer) -> None:
    """The fixture reads the whole log at the end; here is what must not be in it."""
    post(server, "/v1/completions", {"prompt": f"{CANARY}\nERROR fake: line", "max_tokens": 2})
    post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2})
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    httpx.get(f"{server.url}/{CANARY}%0aERROR%20fake", headers=headers | {"X-Request-Id": CANARY + " x"})
    time.sleep(0.1)
    assert "POST /v1/chat/completions 200" in server.log.read_text()
