"""Packed bodies, and which pages in a browser may call: a bomb is refused early, a stranger's page learns nothing."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.http.errors import ApiError
from serve.http.options import ServerOptions
from serve.http.routes import unpacked
from tests.serve.http_server import SCRIPTED, RunningServer, running_server, save_tiny_folder
from tests.serve.test_options import parsed

GOOD = {"prompt": [1], "max_tokens": 2}
FRIEND, STRANGER = "https://page.example", "https://other.example"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("bodies") / "model")


@pytest.fixture(scope="module")
def closed(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, folder.parent / "log", "--max-body-bytes", "1M", program=SCRIPTED) as server:
        yield server


@pytest.fixture(scope="module")
def friendly(folder: Path) -> Iterator[RunningServer]:
    options = ["--allowed-origins", json.dumps([FRIEND]), "--api-key", "k"]
    with running_server(folder, folder.parent / "log2", *options, program=SCRIPTED) as server:
        yield server


# Packed bodies


def post(server: RunningServer, body: bytes, encoding: str) -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=20)


def test_packed_bodies_are_read(closed: RunningServer) -> None:
    body = json.dumps(GOOD).encode()
    assert post(closed, gzip.compress(body), "gzip").json()["usage"]["completion_tokens"] == 2
    assert post(closed, gzip.compress(body), "GZIP").status_code == 200
    assert post(closed, body, "identity").status_code == 200
    large = json.dumps(GOOD | {"user": "u" * 500, "prompt": [1] * 99_000}).encode()
    assert post(closed, gzip.compress(large), "gzip").status_code == 200


JSON = json.dumps(GOOD).encode()
# Named, not by their bytes: gzip writes the time into them, and each worker of a run has to collect the same names.
REFUSED = {
    "a megabyte of blanks": (gzip.compress(b" " * 2**20 + b"{}"), "gzip", 413),
    "a bomb": (gzip.compress(bytes(2**28), 9), "gzip", 413),
    "cut short": (gzip.compress(JSON)[:-4], "gzip", 400),
    "more behind it": (gzip.compress(JSON) + b"x", "gzip", 400),
    "not packed": (JSON, "gzip", 400),
    "nothing": (b"", "gzip", 400),
    "zlib as gzip": (zlib.compress(JSON), "gzip", 400),
    "deflate": (zlib.compress(JSON), "deflate", 415),
    "brotli": (JSON, "br", 415),
    "packed twice": (gzip.compress(gzip.compress(JSON)), "gzip, gzip", 415),
}


@pytest.mark.parametrize(("body", "encoding", "status"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_unpacked_is_refused(closed: RunningServer, body: bytes, encoding: str, status: int) -> None:
    answer = post(closed, body, encoding)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_no_more_is_unpacked_than_the_limit() -> None:
    bomb = gzip.compress(bytes(2**27), 9)
    tracemalloc.start()
    with pytest.raises(ApiError) as caught:
        unpacked(bomb, 2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.status == 413
    assert peak < 2**22
    assert unpacked(gzip.compress(bytes(2**20)), 2**20) == bytes(2**20)


# Browsers


def preflight(server: RunningServer, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    return httpx.options(f"{server.url}/v1/chat/completions", headers=headers)


def test_pages_of_named_origins_may_call_and_read(friendly: RunningServer) -> None:
    asked = preflight(friendly, FRIEND)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == FRIEND
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in asked.headers
    for key, status in (("k", 200), ("wrong", 401)):  # errors can be read, too
        headers = {"Origin": FRIEND, "Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{friendly.url}/v1/completions", json=GOOD | {"stream": True}, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == FRIEND
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


def test_others_may_not(friendly: RunningServer, closed: RunningServer) -> None:
    assert preflight(friendly, STRANGER).status_code == 400
    for server, origin in ((friendly, STRANGER), (closed, FRIEND)):
        assert "access-control-allow-origin" not in preflight(server, origin).headers
        headers = {"Origin": origin, "Authorization": "Bearer k"}
        answer = httpx.post(f"{server.url}/v1/completions", json=GOOD, headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    # What a page may send anywhere without asking first is not read.
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"Origin": STRANGER, "Content-Type": content_type}
        refused = httpx.post(f"{closed.url}/v1/completions", content=json.dumps(GOOD), headers=headers)
        assert refused.status_code == 400


def test_origins_are_a_json_list_on_the_command_line_and_a_list_in_a_file(tmp_path: Path) -> None:
    def allowed(options: ServerOptions) -> tuple[Any, ...]:
        return options.allowed_origins, options.allowed_methods, options.allowed_headers, options.allow_credentials

    words = ["--allowed-origins", '["a", "b"]', "--allowed-methods", '["GET"]', "--allow-credentials"]
    assert allowed(parsed("m", *words)) == (("a", "b"), ("GET",), ("*",), True)
    (tmp_path / "serve.yaml").write_text("allowed-origins: [a, b]\nallowed-methods: [GET]\nallow-credentials: true\n")
    assert allowed(parsed("m", "--config", str(tmp_path / "serve.yaml"))) == (("a", "b"), ("GET",), ("*",), True)
    for text in ("*", '"*"', "[1]", "{}"):
        with pytest.raises(SystemExit):
            parsed("m", "--allowed-origins", text)
    with pytest.raises(ValueError, match="allow_credentials needs origins by name"):
        parsed("m", "--allowed-origins", '["*"]', "--allow-credentials")
