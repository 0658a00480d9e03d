"""What operators see of requests: one log line each, percentiles, throughput and cost."""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serve.http import load, metrics
from serve.http.metrics import Latencies, Metrics
from serve.http.middleware import Middleware
from serve.logs import FORMAT, OneLine
from serve.outputs import EngineStats
from tests.serve.http_server import SCRIPTED, RunningServer, running_server, save_tiny_folder
from tests.serve.test_closed_doors import asked as status_of

KEYS = ("first-secret", "second-secret")
STEP_S, SLOW = 0.02, [20]
PRICE = 3.6
"""An hour; a second costs a thousandth."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("log") / "model")


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[RunningServer]:
    keys = [f"--api-key={key}" for key in KEYS]
    options = [*keys, "--served-model-name", "tiny", "--price-per-hour", str(PRICE)]
    with running_server(folder, tmp_path / "log", *options, program=SCRIPTED) as running:
        yield running


def ask(server: RunningServer, number: int, prompt: Any, max_tokens: int = 3, **fields: Any) -> httpx.Response:
    """Under a request id that is this number."""
    with asked(server, number, prompt, max_tokens, **fields) as answer:
        answer.read()
        return answer


@contextmanager
def asked(server: RunningServer, number: int, prompt: Any, max_tokens: int, **fields: Any) -> Iterator[httpx.Response]:
    """A response that has begun."""
    body = {"prompt": prompt, "max_tokens": max_tokens} | fields
    headers = {"Authorization": f"Bearer {KEYS[number % 2]}", "X-Request-Id": f"request-{number}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=30) as answer:
        yield answer


def line_of(server: RunningServer, number: int) -> tuple[str, dict[str, str]]:
    """The one line about a request: method, route and status, and what is said under names."""
    deadline = time.monotonic() + 5
    while not (lines := [text for text in server.log.read_text().splitlines() if f"id=request-{number} " in text]):
        assert time.monotonic() < deadline, "there is no line"
        time.sleep(0.01)
    [line] = lines
    return line.partition("server: ")[2].partition(" ms")[0].rpartition(" ")[0], dict(re.findall(r"(\S+)=(\S+)", line))


def test_a_line_says_who_asked_what_it_took_and_how_it_finished(server: RunningServer) -> None:
    assert ask(server, 0, [SLOW, SLOW], max_tokens=5, n=2).status_code == 200
    request, said = line_of(server, 0)
    assert request == "POST /v1/completions 200"
    assert {name: said[name] for name in ("key", "model", "prompt", "completion", "finish")} == {
        "key": "key1", "model": "tiny", "prompt": "2", "completion": "20", "finish": "length",
    }  # fmt: skip
    assert 0 <= float(said["queue_ms"]) < float(said["ttft_ms"]) < 1000
    assert 1000 * STEP_S * 0.9 < float(said["tpot_ms"]) < 1000 * STEP_S * 3
    assert ask(server, 1, "one two", stream=True).status_code == 200
    assert line_of(server, 1)[1]["key"] == "key2"
    assert not any(key in server.log.read_text() for key in KEYS)


def test_what_is_refused_has_a_line_too(server: RunningServer) -> None:
    assert ask(server, 0, "x" * 400_000).status_code == 400
    request, said = line_of(server, 0)
    assert request == "POST /v1/completions 400"
    assert (said["completion"], said["ttft_ms"], said["finish"]) == ("0", "-", "context_length_exceeded")


def test_a_stream_that_died_is_not_a_success(server: RunningServer) -> None:
    """They all began with status 200."""
    with asked(server, 2, SLOW, 1000, stream=True) as answer:
        assert answer.status_code == 200
    assert line_of(server, 2)[0].endswith("499") and line_of(server, 2)[1]["finish"] == "client_left"

    assert ask(server, 3, SLOW, 1000, stream=True, deadline_s=0.3).status_code == 200
    request, said = line_of(server, 3)
    assert request.endswith("504") and said["finish"] == "deadline_exceeded"
    assert 5 < int(said["completion"]) < 1000

    [engine] = server.engine_pids()
    with asked(server, 4, SLOW, 1000, stream=True) as answer:
        os.kill(engine, signal.SIGKILL)
        assert answer.status_code == 200 and "engine_died" in answer.read().decode()
    assert line_of(server, 4)[0].endswith("503") and line_of(server, 4)[1]["finish"] == "engine_died"

    text = httpx.get(f"{server.url}/metrics").text
    counts = dict(re.findall(r'potstill:http_requests_total{[^}]*completions",status="(\d+)"} (\S+)', text))
    assert counts == {"499": "1.0", "504": "1.0", "503": "1.0"}
    reasons = dict(re.findall(r'potstill:request_success_total{finished_reason="(\w+)"[^}]*} (\S+)', text))
    assert reasons == {"stop": "0.0", "length": "0.0", "abort": "1.0", "deadline": "1.0", "error": "1.0"}


def test_load_says_how_long_requests_took_lately(server: RunningServer) -> None:
    def current() -> Any:
        answer = httpx.get(f"{server.url}/load", headers={"Authorization": f"Bearer {KEYS[0]}"})
        assert answer.status_code == 200
        return answer.json()

    before = current()
    assert before["ttft_s"] is before["tpot_s"] is before["e2e_s"] is before["cost_per_million_tokens"] is None
    for number in range(10):
        assert ask(server, number, SLOW, 6).status_code == 200
    now = current()
    assert (now["num_finished"], now["server_load"], now["num_requests_running"]) == (10, 0, 0)
    assert STEP_S <= now["ttft_s"]["p50"] <= now["ttft_s"]["p99"] < now["e2e_s"]["p50"] + STEP_S
    assert STEP_S * 0.9 < now["tpot_s"]["p50"] < 3 * STEP_S
    assert 6 * STEP_S <= now["e2e_s"]["p50"] <= now["e2e_s"]["p90"] <= now["e2e_s"]["p99"] < 2
    cost = server.metric("potstill:cost_per_million_generation_tokens")
    assert cost == pytest.approx(1e6 * PRICE / 3600 / now["generated_tokens_per_s"], rel=0.2)
    assert now["cost_per_million_tokens"] == pytest.approx(cost, rel=0.2)


@pytest.mark.parametrize("count", [1, 2, 9, 100, 1001])
def test_percentiles_are_by_nearest_rank(count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count)
    expected = np.percentile(values, [50, 90, 99], method="inverted_cdf")
    assert load.percentiles(values.tolist()) == load.Percentiles(*expected.tolist())


def test_what_is_long_ago_no_longer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    measured = Metrics("m", price_per_hour=PRICE)
    measured.recent += [Latencies(now[0], 9.0, 9.0, 9.0), Latencies(now[0] + 200, 1.0, None, 2.0)]
    tokens = 0
    for second in range(1, 1001):
        now[0] = 1000.0 + second
        tokens += 50 if second <= 700 else 10
        measured.record_stats(EngineStats(num_generation_tokens=tokens))
        if second == 350:
            assert load.load_of(0, measured).ttft_s == load.Percentiles(1.0, 1.0, 1.0)
        if second in (600, 1000):
            rate = 50 if second == 600 else 10
            assert measured.throughput.tokens_per_s() == pytest.approx(rate, rel=0.01)
            assert measured.cost_per_million_tokens() == pytest.approx(1e6 * 0.001 / rate, rel=0.01)
    assert len(measured.throughput._samples) <= 62


def test_without_a_price_nothing_is_said_of_cost() -> None:
    measured = Metrics("m")
    measured.record_stats(EngineStats(num_generation_tokens=100))
    assert load.load_of(0, measured).cost_per_million_tokens is None
    assert b"cost_per" not in measured.expose()


DIED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 90_000},
    "/v1/responses": {"input": "x", "stream": True, "max_output_tokens": 90_000},
    "/v1/messages": {
        "model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 90_000,
    },
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 90_000}},
    "/api/generate": {"model": "tiny", "prompt": "x", "options": {"num_predict": 90_000}},
}  # fmt: skip


def test_streams_of_every_protocol_die_alike(server: RunningServer) -> None:
    with ExitStack() as streams:
        for number, (path, body) in enumerate(DIED.items()):
            headers = {"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": f"request-{number}"}
            stream = httpx.stream("POST", f"{server.url}{path}", json=body, headers=headers, timeout=30)
            answer = streams.enter_context(stream)
            assert answer.status_code == 200, path
        [engine] = server.engine_pids()
        os.kill(engine, signal.SIGKILL)
        for number, path in enumerate(DIED):
            request, said = line_of(server, number)
            assert (request, said["finish"]) == (f"POST {path} 503", "engine_died")


@pytest.mark.parametrize("line", ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"], ids=ascii)
def test_a_record_is_one_line_whatever_it_holds(line: str) -> None:
    try:
        raise ValueError(f"of a prompt{line}2026-01-01 00:00:00,000 ERROR potstill.server: forged")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord(
        "potstill.engine", logging.ERROR, "engine.py", 1, "request %s failed", (f"a{line}b",), error
    )
    written = OneLine(FORMAT).format(record)
    assert len(written.splitlines()) == 1 and "forged" in written and "request a | b failed" in written


def test_an_unexpected_error_is_logged_by_its_place_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What it says may quote a prompt."""

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a canary was in the prompt")

    app = Middleware(failing, accounts=[], metrics=Metrics("m"), routes=("/health",), error_bodies={})
    with caplog.at_level(logging.DEBUG):
        assert status_of(app, "/health", {}) == 500
    assert "ValueError at" in caplog.text and Path(__file__).name in caplog.text and "canary" not in caplog.text
