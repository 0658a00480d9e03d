"""One simulated replica: the engine's own Scheduler and KVCache, and a roofline in place of a device.

It commits a step as the engine does: what was computed is counted, whoever has computed all its tokens gets another
one, full pages are offered to others, and who has its answer leaves. Nothing is planned ahead, and the host takes no
time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.cluster.trace import Request
from model.cost import Roofline
from serve.engine.kv_cache import PAGE_SIZE, BlockTable, KVCache, pages_for
from serve.engine.requests import Sequence
from serve.engine.scheduler import Chunk, Scheduler
from serve.replicas import ReplicaLoad
from serve.sampling_params import SamplingParams

NO_TEXT: Any = None
"""No scheduler reads what a sequence says."""


@dataclass(frozen=True)
class EngineShape:
    """What each replica is."""

    roofline: Roofline
    num_pages: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    max_model_len: int = 8_192


class Replica:
    """Requests come in, steps take time, tokens come out."""

    def __init__(self, name: str, shape: EngineShape, began_s: float) -> None:
        self.name, self.shape, self.began_s = name, shape, began_s
        self.ended_s: float | None = None
        """When it was given back, or died."""
        self.is_ready = self.is_draining = False
        self.cache = KVCache(shape.num_pages)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_model_len,
        )
        self.requests: dict[int, tuple[Request, Sequence]] = {}
        self.outstanding_tokens = 0
        """Of prompts and answers that are not finished."""
        self._chunks: tuple[Chunk, ...] = ()

    @property
    def takes_requests(self) -> bool:
        return self.is_ready and not self.is_draining and self.ended_s is None

    @property
    def is_computing(self) -> bool:
        return bool(self._chunks)

    @property
    def load(self) -> ReplicaLoad:
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return ReplicaLoad(running, waiting, self.cache.num_used / self.cache.num_pages)

    def add(self, request: Request) -> None:
        """Have it wait for the next step."""
        prompt, most = request.prompt, self.shape.max_model_len
        if len(prompt) + request.answer > min(most, PAGE_SIZE * self.shape.num_pages):
            raise ValueError(f"a conversation of {len(prompt) + request.answer} tokens does not fit a replica")
        sequence = Sequence(
            id=request.number,
            request_id=str(request.number),
            index=0,
            params=SamplingParams(max_tokens=request.answer),
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            arrival=request.arrival_s,
            priority=0,
            deadline=None,
            seed=0,
            end_token_ids=(),
            table=BlockTable(pages_for(most)),
            text=NO_TEXT,
        )
        self.requests[request.number] = request, sequence
        self.outstanding_tokens += len(prompt) + request.answer
        self.scheduler.add(sequence)

    def begin_step(self) -> float:
        """Plan a step over what there is; how many seconds it takes."""
        schedule = self.scheduler.schedule()
        self._chunks = schedule.chunks
        if not self._chunks:
            raise RuntimeError(f"{self.name} has requests and can compute none of them")
        rows = sum(self._sequence(chunk).num_pending == chunk.num_tokens for chunk in self._chunks)
        return self.shape.roofline.step_s([(chunk.start, chunk.num_tokens) for chunk in self._chunks], rows)

    def _sequence(self, chunk: Chunk) -> Sequence:
        return self.requests[chunk.sequence_id][1]

    def end_step(self, now_s: float) -> Iterator[Request]:
        """Hand out tokens; those who have all of their answer now."""
        chunks, self._chunks = self._chunks, ()
        for chunk in chunks:
            request, sequence = self.requests[chunk.sequence_id]
            sequence.num_computed += chunk.num_tokens
            if not sequence.num_pending:
                sequence.tokens.append(sequence.tokens[-1])
                request.first_s = now_s if request.first_s is None else request.first_s
            if sequence.num_computed >= (sequence.table.num_published + 1) * PAGE_SIZE:
                self.cache.publish(sequence.table, sequence.tokens, sequence.num_computed)
            if sequence.num_output == request.answer:
                request.end_s = now_s
                self._forget(request, sequence)
                yield request

    def _forget(self, request: Request, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self.requests[request.number]
        self.outstanding_tokens -= len(request.prompt) + request.answer

    def die(self, now_s: float) -> list[Request]:
        """At once, also in the middle of a step; the requests that it had."""
        self.ended_s, self._chunks = now_s, ()
        had = list(self.requests.values())
        for request, sequence in had:
            self._forget(request, sequence)
        return [request for request, _ in had]
