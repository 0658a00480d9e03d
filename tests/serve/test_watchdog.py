"""Time limits hold whatever the engine does: it is watched, and deadlines and waits are counted outside of it, too."""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.config import EngineConfig
from serve.http import engine_client, engine_process
from serve.http.engine_client import EngineClient
from serve.http.metrics import Metrics
from serve.http.options import ServerOptions
from serve.sampling_params import SamplingParams
from tests.serve.http_server import SCRIPTED, RunningServer, children_of, running_server, save_tiny_folder
from tests.serve.toys import make_engine
from tests.tiny import tiny_model

TIMEOUT_S = 1.5
QUICK, SLOW, LONG_STEP, ENDLESS_STEP = [20], [400], [510], [511]
"""Prompts that script the engine: 20 ms, 400 ms, 3 s, 60 s a step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("watchdog") / "model")


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Starts a server of the test's own."""
    return lambda *options, **settings: running_server(
        settings.pop("model", folder), tmp_path / "own.log", *options, program=SCRIPTED, **settings
    )


def ask(server: RunningServer, prompt: list[int] | str, **fields: Any) -> tuple[httpx.Response, float]:
    """The answer, and after how many seconds it came."""
    began = time.monotonic()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1} | fields, timeout=30)
    return answer, time.monotonic() - began


