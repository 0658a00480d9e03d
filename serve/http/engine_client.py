"""The asyncio side of the engine: watches it, replaces it when it dies or hangs, and hands its outputs to requests.

    with engine.open_call(num_choices) as call:     # room in the queue, or 429/503 at once
        call.submit(prompts, params)
        async for outputs in call:                  # until every choice has finished, or 503/504
            ...
                                                    # leaving early aborts what still runs

Everything runs on one event loop; nothing here blocks it or waits for the engine but the `async` methods.
"""

import asyncio
import logging
import shutil
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from serve.http.adapters import AdapterRegistry
from serve.http.engine_process import ENGINE_COMMAND, EngineProcesses, engine_arguments
from serve.http.errors import ApiError, invalid, late, overloaded, unavailable
from serve.http.metrics import ChoiceTimer, Metrics, RequestSummary, summarize
from serve.http.options import ServerOptions
from serve.http.response_cache import Answer, ResponseCache
from serve.messages import (
    LENGTH,
    Abort,
    AdapterLoaded,
    Add,
    Failed,
    FromEngine,
    Ping,
    Pong,
    ProtocolError,
    Ready,
    Rejected,
    Report,
    Shutdown,
    ToEngine,
    decode_from_engine,
    frame,
)
from serve.outputs import RequestOutput
from serve.sampling_params import SamplingParams
from serve.tenant import Tenant

MAX_RESTARTS_PER_MINUTE = 5
STOP_S = 1.0
"""How long an engine that was told to leave may take."""
EXIT_S = 1.0
"""How long an engine that has closed its socket may take to exit."""
PING_S = 0.5
"""How often the engine's loop is asked whether it still turns, and how soon it has to answer so as not to be silent."""
QUEUE_GRACE_S = 1.0
"""Between two steps the engine itself refuses what waited too long; after this the HTTP process does, in any case."""
MAX_UNREAD_BYTES = 256 * 1024
UNREAD_S = 1.0
"""Outputs that pile up are a slow reader's only if nothing was taken for this long; else they came in one burst."""
log = logging.getLogger("potstill.server")


