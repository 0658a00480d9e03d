"""Several replicas on a Ray cluster of this machine say what one server says, through all trouble."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.forked import free_port
from tests.model.test_fused_adapters import save_adapters
from tests.serve.http_server import CORPUS, REAL, ROOT, children_of, running_server, save_tiny_folder
from tests.serve.test_adapter_slots import CONFIGS
from tests.tiny import tiny_model

ray = pytest.importorskip("ray", reason="needs Ray: make test-cluster")
ray_serve = pytest.importorskip("ray.serve", reason="needs Ray Serve: make test-cluster")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
from serve import cluster  # noqa: E402

ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-cache-bytes", "4M", "--no-spare-engine"]
REPLICA_HEADER = "x-replica-pid"
PROMPTS = [CORPUS[0], CORPUS[1][:40], "def main(", "Straße"]


class NamedReplica(cluster.Replica):
    """Says in each answer which process it comes from."""

    async def answer(self, request: Any) -> AsyncIterator[list[Any]]:
        async for messages in super().answer(request):
            for message in messages:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (REPLICA_HEADER.encode(), str(os.getpid()).encode())]
            yield messages


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("cluster")
    save_tiny_folder(home / "model")
    for name, folder in zip(("poet", "support"), save_adapters(home / "made", tiny_model(), CONFIGS[:2]), strict=True):
        (home / "adapters").mkdir(exist_ok=True)
        Path(folder).rename(home / "adapters" / name)
    return home


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of Ray's proxy. A cluster of this machine's own, whose nodes find this checkout."""
    port = free_port()
    os.environ.setdefault("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
    ray.init(address="local", num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False)
    ray_serve.start(http_options={"port": port})
    yield f"http://127.0.0.1:{port}"
    ray_serve.shutdown()
    ray.shutdown()


@pytest.fixture
def deploy(home: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setattr(cluster, "Replica", NamedReplica)
    monkeypatch.setattr(cluster, "UPSCALE_S", 1.0)
    monkeypatch.setattr(cluster, "DOWNSCALE_S", 4.0)
    monkeypatch.setattr(cluster, "LOOK_BACK_S", 11.0)

    def run(*words: str) -> None:
        command = [str(home / "model"), "--served-model-name", "tiny", *ENGINE, *words]
        ray_serve.run(cluster.application({"command": " ".join(command)}), name=cluster.APPLICATION)

    yield run
    ray_serve.delete(cluster.APPLICATION)


def num_replicas() -> int:
    application = ray_serve.status().applications[cluster.APPLICATION]
    return sum(application.deployments[NamedReplica.__name__].replica_states.values())


def wait_until(holds: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def complete(url: str, prompt: str, max_tokens: int = 16, model: str = "tiny", session: str | None = None) -> Any:
    """(text, process id of the replica) of a stream; an exception unless it comes to its end."""
    request = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    request |= {"ignore_eos": True}
    headers = {} if session is None else {cluster.SESSION_HEADER: session}
    text, is_whole = "", False
    with httpx.stream("POST", f"{url}/v1/completions", json=request, headers=headers, timeout=120) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line == "data: [DONE]":
                is_whole = True
            elif line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    if not is_whole:
        raise RuntimeError("the stream broke off")
    return text, int(response.headers[REPLICA_HEADER]) if REPLICA_HEADER in response.headers else None


def test_answers_are_those_of_one_server_and_adapters_come_when_they_are_asked_for(
    home: Path, url: str, deploy: Callable[..., None], tmp_path: Path
) -> None:
    adapters = [f"--adapter={name}={home / 'adapters' / name}" for name in ("poet", "support")]
    models = ("tiny", "poet", "support")
    options = (*ENGINE, "--served-model-name", "tiny", *adapters)
    with running_server(home / "model", tmp_path / "log", *options, program=REAL) as server:
        expected = {
            (model, prompt): complete(server.url, prompt, model=model)[0] for model in models for prompt in PROMPTS
        }
    assert len({expected[model, PROMPTS[0]] for model in models}) == 3
    loras = ["--enable-lora", "--allowed-lora-path", str(home / "adapters")]
    deploy("--replicas", "2", *loras)
    answers = {
        (model, prompt): [complete(url, prompt, model=model, session=str(number)) for number in range(6)]
        for model, prompt in expected
    }
    assert {key: {text for text, _ in found} for key, found in answers.items()} == {
        key: {text} for key, text in expected.items()
    }
    for model in models:
        assert len({pid for prompt in PROMPTS for _, pid in answers[model, prompt]}) == 2
    wrong = [
        ("/v1/completions", {"model": "absent", "prompt": "a"}, 404),
        ("/v1/completions", {"model": "../model", "prompt": "a"}, 404),
        ("/v1/completions", {"model": "tiny", "prompt": 7}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "poet"}, 404),
        ("/v1/nothing", {}, 404),
    ]
    for path, request, status in wrong:
        response = httpx.post(f"{url}{path}", json=request)
        assert response.status_code == status and response.json()["error"]["message"], response.text
    large = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * (4 * 2**20)})
    assert large.status_code == 413
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    whole = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPTS[0], "max_tokens": 16, "ignore_eos": True})
    assert len(whole.headers.get_list("x-request-id")) == 1 and whole.json()["usage"]["completion_tokens"] > 0
    metrics = httpx.get(f"{url}/metrics").text
    samples = [
        (sample.labels["replica"], sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "vllm:request_success_total" and sample.labels["finished_reason"] == "length"
    ]
    answered = sum(len(found) for found in answers.values())
    assert len({replica for replica, _ in samples}) == 2 and sum(value for _, value in samples) == answered + 1


def test_a_replica_whose_engine_hangs_is_passed_over(url: str, deploy: Callable[..., None]) -> None:
    deploy("--replicas", "2", "--health-timeout-s", "1")
    first = {number: complete(url, "a", 2, session=str(number))[1] for number in range(4)}
    stuck, other = set(first.values())
    [engine] = children_of(stuck)
    os.kill(engine, signal.SIGSTOP)
    try:
        time.sleep(3 * cluster.ROUTING_S)
        assert {complete(url, "a", 2, session=str(number))[1] for number in range(4)} == {other}
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: stuck in {complete(url, f"{number}", 2)[1] for number in range(4)}, 20)


