"""Bytes that nobody meant: requests with bytes changed, cut out, doubled and put in. None is a 5xx, none ends anything.

Seeded; the first answer that breaks the promise names the bytes that were sent.
"""

import json
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve.http.errors import ApiError
from serve.http.options import RequestLimits
from serve.http.requests import ChatRequest, CompletionRequest
from serve.http.routes import parse
from tests.serve.http_server import SCRIPTED, RunningServer, running_server, save_tiny_folder
from tests.trials import trials

COMPLETION = {"prompt": [1], "max_tokens": 2, "logit_bias": {"5": 1.5}, "stop": ["a", "\u00e9"], "n": 1, "seed": None}
CHAT = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "ho"}],
    "max_tokens": 2,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}
BODIES = [json.dumps(body).encode() for body in (COMPLETION, CHAT)]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
REQUESTS = [
    b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(BODIES[0]), BODIES[0]),
    b"%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (HEAD, len(BODIES[0]), BODIES[0]),
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: abc\r\n\r\n",
    b"OPTIONS /tokenize?a=%20b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept: */*\r\n\r\n",
]
NASTY = [
    *(b"\x00", b"\r", b"\n", b"\r\n\r\n", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"NaN", b"1e999", b"-0", b"9" * 400),
    *(
        b"[" * 60,
        b"{}",
        b"null",
        b'"',
        b"\\",
        b",",
        b":",
        b" " * 300,
        b"Content-Length: 5\r\n",
        b"0\r\n\r\n",
        b"%00",
        b"true",
    ),
    *(b"Transfer-Encoding: chunked\r\n", b"HTTP/9.9", b"../", b"Expect: 100-continue\r\n", b"-1", b"2147483648"),
]


def mutated(draw: random.Random, data: bytes) -> bytes:
    """One to four changes of bytes, at places drawn."""
    for _ in range(draw.randint(1, 4)):
        begin = draw.randrange(len(data) + 1)
        end = min(begin + draw.choice((0, 1, 2, 8, 40)), len(data))
        new = draw.choice((b"", bytes([draw.randrange(256)]), data[begin:end] * 2, draw.choice(NASTY)))
        data = data[:begin] + new + data[end:]
    return data


def test_no_body_raises_anything_but_a_refusal() -> None:
    draw, limits, num_taken = random.Random(6), RequestLimits(), 0
    for number in range(trials(3000, 100_000)):
        body = mutated(draw, BODIES[number % 2])
        try:
            parse(body, (CompletionRequest, ChatRequest)[number % 2], limits)
            num_taken += 1
        except ApiError as error:
            assert 400 <= error.status < 500, body
            str(error).encode()
    assert num_taken > 0.01 * trials(3000, 100_000), "else nothing but JSON itself is tried"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("mutations") / "model"
    with running_server(save_tiny_folder(folder), folder.parent / "log", program=SCRIPTED) as running:
        yield running


def answered(server: RunningServer, request: bytes) -> bytes:
    """All that is said to these bytes when nothing comes behind them."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65_536), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""


def test_no_request_is_a_5xx_or_hangs(server: RunningServer) -> None:
    engine, draw, statuses = server.engine_pids(), random.Random(8), set()
    for number in range(trials(300, 20_000)):
        request = mutated(draw, REQUESTS[number % len(REQUESTS)])
        found = {int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answered(server, request))}
        assert all(status < 500 for status in found), request
        statuses |= found
    assert {200, 400} <= statuses
    assert server.engine_pids() == engine and httpx.get(f"{server.url}/health").status_code == 200
    server.wait_for("potstill:num_requests_running", 0.0)
