"""One HTTP request as the engine sees it: one or several prompts with n choices each, and the outputs they bring."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from serve.http.errors import ApiError
from serve.http.metrics import ChoiceTimer
from serve.messages import Abort, Add
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve.http.engine_client import EngineClient

MAX_UNREAD_BYTES = 256 * 1024
UNREAD_S = 1.0
"""Outputs that pile up are a slow reader's only if nothing was taken for this long; else they came in one burst."""


class Call:
    """Places reserved in the engine, then the outputs of what was submitted, as (prompt index, output).

    A context manager: leaving it aborts what still runs and gives the places back. Made by `EngineClient.open_call`.
    """

    def __init__(self, client: "EngineClient", num_sequences: int) -> None:
        self._client = client
        self._metrics = client.metrics.of(None)
        self._places = num_sequences
        """Places still held; one is given back with every choice that finishes."""
        self._arrival = time.monotonic()
        self._timers: dict[tuple[int, int], ChoiceTimer] = {}
        self._request_ids: list[str] = []
        self._started: dict[str, float] = {}
        self._outputs: deque[tuple[int, RequestOutput]] = deque()
        self._unread_bytes = 0
        self._last_read = self._arrival
        self._error: ApiError | None = None
        self._news = asyncio.Event()
        client.num_sequences += num_sequences
        client.num_calls += 1

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Send the prompts (token ids) to the engine; `deadline_s` counts from the arrival of the HTTP request.

        ApiError 503 when the engine has died since the places were reserved.
        """
        if not self._client.is_ready:
            raise self._client.absence()
        self._metrics = self._client.metrics.of(adapter)
        call_id = uuid.uuid4().hex
        deadline = None if deadline_s is None else self._arrival + deadline_s
        for prompt_index, prompt in enumerate(prompts):
            request_id = f"{call_id}-{prompt_index}"
            self._request_ids.append(request_id)
            self._client.register(request_id, self, prompt_index)
            self._client.send(Add(request_id, prompt, params, self._arrival, priority, deadline, cache_salt, adapter))

    def record_start(self, request_id: str) -> None:
        """The engine has given a request its place in the batch."""
        self._started[request_id] = time.monotonic()
        self._metrics.queue_time.observe(self._started[request_id] - self._arrival)

    def put(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in one output of the engine."""
        key = prompt_index, output.index
        if key not in self._timers:
            started = self._started.get(output.request_id)
            self._timers[key] = ChoiceTimer(self._metrics, self._arrival, started)
        self._timers[key].record(output)
        if output.finished:
            self._give_back(1)
        self._outputs.append((prompt_index, output))
        self._unread_bytes += _size(output)
        if self._unread_bytes > MAX_UNREAD_BYTES and time.monotonic() - self._last_read > UNREAD_S:
            self.fail(ApiError(408, "the response was not read fast enough", code="slow_reader"))
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """End the call with this error: what waits to be read is dropped, what still runs is aborted."""
        self._error = self._error or error
        self._outputs.clear()
        self._end()
        self._news.set()

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if not self._places:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        prompt_index, output = self._outputs.popleft()
        self._unread_bytes -= _size(output)
        self._last_read = time.monotonic()
        return prompt_index, output

    def __enter__(self) -> "Call":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._client.num_calls -= 1

    def _end(self) -> None:
        if self._places and self._request_ids:
            self._client.send(Abort(self._request_ids))
        for request_id in self._request_ids:
            self._client.forget(request_id)
        self._give_back(self._places)

    def _give_back(self, places: int) -> None:
        self._places -= places
        self._client.num_sequences -= places


def _size(output: RequestOutput) -> int:
    """Bytes, roughly, that an output will take in a stream."""
    entries = sum(1 + len(position.top) for position in output.logprobs or ())
    return 200 + len(output.new_text) + 100 * entries
