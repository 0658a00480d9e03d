"""Promises about time, kills and clients that leave, in numbers: the part of them that takes seconds.

What is measured against a limit leaves room for a busy machine only where the text of an assertion says so.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.http_server import REAL, SCRIPTED, RunningServer, running_server, save_tiny_folder
from tests.trials import trials

STEP_S, STEPS_OF = 0.02, [20]
"""A step of the scripted engine, and the prompt that asks for it."""
Body = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("promises") / "model")


@contextlib.contextmanager
def scripted(folder: Path, tmp_path: Path, *options: str) -> Iterator[RunningServer]:
    with running_server(folder, tmp_path / "log", *options, program=SCRIPTED) as server:
        yield server


@contextlib.asynccontextmanager
async def client(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", limits=limits, timeout=60) as http:
        yield http


async def timed(http: httpx.AsyncClient, body: Body) -> tuple[httpx.Response, float]:
    """An answer, and after how many seconds it was whole."""
    began = time.monotonic()
    answer = await http.post("/completions", json=body)
    return answer, time.monotonic() - began


def is_idle(server: RunningServer) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    busy = [server.metric(f"potstill:{name}") for name in names]
    return not any(busy) and httpx.get(f"{server.url}/load").json()["server_load"] == 0


def test_three_hundred_who_leave_free_everything_and_disturb_nobody(folder: Path, tmp_path: Path) -> None:
    """Queued, in prefill, while decoding, at the last token; streams and whole responses; a real engine."""
    neighbour = {"prompt": list(range(5, 25)), "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    draw = random.Random(7)

    async def leave(http: httpx.AsyncClient, number: int) -> None:
        streamed, length = bool(number % 2), draw.choice((5, 400))
        num_tokens = draw.choice((1, 5, 90))
        prompt = [draw.randrange(5, 300) for _ in range(length)]
        body = {"prompt": prompt, "max_tokens": num_tokens, "stream": streamed, "ignore_eos": True, "n": 1 + number % 2}
        with contextlib.suppress(TimeoutError, httpx.TransportError):
            async with asyncio.timeout(draw.uniform(0.005, 0.3)):
                async with http.stream("POST", "/completions", json=body) as answer:
                    async for _ in answer.aiter_raw():
                        if number % 4 == 1:
                            return

    async def storm(server: RunningServer) -> list[httpx.Response]:
        async with client(server) as http, client(server) as other:
            alone, _ = await timed(other, neighbour)
            staying = [asyncio.create_task(timed(other, neighbour)) for _ in range(2)]
            for first in range(0, 300, 30):
                await asyncio.gather(*(leave(http, first + number) for number in range(30)))
            return [alone, *[answer for answer, _ in await asyncio.gather(*staying)]]

    options = ["--max-num-seqs", "4", "--max-queue", "64", "--dtype", "float32", "--max-num-batched-tokens", "64"]
    with running_server(folder, tmp_path / "log", *options, program=REAL) as server:
        alone, *others = asyncio.run(storm(server))
        ended = time.monotonic()
        while not is_idle(server):
            assert time.monotonic() - ended < 1
        for answer in others:
            assert answer.status_code == 200 and answer.json()["choices"] == alone.json()["choices"]
        assert server.metric("potstill:engine_restarts_total") == 0


def test_slow_readers_hurt_only_themselves(folder: Path, tmp_path: Path) -> None:
    """They read no more than twelve bytes of streams that give 1.6 MiB a second, beyond what sockets buffer."""
    normal = {"prompt": STEPS_OF, "max_tokens": 15}

    def slow_reader(server: RunningServer) -> socket.socket:
        body = json.dumps({"prompt": [20, 32], "max_tokens": 50_000, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        reader.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
        return reader

    async def typical_s(server: RunningServer) -> float:
        async with client(server) as http:
            answers = [await asyncio.gather(*(timed(http, normal) for _ in range(20))) for _ in range(trials(12, 60))]
        assert all(answer.status_code == 200 for batch in answers for answer, _ in batch)
        return statistics.median(took_s for batch in answers for _, took_s in batch)

    with scripted(folder, tmp_path, "--max-num-seqs", "128") as server:
        before_s = asyncio.run(typical_s(server))
        before_bytes = resident_bytes(server.process.pid)
        readers = [slow_reader(server) for _ in range(trials(20, 50))]
        try:
            for reader in readers:
                assert reader.recv(12) == b"HTTP/1.1 200"
            beside_s = asyncio.run(typical_s(server))
            assert resident_bytes(server.process.pid) - before_bytes < 64 * 2**20
        finally:
            for reader in readers:
                reader.close()
        assert beside_s < 2 * before_s, "room for what they are sent before they are given up"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_eight_times_too_much_is_answered_with_200_or_a_fast_429(folder: Path, tmp_path: Path) -> None:
    """An open loop: requests come at their times, whatever has become of those before."""
    num_seqs, num_tokens, queue_wait_s = 4, 10, 1.0
    capacity = num_seqs / (num_tokens * STEP_S)
    body = {"prompt": STEPS_OF, "max_tokens": num_tokens}

    async def open_loop(server: RunningServer) -> list[tuple[httpx.Response, float]]:
        async with client(server) as http:
            asking = []
            for _ in range(int(8 * capacity * trials(4, 60))):
                asking.append(asyncio.create_task(timed(http, body)))
                await asyncio.sleep(1 / (8 * capacity))
            return list(await asyncio.gather(*asking))

    options = ["--max-num-seqs", str(num_seqs), "--max-queue", "40", "--queue-wait-s", str(queue_wait_s)]
    with scripted(folder, tmp_path, *options) as server:
        answers = asyncio.run(open_loop(server))
        load = httpx.get(f"{server.url}/load").json()
    assert {answer.status_code for answer, _ in answers} == {200, 429}
    refused = [(answer, took_s) for answer, took_s in answers if answer.status_code == 429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer, _ in refused)
    at_once = sorted(took_s for answer, took_s in refused if "queue is full" in answer.text)
    assert at_once[len(at_once) * 99 // 100] < 0.2
    assert load["ttft_s"]["p90"] < queue_wait_s + 0.2


def test_deadlines_hold_queued_or_running(folder: Path, tmp_path: Path) -> None:
    """By the server's own clock, and no later than timers of this process: what a busy machine adds is seen on them."""
    draw, step_s, overslept_s = random.Random(3), 0.05, [0.0]
    number_of = trials(40, 200)
    deadlines_s = [draw.uniform(0.05, trials(2, 5)) for _ in range(number_of)]

    async def ask(http: httpx.AsyncClient, number: int) -> httpx.Response:
        body = {"prompt": [50], "max_tokens": 10_000, "stream": bool(number % 2)}
        headers = {"X-Request-Id": f"request-{number}"}
        return await http.post("/completions", json=body | {"deadline_s": deadlines_s[number]}, headers=headers)

    async def oversleep() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(step_s)
            overslept_s.append(time.monotonic() - began - step_s)

    async def all_at_once(server: RunningServer) -> list[httpx.Response]:
        timers = asyncio.create_task(oversleep())
        async with client(server) as http:
            answers = list(await asyncio.gather(*(ask(http, number) for number in range(number_of))))
        timers.cancel()
        return answers

    with scripted(folder, tmp_path, "--max-num-seqs", "8", "--max-queue", "200") as server:
        answers = asyncio.run(all_at_once(server))
        server.wait_for("potstill:num_requests_running", 0, timeout_s=1)
        server.wait_for("potstill:num_requests_waiting", 0, timeout_s=1)
        took_ms = re.findall(r" 504 (\d+) ms id=request-(\d+) .*finish=deadline_exceeded", server.log.read_text())
    assert all("deadline_exceeded" in answer.text for answer in answers)
    late_s = [int(took) / 1000 - deadlines_s[int(number)] for took, number in took_ms]
    assert len(late_s) == number_of and min(late_s) > -0.01
    assert statistics.median(late_s) < 0.1 + step_s + max(overslept_s)
    assert max(late_s) < 0.6 + max(overslept_s), "room for a busy machine"