def test_who_leaves_stops_what_was_computed_for_him(url: str, deploy: Callable[..., None]) -> None:
    deploy("--replicas", "1")

    def num_running() -> int:
        return int(httpx.get(f"{url}/load").json()["num_requests_running"])

    request = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=request) as response:
        lines = response.iter_lines()  # closed with its last reference, and with it the connection
        next(lines)
        wait_until(lambda: num_running() == 1, 2)
    left = time.monotonic()
    wait_until(lambda: num_running() == 0, 20)
    stopped_s = time.monotonic() - left
    began = time.monotonic()
    complete(url, "a", 1900)
    assert stopped_s < 0.5 * (time.monotonic() - began)


def test_requests_go_where_their_prefix_or_their_session_is(url: str, deploy: Callable[..., None]) -> None:
    deploy("--replicas", "2", "--max-num-seqs", "8")
    groups = {group: f"Document {group}: " + f"{CORPUS[group % 4]} {group} " * 10 for group in range(12)}
    first = {group: complete(url, text, 4)[1] for group, text in groups.items()}
    assert min(list(first.values()).count(pid) for pid in set(first.values())) >= 4 and len(set(first.values())) == 2
    wanted = [(group, f"{text}Question {turn}") for turn in range(10) for group, text in groups.items()]
    with ThreadPoolExecutor(8) as clients:
        went = list(clients.map(lambda one: complete(url, one[1], 4)[1], wanted))
    followed = sum(pid == first[group] for pid, (group, _) in zip(went, wanted, strict=True)) / len(wanted)
    print(f"prefix affinity: {followed:.3f} of {len(wanted)} requests")
    assert followed > 0.9
    sessions = {
        str(number): [complete(url, f"{turn}", 2, session=str(number))[1] for turn in range(4)] for number in range(8)
    }
    assert all(len(set(pids)) == 1 for pids in sessions.values()) and len({pids[0] for pids in sessions.values()}) == 2


