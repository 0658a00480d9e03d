"""The engine under load: many requests of mixed lengths at once, requests that arrive by chance, clients over HTTP."""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import torch
from torch import Tensor

from bench.common import DEVICE, DTYPE
from bench.gpu.engine import STEP_TOKENS, Sized, engine_of, sized_model
from bench.gpu.figures import ROOFLINE, Figure, Goal
from bench.gpu.task import Task
from bench.models import LLAMA_1B, TINY, shaped
from model.files.checkpoint import tensor_shapes, write_checkpoint
from serve import SamplingParams
from serve.engine.batch_state import synchronize
from serve.engine.engine import Engine
from serve.engine.runner import PendingStep, Work
from tests.serve.toys import toy_tokenizer

LOAD = 0.6
"""Requests that arrive, of those that the engine finishes when all are there at once."""


@dataclass(frozen=True)
class Mix:
    """Requests whose prompts and answers both have between `low` and `high` tokens."""

    count: int
    low: int
    high: int

    def requests(self, vocab_size: int) -> list[tuple[list[int], int]]:
        """Prompts, and how many tokens each wants."""
        chosen = random.Random(0)
        lengths = [chosen.randint(self.low, self.high) for _ in range(2 * self.count)]
        prompts = [chosen.choices(range(2, vocab_size), k=length) for length in lengths[::2]]
        return list(zip(prompts, lengths[1::2], strict=True))


def mix_of(task: Task) -> Mix:
    return Mix(4, 3, 8) if task.tiny else Mix(256, 100, 1024)


def offline_name(shape: str) -> str:
    return f"offline {shape} bf16, 256 requests"


def offline(task: Task, shape: str) -> Iterator[Figure]:
    """New tokens a second, all requests there at once; the limit is the sum of the floors of all steps."""
    sized, mix = sized_model(task, shape), mix_of(task)
    engine = mixed_engine(sized, mix)
    with watched_floors(engine, sized) as floors:
        run_all(engine, mix)  # loads kernels and captures steps, too; the next run makes the same steps
    seconds, tokens = run_all(engine, mix)
    goals = (Goal("vllm", 1.0), Goal("transformers", 3.0), Goal(ROOFLINE, 0.7))
    roofline = tokens / sum(floors) if floors else None
    yield Figure(offline_name(shape), "tokens/s", tokens / seconds, roofline=roofline, goals=goals)


def mixed_engine(sized: Sized, mix: Mix) -> Engine:
    together = sum(len(prompt) + wanted for prompt, wanted in mix.requests(sized.config.vocab_size))
    return engine_of(sized.model, tokens=2 * mix.high, batch=mix.count, all_tokens=together)


def run_all(engine: Engine, mix: Mix) -> tuple[float, int]:
    """Seconds, and new tokens. Raises RuntimeError where a request fails."""
    requests = mix.requests(engine.vocab_size)
    synchronize(engine.device)
    began = time.perf_counter()
    for number, (prompt, wanted) in enumerate(requests):
        engine.add_request(str(number), prompt, greedy(wanted))
    while engine.has_work():
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
    synchronize(engine.device)
    return time.perf_counter() - began, sum(wanted for _, wanted in requests)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