@pytest.mark.parametrize("server_number", range(trials(1, 15)))
def test_killed_engines_cost_what_runs_and_ten_seconds(folder: Path, tmp_path: Path, server_number: int) -> None:
    """Twice, under eight streams, at no particular moment."""
    body = {"prompt": STEPS_OF, "max_tokens": 10_000, "stream": True}

    async def kill(server: RunningServer, after_s: float) -> list[tuple[httpx.Response, float]]:
        async with client(server) as http:
            asking = [asyncio.create_task(timed(http, body)) for _ in range(8)]
            await asyncio.sleep(after_s)
            os.kill(server.engine_pids()[0], signal.SIGKILL)
            killed = time.monotonic()
            answers = await asyncio.gather(*asking)
            assert time.monotonic() - killed < 2
            return list(answers)

    with scripted(folder, tmp_path) as server:
        for after_s in (0.03 + 0.05 * server_number, 0.41):
            answers = asyncio.run(kill(server, after_s))
            killed = time.monotonic()
            assert all("engine_died" in answer.text for answer, _ in answers)
            assert httpx.get(f"{server.url}/health").status_code == 503
            server.wait_healthy(10)
            assert time.monotonic() - killed < 10 and is_idle(server)
        assert server.metric("potstill:engine_restarts_total") == 2


@pytest.mark.parametrize("time_number", range(trials(1, 30)))
def test_sigterm_lets_thirty_two_streams_finish(folder: Path, tmp_path: Path, time_number: int) -> None:
    body = {"prompt": STEPS_OF, "max_tokens": 50, "stream": True}

    async def stop(server: RunningServer) -> tuple[list[httpx.Response], httpx.Response]:
        async with client(server) as http:
            running = [asyncio.create_task(timed(http, body)) for _ in range(32)]
            await asyncio.to_thread(server.wait_for, "potstill:num_requests_running", 32)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            refused, _ = await timed(http, body)
            return [answer for answer, _ in await asyncio.gather(*running)], refused

    with scripted(folder, tmp_path, "--drain-s", "10") as server:
        finished, refused = asyncio.run(stop(server))
        assert server.process.wait(2) == 0
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert all(answer.text.count("\ndata: ") == 50 and '"finish_reason":"length"' in answer.text for answer in finished)