def test_replicas_come_and_go_under_load_and_no_request_fails(url: str, deploy: Callable[..., None]) -> None:
    deploy("--replicas", "1..2", "--max-num-seqs", "4", "--queue-wait-s", "120")
    assert num_replicas() == 1
    failures, answered, is_busy, stop = [], [], threading.Event(), threading.Event()
    is_busy.set()

    def client(number: int) -> None:
        while not stop.is_set():
            if number and not is_busy.is_set():
                time.sleep(0.1)
                continue
            try:
                answered.append(complete(url, f"{number} {CORPUS[number % 4]}", 48)[1])
            except Exception as error:
                failures.append(repr(error))

    with ThreadPoolExecutor(8) as clients:
        for number in range(8):
            clients.submit(client, number)
        try:
            wait_until(lambda: num_replicas() == 2, 60)
            wait_until(lambda: len(set(answered)) == 2, 60)
            is_busy.clear()
            wait_until(lambda: num_replicas() == 1, 90)
            so_far = len(answered)
            wait_until(lambda: len(answered) >= so_far + 5, 60)
        finally:
            stop.set()
    print(f"{len(answered)} requests while 1, 2 and 1 replicas ran, {len(failures)} failed")
    assert not failures


def test_a_killed_replica_loses_at_most_what_it_was_streaming(url: str, deploy: Callable[..., None]) -> None:
    deploy("--replicas", "2", "--max-num-seqs", "4")
    expected = [complete(url, f"{number} {CORPUS[number % 4]}", 1200)[0] for number in range(6)]
    pids: dict[int, int] = {}
    whole: dict[int, str] = {}

    def stream(number: int) -> None:
        request = {"prompt": f"{number} {CORPUS[number % 4]}", "max_tokens": 1200, "temperature": 0, "ignore_eos": True}
        headers = {cluster.SESSION_HEADER: str(number)}
        text = ""
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=request | {"stream": True}, headers=headers, timeout=120
        ) as response:
            pids[number] = int(response.headers[REPLICA_HEADER])
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    whole[number] = text
                elif line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    with ThreadPoolExecutor(6) as clients:
        running = [clients.submit(stream, number) for number in range(6)]
        wait_until(lambda: len(pids) == 6, 60)
        assert len(set(pids.values())) == 2 and not whole
        dead = pids[0]
        os.kill(dead, signal.SIGKILL)
        later = [clients.submit(complete, url, f"later {number}", 4) for number in range(6)]
        broken = [number for number, one in enumerate(running) if one.exception(120) is not None]
        assert all(one.result(120)[1] != dead for one in later)
    print(f"killed with {list(pids.values()).count(dead)} of 6 streams: {len(broken)} broke off")
    assert broken == [number for number in range(6) if pids[number] == dead]
    assert whole == {number: expected[number] for number in range(6) if pids[number] != dead}
    wait_until(lambda: num_replicas() == 2, 60)


def test_one_command_serves_and_drains(home: Path, tmp_path: Path) -> None:
    port = free_port()
    words = ["--port", str(port), "--replicas", "1..2", "--served-model-name", "tiny"]
    command = [sys.executable, "-m", "serve", str(home / "model"), *ENGINE, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert any("serves tiny on http://" in line for line in process.stdout), (tmp_path / "log").read_text()
        with ThreadPoolExecutor(1) as clients:
            running = clients.submit(complete, f"http://127.0.0.1:{port}", "a", 1200)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert running.result(60)[0]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)


def test_trouble_is_one_sentence(home: Path) -> None:
    absent = run(str(home / "absent"), "--replicas", "2")
    assert absent.returncode == 2 and absent.stderr.count("\n") == 1 and "absent" in absent.stderr
    alone = run(str(home / "model"), "--replicas", "2", RAY_ADDRESS=f"127.0.0.1:{free_port()}")
    assert alone.returncode == 2 and "no Ray cluster to join" in alone.stderr.splitlines()[-1], alone.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = run(str(home / "model"), "--replicas", "2", "--port", str(taken.getsockname()[1]))
    assert busy.returncode == 2 and "cannot listen" in busy.stderr
    words = ["--replicas", "1", "--port", str(free_port()), "--device", "cpu", "--kv-cache-bytes", "1K"]
    narrow = run(str(home / "model"), *words, RAY_ADDRESS="local")
    assert narrow.returncode == 1
    assert "potstill: no replica starts: there is no memory for KV pages" in narrow.stderr, narrow.stderr[-2000:]


def test_nodes_of_another_version_are_refused(
    home: Path, url: str, deploy: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "__version__", "9.9")
    with pytest.raises(RuntimeError) as caught:
        deploy("--replicas", "1")
    assert re.fullmatch(
        r"this node has potstill \S+, the one that deploys 9.9: install the same", cluster._reason(caught.value)
    )
