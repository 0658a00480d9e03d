"""Mixed traffic for a while: clients that leave, bad requests, bursts, swaps of adapters and drafts, broken engines.

    python -m tests.soak --minutes 30      # --write: and keep what it found as bench/results/soak-cpu.json

Of ten requests six are normal, two leave, one is invalid, one is a burst of eight; half of the normal ones name an
adapter. Adapters come, change and go all the time; a newer draft is published every 20 s: better, as good,
or useless, which has to be taken back. Each minute an engine is killed or stopped, but in the last third, where the
memory of one engine is watched. At the end: every answer was what the model alone says or an honest refusal, all is
idle, and memory, open files and threads of both processes are flat.

    python -m tests.soak --minutes 3 --leak files      # of a server that leaks: has to end with an error that says so
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.common import write_result
from model.text.tokenizer import Tokenizer
from tests.model.test_fused_adapters import save_adapters
from tests.serve.http_server import REAL, RunningServer, running_server, save_tiny_folder
from tests.serve.leaking_server import LEAKING, LEAKS
from tests.serve.test_adapter_slots import CONFIGS, merged
from tests.serve.test_draft_watch import publish_draft
from tests.serve.test_speculation import noisy_twin
from tests.serve.toys import greedy_oracle
from tests.tiny import tiny_model

CLIENTS = 6
PROMPTS = [[5 + (7 * number + place) % 300 for place in range(10 + 20 * number)] for number in range(8)]
NEW_TOKENS = 24
BASE, REPLACED = "tiny", "replaced"
"""Names of the model itself, and of an adapter that is replaced in place by one of the others."""
SAMPLE_S, ADAPTER_S, DRAFT_S, BREAK_S = 2.0, 0.5, 20.0, 60.0
"""Between two samples of memory, changes of adapters, drafts, broken engines."""
IDLE_S = 8.0
"""Until connections that clients have closed are closed here as well."""
SWAP_LIMIT_S = 60.0
"""A published draft is looked for once a second and verified on 60 tokens; an engine may have to start meanwhile."""
MAX_MIB_PER_MINUTE = 1.0
MORE_FILES, MORE_THREADS = 2, 8
"""At rest in the end than before all traffic: pools of threads fill as they are used."""
ALLOWED = {429, 503, 504}
"""What overload and the loss of an engine may be answered with."""


@dataclass(frozen=True)
class Held:
    """What a process holds; nothing once it is gone."""

    mib: float = 0.0
    """Resident memory."""
    files: int = 0
    threads: int = 0

    @classmethod
    def by(cls, pid: int | None) -> "Held":
        process = Path(f"/proc/{pid}")
        try:
            pages = int((process / "statm").read_text().split()[1])
            files, threads = (len(os.listdir(process / name)) for name in ("fd", "task"))
        except OSError:
            return cls()
        return cls(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, threads)


@dataclass(frozen=True)
class Sample:
    """Both processes at a moment of a run."""

    minutes: float
    http: Held
    engine: Held

    @classmethod
    def of(cls, server: RunningServer, minutes: float) -> "Sample":
        return cls(minutes, Held.by(server.process.pid), Held.by(next(iter(server.engine_pids()), None)))


class Files:
    """The models: target, draft, adapters by name, and where newer drafts are published."""

    def __init__(self, scratch: Path) -> None:
        self.target = save_tiny_folder(scratch / "target")
        self.draft = save_tiny_folder(scratch / "draft", noisy_twin(tiny_model()))
        self.newer = scratch / "newer"
        self.root = scratch / "adapters"
        self.adapters = {path.name: str(path) for path in save_adapters(self.root, tiny_model(), CONFIGS[:3])}

    def options(self) -> tuple[str, ...]:
        """The server takes two adapters at once and keeps three, of four names."""
        return (
            *("--verify", str(self.target), "--speculative-config", '{"num_speculative_tokens": 3}'),
            *("--watch-draft", str(self.newer), "--watch-draft-tokens", "60", "--served-model-name", BASE),
            *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "7"),
            *("--allowed-lora-path", str(self.root), "--dtype", "float32", "--engine-timeout", "3"),
            *("--kv-cache-bytes", "64M", "--max-num-seqs", "8"),
        )

    def expected(self) -> dict[str, list[set[str]]]:
        """By name and prompt, what may be answered: one text, or for the replaced adapter one of each it has been."""
        decode = Tokenizer.load(self.target).decode
        found: dict[str, list[set[str]]] = {}
        for name, folder in [(BASE, None), *self.adapters.items()]:
            model = merged(folder)
            found[name] = [{decode(greedy_oracle(model, prompt, NEW_TOKENS))} for prompt in PROMPTS]
        by_adapter = [found[name] for name in self.adapters]
        return found | {REPLACED: [set().union(*texts) for texts in zip(*by_adapter, strict=True)]}


class Soak:
    """One run: its traffic, its faults, and what it has seen."""

    def __init__(self, server: RunningServer, files: Files, seconds: float) -> None:
        self._server, self._files = server, files
        self._begin = time.monotonic()
        self._end = self._begin + seconds
        self._draw = random.Random(1)
        self._expected = files.expected()
        self.seen: Counter[str] = Counter()
        self.before = Sample.of(server, 0.0)
        """At rest."""
        self.samples: list[Sample] = []

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._end

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"{self._server.url}/v1", timeout=60, limits=limits) as http:
            clients = (self._client(http) for _ in range(CLIENTS))
            others = self._swap_adapters(http), self._swap_drafts(), self._break_engines(), self._sample()
            await asyncio.gather(*clients, *others)

    # Traffic

    def _body(self, prompt: list[int], model: str = BASE) -> dict[str, object]:
        return {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self._is_over:
            kind = self._draw.choices(["normal", "leave", "invalid", "burst"], [6, 2, 1, 1])[0]
            if kind == "burst":
                await asyncio.gather(*(self._normal(http) for _ in range(8)))
            else:
                await getattr(self, f"_{kind}")(http)
            await asyncio.sleep(self._draw.uniform(0, 0.1))

    def _model(self) -> str:
        return BASE if self._draw.random() < 0.5 else self._draw.choice([*self._files.adapters, REPLACED])

    async def _normal(self, http: httpx.AsyncClient) -> None:
        number, model = self._draw.randrange(len(PROMPTS)), self._model()
        answer = await http.post("/completions", json=self._body(PROMPTS[number], model))
        allowed = ALLOWED if model == BASE else ALLOWED | {404}  # it has been unloaded
        if answer.status_code == 200:
            if answer.json()["choices"][0]["text"] not in self._expected[model][number]:
                raise RuntimeError(f"prompt {number} to {model} was answered differently: {answer.text}")
        elif answer.status_code not in allowed:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        self.seen[f"{answer.status_code}{'' if model == BASE else ' to adapters'}"] += 1

    async def _leave(self, http: httpx.AsyncClient) -> None:
        body = self._body(self._draw.choice(PROMPTS), self._model()) | {"max_tokens": 500, "stream": True}
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

    # Swaps

    async def _swap_adapters(self, http: httpx.AsyncClient) -> None:
        """Load one that is not loaded; of one that is, unload it sometimes, or put another in its place."""
        while not self._is_over:
            loaded = {card["id"] for card in (await http.get("/models")).json()["data"]}
            name = self._draw.choice([*self._files.adapters, REPLACED])
            if name in loaded and self._draw.random() < 0.3:
                did, answer = "unloaded", await http.post("/unload_lora_adapter", json={"lora_name": name})
            else:
                path = self._draw.choice([*self._files.adapters]) if name == REPLACED else name
                body = {"lora_name": name, "lora_path": path, "load_inplace": True}
                did, answer = "loaded", await http.post("/load_lora_adapter", json=body)
            if answer.status_code not in (200, 503):
                raise RuntimeError(f"adapter {name} is not {did}: {answer.status_code} {answer.text}")
            self.seen[f"adapters {did}" if answer.status_code == 200 else "503"] += 1
            await asyncio.sleep(ADAPTER_S)

    async def _swap_drafts(self) -> None:
        """Each newer draft has to be swapped in; a useless one taken back, unless its engine was lost meanwhile."""
        drafts = {"better": tiny_model(), "as good": noisy_twin(tiny_model()), "useless": tiny_model(seed=9)}
        for kind in itertools.cycle(drafts):
            await asyncio.sleep(DRAFT_S)
            if time.monotonic() > self._end - SWAP_LIMIT_S:
                return
            before = await self._counts()
            await asyncio.to_thread(publish_draft, self._files.newer, drafts[kind])
            self.seen["drafts published"] += 1
            await self._wait_grown("draft_swaps", before, kind)
            if kind == "useless":
                await self._wait_grown("draft_rollbacks", before, kind)

    async def _counts(self) -> dict[str, float]:
        names = ("draft_swaps", "draft_rollbacks", "engine_restarts")
        return {name: await asyncio.to_thread(self._server.metric, f"potstill:{name}_total") for name in names}

    async def _wait_grown(self, name: str, before: dict[str, float], kind: str) -> None:
        deadline = time.monotonic() + SWAP_LIMIT_S
        while (now := await self._counts())[name] == before[name]:
            if name == "draft_rollbacks" and now["engine_restarts"] != before["engine_restarts"]:
                return  # a fresh engine does not know how good the draft before it was
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} has not grown {SWAP_LIMIT_S:g} s after a {kind} draft was published")
            await asyncio.sleep(0.2)

    # Faults and memory

    async def _break_engines(self) -> None:
        last = self._begin + 2 / 3 * (self._end - self._begin)
        for fault in itertools.cycle([signal.SIGKILL, signal.SIGSTOP]):
            await asyncio.sleep(min(BREAK_S, max(1.0, last - 1 - time.monotonic())))
            if time.monotonic() > last:
                return
            os.kill(self._server.engine_pids()[0], fault)  # behind it stands a spare, which has to take over
            self.seen["broken"] += 1

    async def _sample(self) -> None:
        while not self._is_over:
            self.samples.append(Sample.of(self._server, (time.monotonic() - self._begin) / 60))
            await asyncio.sleep(SAMPLE_S)


def mib_a_minute(points: list[tuple[float, float]]) -> float:
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 3)


def lag_below(counts: dict[float, float], share: float) -> float:
    """The least edge of a histogram below which so many of its observations are."""
    return min(edge for edge, count in counts.items() if count >= share * max(counts.values()))


def check(server: RunningServer, soak: Soak, minutes: float) -> dict[str, Any]:
    """What was found by a run that went well; RuntimeError for one that did not."""
    server.wait_healthy(60)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        server.wait_for(f"potstill:{name}", 0.0)
    restarts = server.metric("potstill:engine_restarts_total")
    if restarts != soak.seen["broken"]:
        raise RuntimeError(f"{soak.seen['broken']} engines were broken and {restarts} replaced")
    time.sleep(IDLE_S)
    after = Sample.of(server, minutes)
    found = {
        "seen": dict(sorted(soak.seen.items())),
        "draft_swaps": server.metric("potstill:draft_swaps_total"),
        "draft_rollbacks": server.metric("potstill:draft_rollbacks_total"),
        **growth(soak.before, soak.samples, after),
        "http_process_at_rest": asdict(after.http),
        "engine_process_at_rest": asdict(after.engine),
        "event_loop_lag_s_p99_below": lag_below(server.histogram("potstill:event_loop_lag_seconds"), 0.99),
    }
    if grown := leaks(found):
        raise RuntimeError(f"{' and '.join(grown)} grow: {found}")
    return found


def growth(before: Sample, samples: Sequence[Sample], after: Sample) -> dict[str, float]:
    """Memory by the minute under traffic; files and threads from rest to rest.

    The first third fills caches of the HTTP process. The engine is the last one, which no fault has ended, once it is
    warm; its files and threads do not come and go with requests.
    """
    late = [sample for sample in samples if sample.minutes > after.minutes / 3]
    warm = [sample for sample in samples if sample.minutes > 0.78 * after.minutes]
    return {
        "http_mib_a_minute": mib_a_minute([(sample.minutes, sample.http.mib) for sample in late]),
        "engine_mib_a_minute": mib_a_minute([(sample.minutes, sample.engine.mib) for sample in warm]),
        "more_http_files": after.http.files - before.http.files,
        "more_http_threads": after.http.threads - before.http.threads,
        "more_engine_files": after.engine.files - warm[0].engine.files,
        "more_engine_threads": after.engine.threads - warm[0].engine.threads,
    }


def leaks(grown: Mapping[str, Any]) -> list[str]:
    """Which kinds of what `growth` found are too much."""
    limits = {"mib_a_minute": MAX_MIB_PER_MINUTE, "files": MORE_FILES, "threads": MORE_THREADS}
    words = {"mib_a_minute": "memory"}
    return [
        f"{words.get(kind, kind)} of the {process} process"
        for process in ("http", "engine")
        for kind, limit in limits.items()
        for name, more in grown.items()
        if process in name and name.endswith(kind) and more > limit
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--leak", choices=LEAKS, help="let each request leak this in the server")
    arguments = parser.parse_args()
    program = (*LEAKING, arguments.leak) if arguments.leak else REAL
    with tempfile.TemporaryDirectory() as scratch:
        files = Files(Path(scratch))
        with running_server(
            files.draft, Path(scratch) / "log", *files.options(), program=program, spare=True
        ) as server:
            soak = Soak(server, files, 60 * arguments.minutes)
            asyncio.run(soak.run())
            found = check(server, soak, arguments.minutes)
    print(found)
    if arguments.write:
        command = f"python -m tests.soak --minutes {arguments.minutes:g}"
        write_result("soak-cpu", command, {"minutes": arguments.minutes, **found})


if __name__ == "__main__":
    main()