class EngineClient:
    """One engine process after another, as seen by the HTTP side."""

    def __init__(self, options: ServerOptions, metrics: Metrics, *, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """`command` runs the engine process; its arguments are put behind it."""
        self.metrics = metrics
        self.max_sequences = options.engine.max_num_seqs + options.max_queue
        """Choices admitted at once: a full batch and a full queue behind it."""
        self.num_sequences = 0
        self.num_calls = 0
        self.info: Ready | None = None
        """What the newest engine said of itself; None until the first is warm."""
        self.draining = False
        self.failure: str | None = None
        """Why there will be no further engine."""
        self.is_refused = False  # by the engine, for its options or files
        self.ended = asyncio.Event()
        """Set when the engine is gone for good: stopped, or failed."""
        self.adapters = AdapterRegistry(options.engine, metrics, self.send)
        self.answers = ResponseCache(options.response_cache_bytes, metrics) if options.response_cache_bytes else None
        self._folder = Path(tempfile.mkdtemp(prefix="potstill-"))  # mode 0700: no other user can connect
        arguments = [*command, *engine_arguments(options)]
        self._engines = EngineProcesses(arguments, self._folder, has_spare=options.spare_engine)
        self._loads_adapters = options.engine.enable_lora
        self._requests: dict[str, tuple[Call, int]] = {}
        self._pings: dict[int, asyncio.Future[bool]] = {}
        self._num_pings = 0
        self._timeout_s = options.engine_timeout_s
        self.queue_wait_s = options.queue_wait_s
        self._writer: asyncio.StreamWriter | None = None
        self._is_stalled = False
        """Whether the latest engine hung and was given up."""
        self._ready = asyncio.Event()
        self._stopping = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """True while a warm engine is connected."""
        return self._writer is not None

    def start(self) -> None:
        """Begin to run engines, in the background."""
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> bool:
        """Wait for the first warm engine; False when there will be none (`failure` says why)."""
        ready, ended = asyncio.create_task(self._ready.wait()), asyncio.create_task(self.ended.wait())
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        ended.cancel()
        return self._ready.is_set()

    async def stop(self) -> None:
        """End the engine, in any state, and remove its socket."""
        self._stopping = True
        if self._supervisor is not None:
            self.send(Shutdown())
            done, _ = await asyncio.wait({self._supervisor}, timeout=STOP_S if self.is_ready else 0.0)
            if not done:
                self._supervisor.cancel()
                await asyncio.wait({self._supervisor})
        self.ended.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ping(self, timeout_s: float) -> bool:
        """True when the engine's loop answers in time."""
        if not self.is_ready:
            return False
        self._num_pings += 1
        number = self._num_pings
        answer = self._pings[number] = asyncio.get_running_loop().create_future()
        self.send(Ping(number))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return False
        finally:
            del self._pings[number]

    def open_call(self, num_sequences: int, *, deadline_s: float | None = None) -> "Call":
        """Reserve room for this many choices, which have `deadline_s` to finish, counted from now.

        ApiError: 503 when there is no engine, 429 when the queue is full.
        """
        if self.draining:
            raise unavailable("the server is shutting down", "draining")
        if not self.is_ready:
            raise self.absence()
        if num_sequences > self.max_sequences:
            raise invalid(f"the request asks for {num_sequences} choices at once; at most {self.max_sequences} fit")
        if self.num_sequences + num_sequences > self.max_sequences:
            self.metrics.admission_rejections.labels(reason="queue_full").inc()
            raise overloaded(f"the queue is full: {self.num_sequences} choices are running or waiting")
        return Call(self, num_sequences, deadline_s)

    def register(self, request_id: str, call: "Call", prompt_index: int) -> None:
        """Outputs of this request go to `call`."""
        self._requests[request_id] = call, prompt_index

    def forget(self, request_id: str) -> None:
        """Outputs of this request, should more arrive, go nowhere."""
        self._requests.pop(request_id, None)

    def adapter_requests(self) -> Iterator[tuple[str, bool]]:
        """Of each request that goes through an adapter, the name of that and whether it runs."""
        for request_id, (call, _) in self._requests.items():
            if call.adapter is not None:
                yield call.adapter, call.has_started(request_id)

    def send(self, message: ToEngine) -> None:
        """Put a message on its way; without an engine it is dropped, since its requests have been failed."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _supervise(self) -> None:
        began: deque[float] = deque(maxlen=MAX_RESTARTS_PER_MINUTE + 1)
        try:
            while not self._stopping and self.failure is None:
                began.append(time.monotonic())
                await self._run_engine()
                if self._stopping or self.failure is not None:
                    break
                if not self._ready.is_set():
                    self.failure = "the engine process ended while it was loading; its output says why"
                elif len(began) == began.maxlen and time.monotonic() - began[0] < 60.0:
                    self.failure = f"the engine died {len(began)} times within a minute"
                else:
                    self.metrics.engine_restarts.inc()
        except Exception as error:
            log.exception("no engine process can be run")
            self.failure = f"no engine process can be run: {error}"
        finally:
            self.ended.set()
            await self._engines.close()

    async def _run_engine(self) -> None:
        """One engine process, from its start to its end."""
        engine = await self._engines.take()
        # What the first is started with has to fit; later ones load what can be loaded.
        engine.call_up(self.adapters.folders if self._loads_adapters and self.info is not None else None)
        patience_s = 0.0
        try:
            if (connection := await engine.connection()) is not None:
                await self._serve_until_silent(*connection)
            patience_s = 0.0 if self._is_stalled else EXIT_S
        finally:
            code = await engine.end(patience_s)
        if code is None:
            self.failure = "the engine process was killed, but the system does not let it end"
        elif not self._stopping and self.failure is None:
            log.error("the engine process ended with code %s", code)

    async def _serve_until_silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection until the engine closes it, or is given up because its loop has stopped turning."""
        serving = asyncio.create_task(self._serve_connection(reader, writer))
        watching = asyncio.create_task(self._watch())
        preparing = asyncio.create_task(self._engines.keep_spare())
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                self._give_up()
        finally:
            serving.cancel()
            watching.cancel()
            preparing.cancel()
            await asyncio.wait({serving, watching, preparing})
        if not serving.cancelled():
            serving.result()

    async def _watch(self) -> None:
        """Return once a warm engine has answered no ping for the timeout.

        Pings are answered between two steps, so that a single step may take that long. Pings are counted and not the
        clock: while both processes are stopped, none is missed.
        """
        silent_s = 0.0
        while silent_s < self._timeout_s:
            if not self.is_ready or await self.ping(PING_S):
                silent_s = 0.0
                await asyncio.sleep(PING_S)
            else:
                silent_s += PING_S

    def _give_up(self) -> None:
        self._is_stalled = True
        self.metrics.engine_stalls.inc()
        log.error(
            "the engine has ended no step for %g s: it is killed and replaced; should steps take that long, raise "
            "--engine-timeout or lower --max-num-batched-tokens",
            self._timeout_s,
        )

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read messages until the engine closes the connection; then what still waits for it is failed."""
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                message = decode_from_engine(await reader.readexactly(size))
                if self.answers is not None and isinstance(message, (Ready, AdapterLoaded)):
                    self.answers.forget()
                if isinstance(message, Ready):
                    for name in message.lost_adapters:
                        self.adapters.forget(name)
                    self._writer, self.info, self._is_stalled = writer, message, False
                    self.metrics.engine_started(message)
                    self._ready.set()
                else:
                    self._receive(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except ProtocolError:
            log.exception("the engine sent something that is not a message")
        finally:
            self._writer = None
            self.metrics.engine_ended()
            writer.transport.abort()  # what has not been sent would wait for ever to be read
            self._fail_all()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Report(outputs, stats, started):
                self.metrics.record_stats(stats)
                for request_id in started:
                    if request_id in self._requests:
                        self._requests[request_id][0].record_start(request_id)
                for output in outputs:
                    if output.request_id in self._requests:
                        call, prompt_index = self._requests[output.request_id]
                        call.put(prompt_index, output)
            case Rejected(request_id, reason, overload):
                if request_id in self._requests:
                    if overload:
                        self.metrics.admission_rejections.labels(reason="queue_wait").inc()
                    self._requests[request_id][0].fail(overloaded(reason) if overload else invalid(reason))
            case Pong(number, stats):
                self.metrics.record_stats(stats)
                if number in self._pings and not self._pings[number].done():
                    self._pings[number].set_result(True)
            case AdapterLoaded(refusal):
                self.adapters.answered(refusal)
            case Failed(reason):
                self.failure, self.is_refused = reason, True

    def absence(self) -> ApiError:
        """Why there is no engine at the moment."""
        if self._stopping or self.ended.is_set():
            return unavailable("the server is shutting down", "engine_stopped")
        if self.info is None:
            return unavailable("the engine is starting", "engine_starting")
        if self._is_stalled:
            return unavailable("the engine did not answer any more; a fresh one is starting", "engine_stalled")
        return unavailable("the engine died; a fresh one is starting", "engine_died")

    def _fail_all(self) -> None:
        for call, _ in list(self._requests.values()):
            call.fail(self.absence())
        self.adapters.engine_ended(self.absence())
        for answer in self._pings.values():
            if not answer.done():
                answer.set_result(False)


class Call:
    """One HTTP request as the engine sees it: room for its choices, then lists of outputs, as (prompt index, output).

    A context manager: leaving it aborts what still runs and gives the room back. Made by `EngineClient.open_call`.
    """

    def __init__(self, client: EngineClient, num_sequences: int, deadline_s: float | None) -> None:
        self._client = client
        self._metrics = client.metrics.of(None)
        self._num_running = num_sequences
        """Choices that have not finished; each makes room for another request when it does."""
        self._arrival = time.monotonic()
        self._timers: dict[tuple[int, int], ChoiceTimer] = {}
        self._request_ids: list[str] = []
        self._started: dict[str, float] = {}
        self._outputs: list[tuple[int, RequestOutput]] = []
        self._unread_bytes = 0
        self._last_read = self._arrival
        self._params: SamplingParams | None = None
        self._answer: Answer | None = None
        self.priority = 0
        self.adapter: str | None = None
        """What its requests go through."""
        self._error: ApiError | None = None
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._alarms: list[asyncio.TimerHandle] = []
        self.deadline = None if deadline_s is None else self._arrival + deadline_s
        """When it is late, in seconds of `time.monotonic()`: then it ends, whatever the engine is doing."""
        if self.deadline is not None:
            self._alarms.append(self._loop.call_at(self.deadline, lambda: self.fail(late())))
        client.num_sequences += num_sequences
        client.num_calls += 1

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        tenant: Tenant | None = None,
        adapter: str | None = None,
    ) -> None:
        """Send the prompts (token ids) to the engine.

        ApiError 503 when the engine has died since the call was opened, 504 when its deadline has passed.
        """
        if self._error is not None:
            raise self._error
        if not self._client.is_ready:
            raise self._client.absence()
        if adapter is not None:
            self._client.adapters.use(adapter)
        self.adapter = adapter
        self._metrics, self._params = self._client.metrics.of(adapter), params
        if self._client.answers is not None:
            self._last_read = time.monotonic()
            self._answer = self._client.answers.open(prompts, params, tenant, adapter)
            for prompt_index, output in self._answer.replay():
                self.put(prompt_index, output)
            if not self._num_running:
                return
        call_id = uuid.uuid4().hex
        for prompt_index, prompt in enumerate(prompts):
            request_id = f"{call_id}-{prompt_index}"
            self._request_ids.append(request_id)
            self._client.register(request_id, self, prompt_index)
            self._client.send(
                Add(request_id, prompt, params, self._arrival, self.priority, self.deadline, tenant, adapter)
            )
        longest_wait = self._arrival + self._client.queue_wait_s + QUEUE_GRACE_S
        self._alarms.append(self._loop.call_at(longest_wait, self._end_wait))

    def _end_wait(self) -> None:
        """Fail a call that the engine has neither taken up nor refused by now."""
        if len(self._started) < len(self._request_ids):
            self._client.metrics.admission_rejections.labels(reason="queue_wait").inc()
            reason = f"the request waited {self._client.queue_wait_s:g} s for a place in the batch"
            self.fail(ApiError(504, reason, code="queue_timeout", retry_after_s=1))

    def record_start(self, request_id: str) -> None:
        """A request has entered the batch."""
        self._started[request_id] = time.monotonic()
        self._metrics.queue_time.observe(self._started[request_id] - self._arrival)

    def has_started(self, request_id: str) -> bool:
        return request_id in self._started

    def put(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in one output of the engine."""
        key = prompt_index, output.index
        if key not in self._timers:
            started = self._started.get(output.request_id)
            again = self._answer is not None and self._answer.is_known
            self._timers[key] = ChoiceTimer(self._metrics, self._arrival, started, is_computed=not again)
        self._timers[key].record(output)
        if self._answer is not None:
            self._answer.record(prompt_index, output)
        if output.finished:
            self._release(1)
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

    def summary(self) -> RequestSummary:
        """What became of the call so far."""
        queue_s = min(self._started.values()) - self._arrival if self._started else None
        return summarize(self._metrics, self._params, queue_s, self._timers)

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> list[tuple[int, RequestOutput]]:
        """All that is there: at least one, of a step those of all choices."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if not self._num_running:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        taken, self._outputs = self._outputs, []
        self._unread_bytes, self._last_read = 0, time.monotonic()
        return taken

    def __enter__(self) -> "Call":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._client.num_calls -= 1

    def _end(self) -> None:
        for alarm in self._alarms:
            alarm.cancel()
        if self._num_running and self._request_ids:
            self._client.send(Abort(self._request_ids))
            if (reason := _reason(self._error)) is not None:
                self._metrics.request_success[reason].inc(self._num_running)
        for request_id in self._request_ids:
            self._client.forget(request_id)
        self._release(self._num_running)

    def _release(self, num_sequences: int) -> None:
        self._num_running -= num_sequences
        self._client.num_sequences -= num_sequences


def _reason(error: ApiError | None) -> str | None:
    """The finish reason of choices that a call ends before the engine has; None for those that it had refused."""
    if error is None or error.status == 408:
        return "abort"
    if error.code == "deadline_exceeded":
        return "deadline"
    return "error" if error.status == 503 else None


def _size(output: RequestOutput) -> int:
    """Bytes, roughly, that an output will take in a stream."""
    entries = sum(1 + len(position.top) for position in output.logprobs or ())
    return 200 + len(output.new_text) + 100 * entries
