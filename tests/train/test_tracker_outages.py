"""wandb itself, and a network below it that is broken in one of six ways: nobody waits, nothing is lost."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import trials
from tests.pipeline.tiny_run import ROOT
from train.tracking import read_metrics

FAULTS = ("refuses", "is silent", "answers 500", "resets", "sends a byte a second", "has no name")
STEPS = 60
STEP_S = 0.3
"""So that training lasts longer than wandb is given to start."""
TRAINING = f"""
import json, sys, time
from pathlib import Path
from train.tracking import Tracker
from train.wandb_run import WandbRun

folder = Path(sys.argv[1])
run = WandbRun(folder, mode="online", name="run", job_type="distill")
tracker, seconds = Tracker(folder, run), []
tracker.start()
for step in range({STEPS}):
    began = time.monotonic()
    tracker.log(step, {{"loss": 1.0}})
    seconds.append(time.monotonic() - began)
    time.sleep({STEP_S})
tracker.finish()
ended = time.time()
run.finish()
print(json.dumps({{"ended": ended, "seconds": seconds}}))
"""


@contextlib.contextmanager
def broken_server(fault: str) -> Iterator[str]:
    """Its address."""
    if fault == "has no name":
        yield "http://nowhere.invalid"
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if fault == "refuses":
            listener.close()
        else:
            threading.Thread(target=_accept, args=(listener, fault), daemon=True).start()
        yield address


def _accept(listener: socket.socket, fault: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=_answer, args=(listener.accept()[0], fault), daemon=True).start()


def _answer(client: socket.socket, fault: str) -> None:
    with contextlib.suppress(OSError), client:
        while client.recv(65536):
            if fault == "answers 500":
                client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
            elif fault == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            elif fault == "sends a byte a second":
                for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b" " * 9000:
                    client.sendall(bytes([byte]))
                    time.sleep(1)


@pytest.mark.skipif(not trials.in_full, reason="half a minute each")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_network_costs_nothing(fault: str, tmp_path: Path) -> None:
    with broken_server(fault) as address:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        environment |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40, "HOME": str(tmp_path)}
        command = [sys.executable, "-c", TRAINING, str(tmp_path / "run")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        ended = time.time()
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert sorted(said["seconds"])[int(0.95 * STEPS)] <= 0.05 * STEP_S
    assert ended - said["ended"] <= 10
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == STEPS
    assert list(tmp_path.glob("run/wandb/offline-run-*")), "what was measured is kept for later"
