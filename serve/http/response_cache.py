"""Answers of before for requests that would be answered the same: greedy ones, and those with a seed.

What the engine said is kept as it said it, output by output, and said again: so the answer has whatever form its
request asks for, streamed or whole. Its key is everything that an answer follows from, and the account with its salt:
nobody learns what others have asked. Beyond the bytes allowed, the answer used longest ago goes.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from serve.http.metrics import Metrics
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant

ENTRY_BYTES = 200
"""That an answer and an output of it take beside their content, roughly."""
NOBODY = Tenant()
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, RequestOutput]).decode
Parts = tuple[bytes, ...]


class ResponseCache:
    """Of one server; what an engine that has gone said is forgotten."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self.max_bytes, self._metrics = max_bytes, metrics
        self.num_bytes = 0
        self._answers: OrderedDict[bytes, Parts] = OrderedDict()
        """The one used longest ago first."""
        self._generation = 0
        """How often all was forgotten: what was under way meanwhile is not found again."""

    def open(
        self, prompts: Sequence[list[int]], params: SamplingParams, tenant: Tenant | None, adapter: str | None
    ) -> "Answer":
        """The answer to a request, if it is known; if not, what is said to it can be recorded there."""
        if not (params.is_greedy or params.seed is not None):
            return Answer(self, None, ())
        who = tenant or NOBODY
        what = self._generation, who.name, who.cache_salt, adapter, prompts, params
        key = hashlib.sha256(_encode(what)).digest()
        self._metrics.response_cache_queries.inc()
        if key not in self._answers:
            return Answer(self, key, (), num_choices=len(prompts) * params.n)
        self._metrics.response_cache_hits.inc()
        self._answers.move_to_end(key)
        return Answer(self, None, self._answers[key])

    def keep(self, key: bytes, parts: Parts) -> None:
        """Keep an answer, and let older ones go for it."""
        self._drop(key)
        self._answers[key] = parts
        self.num_bytes += size_of(parts)
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._answers)))
        self._metrics.response_cache_bytes.set(self.num_bytes)

    def forget(self) -> None:
        """The model, or an adapter, may be another one from here on."""
        self._answers.clear()
        self.num_bytes, self._generation = 0, self._generation + 1
        self._metrics.response_cache_bytes.set(0)

    def _drop(self, key: bytes) -> None:
        if (parts := self._answers.pop(key, None)) is not None:
            self.num_bytes -= size_of(parts)


class Answer:
    """What is known of a request's answer, or is being recorded."""

    def __init__(self, cache: ResponseCache, key: bytes | None, known: Parts, *, num_choices: int = 0) -> None:
        """`key`: under which it will be kept, if it may be."""
        self._cache, self._key, self._known = cache, key, known
        self._parts: list[bytes] = []
        self._num_bytes, self._num_left = ENTRY_BYTES, num_choices

    @property
    def is_known(self) -> bool:
        """Whether it is given again."""
        return bool(self._known)

    def replay(self) -> Iterator[tuple[int, RequestOutput]]:
        """All outputs, by number of the prompt; none, if it is not known. No prompt token was computed for them."""
        for prompt_index, output in map(_decode, self._known):
            yield prompt_index, replace(output, num_cached_tokens=output.num_prompt_tokens)

    def record(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in an output; the last of the last choice makes the answer known. One that fails never is."""
        if self._key is None:
            return
        part = _encode((prompt_index, output))
        self._parts.append(part)
        self._num_bytes += len(part) + ENTRY_BYTES
        self._num_left -= output.finish_reason in ("stop", "length")
        if self._num_bytes > self._cache.max_bytes:
            self._key, self._parts = None, []
        elif not self._num_left:
            self._cache.keep(self._key, tuple(self._parts))


def size_of(parts: Parts) -> int:
    """Bytes that an answer takes."""
    return ENTRY_BYTES + sum(len(part) + ENTRY_BYTES for part in parts)
