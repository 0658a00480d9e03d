"""Mixed traffic for a while, with clients that leave, bad requests, bursts, and engines killed and stopped.

    python -m tests.soak --minutes 30      # --write: and keep what it found as bench/results/soak-cpu.json

Of ten requests six are normal, two leave, one is invalid, one is a burst of eight. Each minute an engine is killed or
stopped. At the end: every answer was right or an honest refusal, everything is idle, and the server's memory is flat.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from bench.common import write_result
from tests.serve.http_server import RunningServer, running_server, save_tiny_folder

CLIENTS = 6
PROMPTS = [[5 + (7 * number + place) % 300 for place in range(10 + 20 * number)] for number in range(8)]
SAMPLE_S = 2.0
MAX_MIB_PER_MINUTE = 1.0
ALLOWED = {429, 503, 504}
"""What overload and the loss of an engine may be answered with."""


class Soak:
    """One run: its traffic, its faults, and what it has seen."""

    def __init__(self, server: RunningServer, seconds: float) -> None:
        self._server = server
        self._end = time.monotonic() + seconds
        self._draw = random.Random(1)
        self._expected = [self._ask(prompt).json()["choices"][0]["text"] for prompt in PROMPTS]
        self.seen: Counter[str] = Counter()
        self.samples: list[tuple[float, float, int]] = []
        """Seconds, MiB and open files of the HTTP process."""

    def _body(self, prompt: list[int]) -> dict[str, object]:
        return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    def _ask(self, prompt: list[int]) -> httpx.Response:
        return httpx.post(f"{self._server.url}/v1/completions", json=self._body(prompt), timeout=60)

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=f"{self._server.url}/v1", timeout=60) as http:
            await asyncio.gather(*(self._client(http) for _ in range(CLIENTS)), self._break_engines(), self._sample())

    async def _client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self._end:
            kind = self._draw.choices(["normal", "leave", "invalid", "burst"], [6, 2, 1, 1])[0]
            if kind == "burst":
                await asyncio.gather(*(self._normal(http) for _ in range(8)))
            else:
                await getattr(self, f"_{kind}")(http)
            await asyncio.sleep(self._draw.uniform(0, 0.1))

    async def _normal(self, http: httpx.AsyncClient) -> None:
        number = self._draw.randrange(len(PROMPTS))
        answer = await http.post("/completions", json=self._body(PROMPTS[number]))
        if answer.status_code == 200 and answer.json()["choices"][0]["text"] != self._expected[number]:
            raise RuntimeError(f"prompt {number} was answered differently: {answer.text}")
        if answer.status_code != 200 and answer.status_code not in ALLOWED:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        self.seen[str(answer.status_code)] += 1

    async def _leave(self, http: httpx.AsyncClient) -> None:
        body = self._body(self._draw.choice(PROMPTS)) | {"max_tokens": 500, "stream": True}
        with contextlib.suppress(TimeoutError, httpx.TransportError):
            async with (
                asyncio.timeout(self._draw.uniform(0.01, 0.5)),
                http.stream("POST", "/completions", json=body) as answer,
            ):
                async for _ in answer.aiter_raw():
                    pass
        self.seen["left"] += 1

    async def _invalid(self, http: httpx.AsyncClient) -> None:
        answer = await http.post("/completions", json={"prompt": [5], "max_tokens": -1})
        if answer.status_code != 400:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        self.seen["400"] += 1

    async def _break_engines(self) -> None:
        for number in range(1000):
            await asyncio.sleep(min(60.0, max(0.0, self._end - 20 - time.monotonic())))
            if time.monotonic() > self._end - 20:
                return
            engine, *_ = self._server.engine_pids()  # behind it stands a spare, which has to take over
            os.kill(engine, signal.SIGSTOP if number % 2 else signal.SIGKILL)
            self.seen["broken"] += 1

    async def _sample(self) -> None:
        pid = self._server.process.pid
        while time.monotonic() < self._end:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            mebibytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            self.samples.append((time.monotonic(), mebibytes, len(os.listdir(f"/proc/{pid}/fd"))))
            await asyncio.sleep(SAMPLE_S)


def check(server: RunningServer, soak: Soak) -> dict[str, Any]:
    """What was found by a run that went well; RuntimeError for one that did not."""
    server.wait_healthy(60)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        server.wait_for(f"potstill:{name}", 0.0)
    restarts = server.metric("potstill:engine_restarts_total")
    if restarts != soak.seen["broken"]:
        raise RuntimeError(f"{soak.seen['broken']} engines were broken and {restarts} replaced")
    late = soak.samples[len(soak.samples) // 3 :]  # the first third fills caches
    slope = statistics.linear_regression([at / 60 for at, _, _ in late], [size for _, size, _ in late]).slope
    files = [count for _, _, count in late]
    found = {
        "answers": dict(soak.seen),
        "http_process_mib": round(late[-1][1], 1),
        "mib_a_minute": round(slope, 3),
        "most_open_files": max(files),
    }
    if slope > MAX_MIB_PER_MINUTE:
        raise RuntimeError(f"memory grows: {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_tiny_folder(Path(scratch) / "model")
        options = ("--dtype", "float32", "--engine-timeout", "3", "--kv-cache-bytes", "64M", "--max-num-seqs", "8")
        with running_server(folder, Path(scratch) / "log", *options, spare=True) as server:
            soak = Soak(server, 60 * arguments.minutes)
            asyncio.run(soak.run())
            found = check(server, soak)
    print(found)
    if arguments.write:
        command = f"python -m tests.soak --minutes {arguments.minutes:g}"
        write_result("soak-cpu", command, {"minutes": arguments.minutes, **found})


if __name__ == "__main__":
    main()
