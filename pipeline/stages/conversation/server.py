"""The real HTTP server in a process of its own, and one client that asks it: what the demo's last stage shows."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import StageFailed
from pipeline.results import Answer, pieces_of

ADDRESS = re.compile(r"listens on http://([^:\s]+):(\d+)")
START_S = 300.0
"""How long the server may take to load its models."""
ANSWER_S = 600.0


class ServerFailed(StageFailed):
    """The server process ended, or did not become healthy in time; the sentence ends with what it said."""


@contextmanager
def running_server(model: Path, verify: Path | None, *options: str, name: str) -> Iterator[tuple[str, int]]:
    """`potstill serve` on a free loopback port, for as long as the context is open. Yields (host, port)."""
    command = [sys.executable, "-m", "pipeline", "serve", str(model), "--port", "0", "--served-model-name", name]
    command += ["--log-level", "warning", "--max-num-seqs", "8", "--kv-cache-bytes", "256M", *options]
    command += [] if verify is None else ["--verify", str(verify)]
    root = str(Path(__file__).resolve().parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    ) as server:
        try:
            host, port = _address(server)
            _wait_until_healthy(server, host, port)
            yield host, port
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()


def ask(
    address: tuple[str, int], prompt: str, *, served: str, max_tokens: int, temperature: float, seed: int
) -> Answer:
    """One chat completion over HTTP, its tokens marked by who proposed them."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "logprobs": True,
    }
    started = time.perf_counter()
    status, answer = _request(address, "POST", "/v1/chat/completions", body)
    seconds = time.perf_counter() - started
    if status != 200:
        raise ServerFailed(f"the server answered {status}: {json.dumps(answer)[:300]}")
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    tokens = [(bytes(entry["bytes"]), entry.get("drafted", False)) for entry in entries]
    return Answer(
        prompt=prompt,
        served=served,
        pieces=pieces_of(tokens, choice["message"]["content"]),
        tokens=answer["usage"]["completion_tokens"],
        drafted_tokens=sum(drafted for _, drafted in tokens),
        seconds=seconds,
    )


def _address(server: "subprocess.Popen[str]") -> tuple[str, int]:
    """The address that the server prints when it listens."""
    said = []
    for line in server.stdout or ():
        said.append(line)
        if match := ADDRESS.search(line):
            return match[1], int(match[2])
    raise ServerFailed(f"the server ended before it listened: {''.join(said).strip()[-500:]}")


def _wait_until_healthy(server: "subprocess.Popen[str]", host: str, port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if _request((host, port), "GET", "/health", None)[0] == 200:
                return
        except OSError:
            pass  # not listening yet, or just gone: the loop's condition tells which
        time.sleep(0.1)
    said = "" if server.poll() is None or server.stdout is None else server.stdout.read()[-500:]
    raise ServerFailed(f"the server did not become healthy: {said.strip() or 'it is still loading'}")


def _request(address: tuple[str, int], method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def _die_with_parent() -> None:
    """Linux only: the kernel ends the server when this process dies, even by SIGKILL."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
