"""An engine without a model, run as the engine process of a real server: fast to start, and as slow or wild as told.

A prompt of up to three token ids is a script: [milliseconds a step, KiB of text a token, 1 to die]. A step
of 510 takes 3 s, one of 511 a minute. The prompt [9] is answered by whose it is, [8] by whether it may be stored.
Every step gives each running request one token; a request runs until max_tokens.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serve.config import EngineConfig
from serve.engine.process import main
from serve.messages import Ready
from serve.outputs import EngineStats, RequestOutput
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant

VOCAB_SIZE, MAX_MODEL_LEN = 512, 100_000


@dataclass
class Scripted:
    """One request."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float
    deadline: float | None
    origin: str
    """Of whom it is, and how urgent."""
    num_output: int = 0

    def text(self) -> str:
        """Of each token."""
        told = {(9,): self.origin, (8,): str(self.params.store)}
        return told.get(tuple(self.prompt), "x" * max(1, 1024 * self.script(1)))

    def script(self, place: int) -> int:
        return self.prompt[place] if place < len(self.prompt) <= 3 else 0


@dataclass
class Queues:
    """What stands in for the scheduler."""

    waiting: list[Scripted] = field(default_factory=list)
    running: list[Scripted] = field(default_factory=list)


class NoGrammars:
    """What stands in for compiled grammars: none is compiled, and all output is the script's."""

    def has(self, grammar: str) -> bool:
        return True


class ScriptedEngine:
    """The part of `serve.engine.engine.Engine` that the engine process uses."""

    def __init__(self, config: EngineConfig) -> None:
        if config.model.endswith("broken"):
            raise ValueError("the model is broken on purpose")
        if config.model.endswith("slow"):
            time.sleep(3)
        self.config = config
        self.scheduler = Queues()
        self.grammars = NoGrammars()
        self.steps = 0
        self.on_schedule: Callable[[], None] = lambda: None

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: float,
        priority: int,
        deadline: float | None,
        tenant: Tenant | None,
        adapter: str | None,
    ) -> None:
        if prompt_token_ids[0] == 7:
            raise ValueError("the engine does not like sevens")
        origin = f"{tenant and tenant.name} {tenant and tenant.weight} {priority}"
        self.scheduler.waiting.append(Scripted(request_id, prompt_token_ids, params, arrival, deadline, origin))

    def abort(self, request_id: str) -> None:
        for queue in (self.scheduler.waiting, self.scheduler.running):
            queue[:] = [request for request in queue if request.request_id != request_id]

    def close(self) -> None: ...

    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_pages=100,
            num_pages_used=len(self.scheduler.running),
            num_generation_tokens=self.steps,
            accepted_per_position=(0, 0),
        )

    def step(self) -> list[RequestOutput]:
        queues = self.scheduler
        while queues.waiting and len(queues.running) < self.config.max_num_seqs:
            queues.running.append(queues.waiting.pop(0))
        self.on_schedule()
        if any(request.script(2) for request in queues.running):
            os._exit(3)
        slowest = max((request.script(0) for request in queues.running), default=1)
        time.sleep({510: 3, 511: 60}.get(slowest, slowest / 1000))
        outputs = [self._token(request) for request in queues.running]
        queues.running[:] = [request for request in queues.running if request.num_output < request.params.max_tokens]
        return [output for several in outputs for output in several]

    def _token(self, request: Scripted) -> list[RequestOutput]:
        request.num_output += 1
        self.steps += 1
        late = request.deadline is not None and request.deadline < time.monotonic()
        if late:
            request.num_output = request.params.max_tokens
        ends = request.num_output >= request.params.max_tokens
        return [
            RequestOutput(
                request.request_id,
                index,
                new_token_ids=[5],
                new_text=request.text(),
                finish_reason="deadline" if late else "length" if ends else None,
                num_prompt_tokens=len(request.prompt),
                num_output_tokens=request.num_output,
            )
            for index in range(request.params.n)
        ]


def load(config: EngineConfig, kind: type[ScriptedEngine] = ScriptedEngine) -> tuple[ScriptedEngine, Ready]:
    engine = kind(config)
    return engine, Ready(
        model=config.model,
        draft=None,
        dtype="none",
        kv_cache_dtype="none",
        kv_bytes_per_token=0,
        device="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_pages=100,
        page_size=16,
        stats=engine.stats(),
    )


if __name__ == "__main__":
    raise SystemExit(main(load, prepare=lambda: None))
