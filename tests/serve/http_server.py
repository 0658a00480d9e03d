"""A real server process for tests: a tiny model with a tokenizer trained on the spot, `python -m serve`, HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as transports
import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model.files.checkpoint import save_model
from model.transformer import Transformer
from serve.__main__ import main
from tests.serve import scripted_server
from tests.serve.forked_server import ForkedServer
from tests.tiny import tiny_model

# httpx reads the machine's certificates for every client, so for every `httpx.get` too: 60 ms, and all is on loopback.
transports.create_ssl_context = cache(transports.create_ssl_context)  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parents[2]
CONTROL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor -%}
{%- if tools %}[{{ tools | length }} tools]{% endif -%}
{%- if enable_thinking is defined and enable_thinking is false %}[no thinking]{% endif -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A model turns tokens into tokens; a tokenizer turns text into tokens and tokens into text.",
    "Straße, naïve café, Ελληνικά, 日本語, 🙂 and other things that take more than one byte.",
    "def main(argument: str) -> int:\n    return len(argument)\n",
]


def save_tiny_folder(folder: Path, model: Transformer | None = None) -> Path:
    """A model folder: 512 tokens, random weights unless given, a byte-level BPE tokenizer, a ChatML template."""
    folder.mkdir(parents=True)
    save_tiny_tokenizer(folder)
    save_model(model or tiny_model(), folder)
    return folder


def save_tiny_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=CONTROL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass
class RunningServer:
    """A server process, and what it has printed so far."""

    process: subprocess.Popen[str] | ForkedServer
    url: str
    log: Path
    lines: list[str] = field(default_factory=list)
    api_key: str = "none"

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": self.api_key, "max_retries": 0} | settings)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics", timeout=20).text
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if not values:
            raise KeyError(name)
        return sum(map(float, values))

    def histogram(self, name: str) -> dict[float, float]:
        """How many observations of a metric were at most so large, by the edges of its buckets."""
        text = httpx.get(f"{self.url}/metrics", timeout=20).text
        found = re.findall(rf'^{re.escape(name)}_bucket{{le="([^"]+)"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return {float(edge): float(count) for edge, count in found}

    def wait_for(self, name: str, value: float, timeout_s: float = 10.0) -> None:
        """Until a metric has this value."""
        deadline = time.monotonic() + timeout_s
        while (now := self.metric(name)) != value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is {now}, not {value}, after {timeout_s} s")
            time.sleep(0.02)

    def wait_healthy(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while httpx.get(f"{self.url}/health", timeout=20).status_code != 200:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"the server is not healthy: {self.log.read_text()}")
            time.sleep(0.05)

    def engine_pids(self) -> list[int]:
        return children_of(self.process.pid)

    def terminate(self, timeout_s: float = 20.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def children_of(pid: int) -> list[int]:
    """Living child processes, in the order in which they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append((int(fields[19]), int(entry.name)))
    return [child for _, child in sorted(found)]


Program = Callable[[], int] | tuple[str, ...]
"""What a process that need not import anything runs, or arguments of a fresh Python."""
FORKED: Program = main
SCRIPTED: Program = scripted_server.main
REAL = ("-m", "serve")
FAILING_DEVICE = (str(Path(__file__).with_name("failing_device.py")),)


@contextmanager
def running_server(
    folder: Path, log: Path, *arguments: str, program: Program = FORKED, ready: bool = True, spare: bool = False
) -> Iterator[RunningServer]:
    """A server of `folder` on a free port, warm (with `ready`), ended at the end; its engine is its one child, but with
    `spare`.
    """
    words = [str(folder), "--port", "0", *arguments, *([] if spare else ["--no-spare-engine"])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = start(program, words, environment, log)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        match = re.search(r"http://\S+", first)
        assert match is not None, first + log.read_text()
        server = RunningServer(process, match.group(), log, [first])
        if ready:
            server.lines.append(process.stdout.readline())
            assert "ready" in server.lines[-1], log.read_text()
        yield server
    finally:
        end(process)


def start(
    program: Program, words: list[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[str] | ForkedServer:
    with log.open("w") as stderr:
        if callable(program):
            return ForkedServer(program, words, environment, stderr)
        command = [sys.executable, *program, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, cwd=ROOT)


def end(process: subprocess.Popen[str] | ForkedServer) -> None:
    """Two signals: do not wait for requests, but clean up."""
    try:
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        process.wait(5)
    finally:
        process.kill()
        process.wait()