def last_error(answer: httpx.Response) -> Any:
    """The error of a response, or of the last event before the end of a stream."""
    if answer.status_code != 200:
        return answer.json()["error"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return json.loads(events[-2])["error"]


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


# The engine


def test_a_stopped_engine_is_replaced_and_every_client_is_told(start: Any) -> None:
    """Eight streams, of which four have begun and four wait behind them."""
    with start("--engine-timeout", str(TIMEOUT_S), "--max-num-seqs", "4") as server, ThreadPoolExecutor(8) as pool:
        [engine] = server.engine_pids()
        asking = [pool.submit(ask, server, QUICK, max_tokens=10_000, stream=True) for _ in range(8)]
        server.wait_for("potstill:time_to_first_token_seconds_count", 4)
        server.wait_for("potstill:num_requests_waiting", 4)
        os.kill(engine, signal.SIGSTOP)
        began = time.monotonic()
        answers = [future.result()[0] for future in asking]
        assert TIMEOUT_S - 0.5 < time.monotonic() - began < TIMEOUT_S + 2
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [503] * 4
        assert {last_error(answer)["code"] for answer in answers} == {"engine_stalled"}
        server.wait_healthy(15 - (time.monotonic() - began))
        assert server.engine_pids() != [engine] and not Path(f"/proc/{engine}").exists()
        assert ask(server, QUICK)[0].status_code == 200
        for name, value in {"engine_stalls_total": 1, "engine_restarts_total": 1, "engine_ready": 1}.items():
            assert server.metric(f"potstill:{name}") == value, name
        assert f"ended no step for {TIMEOUT_S} s" in server.log.read_text()


def test_slow_loading_and_slow_steps_are_no_stall(start: Any, folder: Path, tmp_path: Path) -> None:
    slow = shutil.copytree(folder, tmp_path / "slow")  # takes 3 s to load
    with start("--engine-timeout", "1", model=slow) as server:
        answer, took_s = ask(server, SLOW, max_tokens=6)
        assert answer.status_code == 200 and took_s > 2
        assert server.metric("potstill:engine_stalls_total") == 0


def test_time_in_which_everything_is_stopped_does_not_count(start: Any) -> None:
    """A suspended container, or a terminal's ^Z."""
    with start("--engine-timeout", "2") as server:
        [engine] = server.engine_pids()
        with stopped(engine):
            time.sleep(0.6)  # until a ping is on its way
            with stopped(server.process.pid):
                time.sleep(3)
        assert ask(server, QUICK)[0].status_code == 200
        assert server.engine_pids() == [engine]


def scripted_client(**settings: Any) -> EngineClient:
    command = [sys.executable, str(Path(__file__).with_name("scripted_engine.py"))]
    return EngineClient(ServerOptions(EngineConfig("none"), ("m",), **settings), Metrics("m"), command=command)


def test_an_engine_that_cannot_be_killed_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a broken driver."""
    monkeypatch.setattr(engine_process, "KILL_S", 0.2)
    monkeypatch.setattr(engine_client, "PING_S", 0.1)
    monkeypatch.setattr(asyncio.subprocess.Process, "kill", lambda process: None)

    async def hang() -> str | None:
        client = scripted_client(engine_timeout_s=0.3)
        before = set(children_of(os.getpid()))
        client.start()
        assert await client.wait_ready()
        [engine] = set(children_of(os.getpid())) - before
        os.kill(engine, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10):
                await client.ended.wait()
            await client.stop()
        finally:
            os.kill(engine, signal.SIGKILL)
        await asyncio.sleep(0.2)
        return client.failure

    assert "does not let it end" in (asyncio.run(hang()) or "")


def test_a_spare_process_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "SPARE_AFTER_S", 0.05)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    async def replace_three() -> None:
        client, others = scripted_client(), set(children_of(os.getpid()))

        def children() -> set[int]:
            return set(children_of(os.getpid())) - others

        async def spare_of(engine: int) -> int:
            await until(lambda: len(children()) == 2)
            [spare] = children() - {engine}
            return spare

        async def replace(engine: int) -> None:
            before = client.info
            os.kill(engine, signal.SIGKILL)
            await until(lambda: client.is_ready and client.info is not before)

        client.start()
        assert await client.wait_ready()
        [first] = children()
        second = await spare_of(first)
        await replace(first)
        third = await spare_of(second)
        os.kill(third, signal.SIGKILL)
        await until(lambda: children() == {second})
        await replace(second)  # nobody misses a spare until it is called up
        assert not children() & {first, second, third}
        await client.stop()
        assert not children()

    asyncio.run(replace_three())


# Deadlines


@pytest.mark.parametrize("streamed", [False, True])
def test_a_deadline_holds_while_the_engine_is_busy(start: Any, streamed: bool) -> None:
    with start("--max-num-seqs", "2") as server, ThreadPoolExecutor() as pool:
        occupied = pool.submit(ask, server, ENDLESS_STEP, deadline_s=3)
        server.wait_for("potstill:num_requests_running", 1)
        for prompt in ([5] * 4000, "hello"):
            answer, took_s = ask(server, prompt, deadline_s=0.2, stream=streamed)
            assert answer.status_code == 504 and last_error(answer)["code"] == "deadline_exceeded"
            assert 0.2 <= took_s < 0.5
        answer, took_s = occupied.result()
        assert answer.status_code == 504 and took_s < 3.5
        assert httpx.get(f"{server.url}/load").json()["server_load"] == 0


def test_a_deadline_holds_while_the_prompt_is_tokenized(start: Any) -> None:
    with start() as server:
        prompt = "The quick brown fox jumps. " * 14_000
        whole, whole_s = ask(server, prompt)
        assert "the prompt has 112000 tokens" in whole.text and whole_s > 0.1  # that is how long it takes
        answer, took_s = ask(server, prompt, deadline_s=0.02)
        assert answer.status_code == 504 and took_s < whole_s


# Waiting


def test_a_wait_ends_even_when_the_engine_is_busy(start: Any) -> None:
    with start("--max-num-seqs", "1", "--queue-wait-s", "0.5") as server, ThreadPoolExecutor() as pool:
        occupied = pool.submit(ask, server, ENDLESS_STEP, deadline_s=3)
        server.wait_for("potstill:num_requests_running", 1)
        answer, took_s = ask(server, QUICK)
        assert answer.status_code == 504 and last_error(answer)["code"] == "queue_timeout"
        assert took_s < 0.5 + engine_client.QUEUE_GRACE_S + 0.3
        assert int(answer.headers["retry-after"]) > 0
        assert server.metric("potstill:admission_rejections_total") == 1
        assert occupied.result()[0].json()["error"]["code"] == "deadline_exceeded"


def test_a_long_first_step_is_no_wait(start: Any) -> None:
    with start("--max-num-seqs", "1", "--queue-wait-s", "0.5") as server:
        answer, took_s = ask(server, LONG_STEP)
        assert answer.status_code == 200 and took_s >= 3
        assert server.metric("potstill:request_queue_time_seconds_sum") < 1
        assert server.metric("potstill:request_prefill_time_seconds_sum") > 2


def test_an_engine_says_who_has_a_place_before_it_computes() -> None:
    engine = make_engine(tiny_model(seed=3))
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=2))
    seen: list[tuple[int, int, int]] = []
    engine.on_schedule = lambda: seen.append(
        (len(engine.scheduler.waiting), *(s.num_computed for s in engine.scheduler.running))
    )
    engine.step()
    assert seen == [(0, 0)]
