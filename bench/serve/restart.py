"""How long a server is without an engine that was stopped (SIGSTOP) under eight streams, on a CPU.

    python -m bench.serve.restart      # writes bench/results/restart-cpu.json; two minutes

SmolLM2-135M, `--engine-timeout 3`, with a spare process that stands by, as by default, and without. Seconds from the
signal until the last stream was told, and until a new request was answered. Promised: 5 and 15.
"""

import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from bench.common import teacher_folder, write_result
from tests.serve.http_server import RunningServer, running_server

STREAMS, TURNS, TIMEOUT_S = 8, 3, 3.0
SPARE_S = 20.0
"""After which a spare, which waits until its engine has been warm for a while, stands by."""


def ask(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"prompt": "def add(", "max_tokens": 1, "ignore_eos": True} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def stop_engine(server: RunningServer) -> dict[str, float]:
    """Seconds until all were told and until one was served."""
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(ask, server, max_tokens=1500, stream=True) for _ in range(STREAMS)]
        server.wait_for("potstill:num_requests_running", STREAMS, timeout_s=60)
        os.kill(server.engine_pids()[0], signal.SIGSTOP)
        began = time.monotonic()
        told = [stream.result().text for stream in streams]
        told_s = time.monotonic() - began
    if not all("engine_stalled" in text for text in told):
        raise RuntimeError(f"a stream was not told: {told}")
    while ask(server).status_code != 200:
        time.sleep(0.05)
    return {"told_s": told_s, "served_s": time.monotonic() - began}


def main() -> None:
    found: dict[str, Any] = {"streams": STREAMS, "engine_timeout_s": TIMEOUT_S}
    options = "--engine-timeout", f"{TIMEOUT_S}", "--kv-cache-bytes", "1G", "--dtype", "float32"
    for has_spare in (True, False):
        with (
            tempfile.TemporaryDirectory() as scratch,
            running_server(teacher_folder(), Path(scratch, "log"), *options, spare=has_spare) as server,
        ):
            turns = []
            for _ in range(TURNS):
                if has_spare:
                    time.sleep(SPARE_S)
                turns.append(stop_engine(server))
                print("spare" if has_spare else "no spare", turns[-1], flush=True)
        found["with a spare" if has_spare else "without"] = turns
    write_result("restart-cpu", "python -m bench.serve.restart", found)


if __name__ == "__main__":
    main()
