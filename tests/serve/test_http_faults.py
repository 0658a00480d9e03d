"""What happens when clients, engine or operator are rough: with a scripted engine, so that every moment is chosen."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import ClientDisconnect
from uvicorn.server import ServerState

from serve.config import EngineConfig
from serve.http import connection, generation
from serve.http.engine_client import EngineClient
from serve.http.errors import ApiError
from serve.http.metrics import Metrics
from serve.http.options import ServerOptions
from serve.sampling_params import SamplingParams
from tests.serve.failing_device import FATAL_TOKEN
from tests.serve.http_server import (
    FAILING_DEVICE,
    ROOT,
    SCRIPTED,
    RunningServer,
    children_of,
    running_server,
    save_tiny_folder,
)
from tests.waiting import wait_until

SLOW, BIG, FATAL = [20], [2, 64], [1, 0, 1]
"""Prompts that script the engine: 20 ms a step; 2 ms and 64 KiB a token; death at the first step."""
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """Two places, two in the queue, half a second of patience."""
    options = ["--max-num-seqs", "2", "--max-queue", "2", "--queue-wait-s", "0.7", "--health-timeout-s", "0.4"]
    with running_server(folder, folder.parent / "shared.log", *options, program=SCRIPTED) as running:
        yield running


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Start:
    """Starts a server of the test's own."""
    return lambda *options, **settings: running_server(
        folder, tmp_path / "own.log", *options, program=SCRIPTED, **settings
    )


class Stream:
    """A streamed completion that is read when the test says so."""

    def __init__(self, server: RunningServer, prompt: list[int], max_tokens: int) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=30)
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self.answer = self._http.send(self._http.build_request("POST", "/v1/completions", json=body), stream=True)
        self._lines = self.answer.iter_lines()

    def first(self) -> "Stream":
        next(self._lines)
        return self

    def rest(self) -> list[Any]:
        data = [line.removeprefix("data: ") for line in self._lines if line]
        assert data[-1] == "[DONE]"
        return [json.loads(item) for item in data[:-1]]

    def close(self) -> None:
        self._http.close()