@contextmanager
def watched_floors(engine: Engine, sized: Sized) -> Iterator[list[float]]:
    """Seconds that each step within takes at least; none where the machine's rates are not known."""
    floors: list[float] = []
    launch = engine.launch_pass

    def watched(work: list[Work]) -> PendingStep:
        tokens = sum(item.chunk.num_tokens for item in work)
        visible = sum(item.chunk.num_tokens * (item.chunk.start + item.chunk.num_tokens // 2) for item in work)
        floor_s = sized.floor_s(tokens, sum(item.samples for item in work), visible)
        floors.extend([] if floor_s is None else [floor_s])
        return launch(work)

    engine.launch_pass = watched  # type: ignore[method-assign]
    yield floors
    engine.launch_pass = launch  # type: ignore[method-assign]


@dataclass
class Heard:
    """When a request arrived, and when something of its answer came."""

    arrived: float
    times: list[float] = field(default_factory=list)


def under_load(task: Task, shape: str) -> Iterator[Figure]:
    """Requests arrive at random, at a part of the rate that the engine reaches: how long they wait for tokens."""
    sized, mix = sized_model(task, shape), mix_of(task)
    engine = mixed_engine(sized, mix)
    run_all(engine, mix)
    seconds, _ = run_all(engine, mix)
    heard = arrive(engine, mix, rate=LOAD * mix.count / seconds)
    first = [1e3 * (one.times[0] - one.arrived) for one in heard]
    between = [1e3 * (b - a) for one in heard for a, b in zip(one.times, one.times[1:], strict=False)]
    note = f"{LOAD * mix.count / seconds:.1f} requests/s"
    for name, times in (("time to first token", first), ("time between tokens", between)):
        for share in (50, 99):
            value = percentile(times, share)
            yield Figure(f"load {shape}, {name}, p{share}", "ms", value, less_is_better=True, note=note)


def percentile(values: Sequence[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


def arrive(engine: Engine, mix: Mix, rate: float) -> list[Heard]:
    """All requests, with exponential pauses; what was heard of each."""
    chosen, due = random.Random(1), 0.0
    waiting = []
    for prompt, wanted in mix.requests(engine.vocab_size):
        due += chosen.expovariate(rate)
        waiting.append((due, prompt, wanted))
    heard: list[Heard] = []
    began = time.perf_counter()
    while waiting or engine.has_work():
        now = time.perf_counter() - began
        while waiting and waiting[0][0] <= now:
            due, prompt, wanted = waiting.pop(0)
            engine.add_request(str(len(heard)), prompt, greedy(wanted))
            heard.append(Heard(due))
        if not engine.has_work():
            time.sleep(max(0.0, waiting[0][0] - now))
            continue
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            if output.new_token_ids:
                heard[int(output.request_id)].times.append(time.perf_counter() - began)
    return heard


def over_http(task: Task) -> Iterator[Figure]:
    """`potstill serve`, and as many clients as requests at a time."""
    from pipeline.stages.conversation.server import running_server

    clients, new_tokens = (2, 8) if task.tiny else (64, 256)
    with tempfile.TemporaryDirectory() as scratch:
        write_random(Path(scratch), TINY if task.tiny else LLAMA_1B)
        options = ["--dtype", str(DTYPE).removeprefix("torch."), "--max-num-seqs", str(clients), "--max-model-len"]
        options += ["64" if task.tiny else "1024", "--kv-cache-bytes", "16M" if task.tiny else "8G"]
        options += ["--max-num-batched-tokens", str(STEP_TOKENS)]
        with running_server(Path(scratch), None, *options, name="random") as address:
            ask = partial(ask_once, address, new_tokens=new_tokens, prompt_tokens=16 if task.tiny else 256)
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(ask, range(clients)))  # loads kernels and captures steps
                began = time.perf_counter()
                tokens = sum(pool.map(ask, range(clients, 5 * clients)))
                seconds = time.perf_counter() - began
    yield Figure("HTTP 1B bf16, 64 clients", "tokens/s", tokens / seconds)


def write_random(folder: Path, shape: dict[str, int | float | bool]) -> None:
    """A model with a tokenizer, as a folder that can be served."""
    config = shaped(shape)

    def make(size: torch.Size) -> Tensor:
        matrix = config.initializer_range * torch.randn(size, device=DEVICE, dtype=DTYPE)
        return torch.ones(size) if len(size) == 1 else matrix

    sources = {name: partial(make, size) for name, size in tensor_shapes(config).items()}
    write_checkpoint(folder, config, sources, dtype=DTYPE)
    toy_tokenizer(config.vocab_size).save(folder)


def ask_once(address: tuple[str, int], number: int, *, new_tokens: int, prompt_tokens: int) -> int:
    """New tokens of one request."""
    prompt = random.Random(number).choices(range(2, 500), k=prompt_tokens)
    body = {"model": "random", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    with closing(HTTPConnection(*address, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    if "usage" not in answer:
        raise RuntimeError(f"the server answered {answer}")
    return int(answer["usage"]["completion_tokens"])