def ask(server: RunningServer, prompt: list[int], max_tokens: int = 1, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


# Overload


def test_a_full_queue_refuses_at_once_and_a_long_wait_ends(server: RunningServer) -> None:
    async def overload() -> tuple[list[httpx.Response], httpx.Response, float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:

            async def complete(max_tokens: int) -> httpx.Response:
                return await http.post("/v1/completions", json={"prompt": SLOW, "max_tokens": max_tokens})

            running = [asyncio.create_task(complete(80)) for _ in range(2)]
            await asyncio.sleep(0.2)
            queued = [asyncio.create_task(complete(1)) for _ in range(2)]
            await asyncio.sleep(0.2)
            began = time.monotonic()
            refused = await complete(1)
            took_s = time.monotonic() - began
            return await asyncio.gather(*running, *queued), refused, took_s

    (first, second, third, fourth), refused, took_s = asyncio.run(overload())
    assert (first.status_code, second.status_code) == (200, 200)
    assert took_s < 0.2
    for answer in (refused, third, fourth):
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    assert "queue is full" in refused.json()["error"]["message"]
    assert "waited 0.7 s" in third.json()["error"]["message"]
    assert server.metric("potstill:admission_rejections_total") == 3
    assert ask(server, [1]).status_code == 200
    assert server.metric("potstill:num_requests_waiting") == 0


def test_a_request_that_could_never_fit_is_told_so(server: RunningServer) -> None:
    answer = ask(server, [1], n=5)
    assert answer.status_code == 400
    assert "at most 4" in answer.json()["error"]["message"]


def test_a_deadline_ends_a_stream_with_an_error_event(server: RunningServer) -> None:
    body = {"prompt": SLOW, "max_tokens": 100, "stream": True, "deadline_s": 0.2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert ask(server, SLOW, 100, deadline_s=0.2).status_code == 504


# Slow and leaving clients


def test_a_reader_who_does_not_read_is_given_up(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": BIG, "max_tokens": 10_000, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        lazy.sendall(f"{head}\r\n\r\n{body}".encode())
        server.wait_for("potstill:num_requests_running", 1, timeout_s=5)
        rss_before = resident_bytes(server.process.pid)
        assert ask(server, SLOW, 5).status_code == 200
        server.wait_for("potstill:num_requests_running", 0, timeout_s=8)
        # 10,000 tokens would be 640 MiB.
        assert resident_bytes(server.process.pid) - rss_before < 64 * 2**20


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_client_who_makes_no_room_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SEND_S", 0.05)
    dropped: list[bool] = []

    async def never(message: Any) -> None:
        await asyncio.sleep(10)

    async def send() -> None:
        scope = {"state": {"drop_connection": lambda: dropped.append(True)}}
        await generation.send_in_time(scope, never, {"type": "http.response.body"})

    with pytest.raises(ClientDisconnect):
        asyncio.run(send())
    assert dropped == [True]


@pytest.mark.parametrize(
    ("head", "after_another"),
    [(b"", False), *itertools.product([b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"], [False, True])],
)
def test_a_head_that_never_ends_is_dropped(monkeypatch: pytest.MonkeyPatch, head: bytes, after_another: bool) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    async def connect() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: connection.HttpConnection(config, ServerState(), {}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        async with asyncio.timeout(3):  # less than uvicorn's limit for idle connections
            if after_another:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            writer.write(head)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        listener.close()

    asyncio.run(connect())


def test_a_connection_outlives_what_clients_keep(server: RunningServer) -> None:
    """httpx, so OpenAI's client, uses one again within 5 s: the server must not be about to close it then."""
    with httpx.Client(base_url=server.url, limits=httpx.Limits(keepalive_expiry=60)) as http:
        ports = []
        for wait_s in (0.0, 5.5):
            time.sleep(wait_s)
            answer = http.get("/health")
            ports.append(answer.extensions["network_stream"].get_extra_info("client_addr"))
    assert answer.status_code == 200 and ports[0] == ports[1]


@pytest.mark.parametrize("streamed", [True, False])
def test_whoever_leaves_takes_the_request_along(server: RunningServer, streamed: bool) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": [40], "max_tokens": 10_000, "stream": streamed, "n": 2},
            timeout=httpx.Timeout(0.02 if streamed else 0.3),
        )
    server.wait_for("potstill:num_requests_running", 0, timeout_s=1)
    assert httpx.get(f"{server.url}/load").json()["server_load"] == 0


# The engine


def test_health_notices_an_engine_that_hangs(server: RunningServer) -> None:
    [engine] = children_of(server.process.pid)
    os.kill(engine, signal.SIGSTOP)
    try:
        answer = httpx.get(f"{server.url}/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled")
        assert int(answer.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/metrics").status_code == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    server.wait_healthy(5)
    assert children_of(server.process.pid) == [engine]


def test_a_dying_engine_fails_its_requests_and_nothing_else(server: RunningServer) -> None:
    before = server.metric("potstill:engine_restarts_total")
    stream = Stream(server, SLOW, 1000).first()
    answer = ask(server, FATAL)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
    assert int(answer.headers["retry-after"]) > 0
    assert stream.rest()[-1]["error"]["code"] == "engine_died"
    server.wait_healthy(10)
    assert ask(server, [1], 3).json()["choices"][0]["text"] == "xxx"
    assert server.metric("potstill:engine_restarts_total") == before + 1


def test_a_failed_device_ends_the_engine_and_a_fresh_one_goes_on(folder: Path, tmp_path: Path) -> None:
    """A real engine, which must not take the failure for the fault of this request and of each one after it."""
    prompt = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
    with running_server(folder, tmp_path / "own.log", program=FAILING_DEVICE) as server:
        before = ask(server, **prompt)
        [failed] = server.engine_pids()
        stream = Stream(server, [5, 6], 1000).first()
        fatal = ask(server, [5, FATAL_TOKEN, 6])
        health = httpx.get(f"{server.url}/health")
        for answer in (fatal, health, ask(server, **prompt)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
        assert stream.rest()[-1]["error"]["code"] == "engine_died"
        server.wait_healthy()
        after = ask(server, **prompt)
        assert after.status_code == 200 and after.json()["choices"] == before.json()["choices"]
        assert failed not in server.engine_pids() and server.metric("potstill:engine_restarts_total") == 1


def test_a_request_that_is_still_being_tokenized_when_the_engine_dies_is_told() -> None:
    async def reserve_kill_submit() -> None:
        command = [sys.executable, str(Path(__file__).with_name("scripted_engine.py"))]
        options = ServerOptions(EngineConfig("none", max_num_seqs=1), ("m",), max_queue=1)
        client = EngineClient(options, Metrics("m"), command=command)
        before = set(children_of(os.getpid()))
        client.start()
        try:
            assert await client.wait_ready()
            assert await client.ping(5)
            [engine] = set(children_of(os.getpid())) - before
            with client.open_call(2) as call:
                os.kill(engine, signal.SIGKILL)
                while client.is_ready:
                    await asyncio.sleep(0.01)
                with pytest.raises(ApiError) as caught:
                    call.submit([[1], [2]], SamplingParams())
                assert (caught.value.status, caught.value.code) == (503, "engine_died")
                with pytest.raises(ApiError, match="fresh one is starting"):
                    client.open_call(1)
            assert (client.num_sequences, client.num_calls) == (0, 0)
        finally:
            await client.stop()

    asyncio.run(reserve_kill_submit())


def test_an_engine_that_keeps_dying_ends_the_server(start: Start) -> None:
    with start() as server:
        for _ in range(6):
            assert ask(server, FATAL).status_code == 503
            if server.process.poll() is None:
                wait_until(lambda: server.process.poll() is not None or is_healthy(server), 10)
        assert server.process.wait(10) == 1
        assert "the engine died 6 times within a minute" in server.log.read_text()


def is_healthy(server: RunningServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_model_that_cannot_be_loaded_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((folder / name).read_bytes())
    with running_server(broken, tmp_path / "log", program=SCRIPTED, ready=False) as server:
        assert server.process.wait(10) == 2
        assert server.log.read_text().splitlines()[-1] == "potstill: the model is broken on purpose"


def test_options_that_cannot_be_are_one_sentence(server: RunningServer, folder: Path) -> None:
    def refused(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "serve", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        return line

    port = server.url.rpartition(":")[2]
    assert refused("no/such/folder").startswith("potstill: There is no model at no/such/folder; ")
    taken = f"potstill: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port, or "
    assert refused(str(folder), "--port", port).startswith(taken)
    assert "--allow-unauthenticated" in refused(str(folder), "--host", "0.0.0.0")


# Stopping


def test_sigterm_lets_streams_finish(start: Start) -> None:
    with start("--drain-s", "10") as server:
        streams = [Stream(server, SLOW, 60).first() for _ in range(4)]
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = ask(server, [1])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/health").status_code == 503
        for stream in streams:
            events = stream.rest()
            assert len(events) == 59
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            stream.close()
        assert server.process.wait(3) == 0
        assert children_of(server.process.pid) == []


@pytest.mark.parametrize("hurry", [False, True])
def test_what_does_not_finish_in_time_is_told(start: Start, hurry: bool) -> None:
    """The end of drain_s, or a second signal; the stream would take five seconds."""
    with start("--drain-s", "30" if hurry else "0.5") as server:
        stream = Stream(server, SLOW, 250).first()
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        if hurry:
            time.sleep(0.2)
            server.process.send_signal(signal.SIGINT)
        last = stream.rest()[-1]
        assert "error" in last and last["error"]["code"] == "engine_stopped", last
        stream.close()
        assert server.process.wait(5) == 0
        assert time.monotonic() - began < 2.5


def test_an_engine_that_hangs_does_not_hold_up_the_end(start: Start) -> None:
    with start("--drain-s", "0.3") as server:
        [engine] = children_of(server.process.pid)
        os.kill(engine, signal.SIGSTOP)
        assert server.terminate(5) == 0
        wait_until(lambda: not is_running(engine), 2)


@pytest.mark.parametrize("prompt", [[1], [511]], ids=["idle", "in a long step"])
def test_no_engine_outlives_its_server(
    start: Start, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed server cannot remove its socket
    with start() as server:
        [engine] = children_of(server.process.pid)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 10_000}, timeout=0.2)
        server.process.kill()
        wait_until(lambda: not is_running(engine), 2)


def test_the_socket_is_private_and_goes_away(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with start() as server:
        [folder] = tmp_path.glob("potstill-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert listening_addresses(server.process.pid) == {"0100007F"}
        assert server.terminate() == 0
        assert not folder.exists()


def listening_addresses(pid: int) -> set[str]:
    """Local addresses, in the kernel's hexadecimal, of the TCP sockets that a process listens on."""
    inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists() or path.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def test_a_step_is_one_write_however_many_choices_it_brings(server: RunningServer) -> None:
    """Chunks of the transfer are what the server has written at once."""
    body = json.dumps({"prompt": SLOW, "max_tokens": 6, "n": 4, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.count(b"data: ") == 6 * 4 + 1
    assert len(re.findall(rb"\r\n[0-9a-f]+\r\n", answer)) <= 6 + 2, "the last one says [DONE], and ends"
