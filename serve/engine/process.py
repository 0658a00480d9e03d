"""The process that owns the device: `python -m serve.engine.process --socket PATH --parent PID --options JSON`.

It imports what it needs, then waits for a line on its standard input that calls it up: only then it loads and connects.
One thread, one loop: take what the HTTP process has sent, run one step, send what it brought. A ping is answered by
this loop and nothing else, so an answer proves that steps still end. Any unexpected exception ends the process: the
HTTP process starts a fresh one, which is safer than going on with half a step applied.
"""

import argparse
import concurrent.futures
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from model.startup import import_torch
from serve.config import EngineConfig
from serve.logs import configure_logging
from serve.messages import (
    Abort,
    AdapterLoaded,
    Add,
    Failed,
    FromEngine,
    LoadAdapter,
    Ping,
    Pong,
    Ready,
    Rejected,
    Report,
    Shutdown,
    ToEngine,
    UnloadAdapter,
    decode_to_engine,
    frame,
    read_frame,
)

if TYPE_CHECKING:
    from model.files.adapter import Adapter
    from serve.engine.adapters import Adapters
    from serve.engine.engine import Engine

PR_SET_PDEATHSIG = 1
PREPARATION_POLL_S = 0.02
"""How long an idle engine waits for a grammar or an adapter before it listens again."""
log = logging.getLogger("potstill.engine")


class EngineSocket:
    """Messages over a connected Unix socket, in blocking style."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: FromEngine) -> None:
        self._socket.sendall(frame(message))

    def receive(self, *, wait: bool) -> Iterator[ToEngine]:
        """Messages that have arrived; with `wait`, at least one. EOFError when the HTTP process is gone."""
        timeout_s = None if wait else 0.0
        while select.select([self._socket], [], [], timeout_s)[0]:
            yield decode_to_engine(read_frame(self._socket))
            timeout_s = 0.0


Waiting = TypeVar("Waiting", Add, LoadAdapter)


class Preparations(Generic[Waiting]):
    """Messages for which something is being prepared, one after the other in a thread, while steps go on."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._waiting: dict[str, tuple[Waiting, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, key: str, message: Waiting, work: Callable[[], Any]) -> None:
        self._waiting[key] = message, self._pool.submit(work)

    def abort(self, key: str) -> None:
        """Forget a message, if it waits here."""
        self._waiting.pop(key, None)

    def take_ready(self, *, wait: bool) -> list[tuple[Waiting, Future[Any]]]:
        """Those that need wait no longer, and what became of it; `wait`: nothing else is to be done."""
        if wait and self._waiting:
            concurrent.futures.wait([work for _, work in self._waiting.values()], PREPARATION_POLL_S, FIRST_COMPLETED)
        ready = {key: found for key, found in self._waiting.items() if found[1].done()}
        for key in ready:
            del self._waiting[key]
        return list(ready.values())


class EngineLoop:
    """Drives an engine for the HTTP process until told to stop."""

    def __init__(self, engine: "Engine", connection: EngineSocket, *, queue_wait_s: float) -> None:
        self._engine = engine
        self._connection = connection
        self._queue_wait_s = queue_wait_s
        self._grammars: Preparations[Add] = Preparations("grammars")
        self._adapters: Preparations[LoadAdapter] = Preparations("adapters")
        self._queued: set[str] = set()
        self._stopping = False

    def run(self) -> None:
        """Returns on Shutdown; raises EOFError when the other side is gone."""
        self._engine.on_schedule = self._report_starts
        while True:
            is_busy = self._engine.has_work() or self._grammars or self._adapters
            for message in self._connection.receive(wait=not is_busy):
                self._handle(message)
            if self._grammars:
                for request, _ in self._grammars.take_ready(wait=not self._engine.has_work()):
                    self._add(request)
            if self._adapters:
                for adapter, work in self._adapters.take_ready(wait=not self._engine.has_work()):
                    self._add_adapter(adapter, work)
            if self._stopping:
                return
            if self._engine.has_work():
                self._step()

    def _step(self) -> None:
        outputs = self._engine.step()
        if outputs:
            self._connection.send(Report(outputs, self._engine.stats(), []))
        if self._queued:
            self._refuse_what_waited_too_long()

    def _report_starts(self) -> None:
        """Before the step is computed, which may take long: waiting ends here."""
        if not self._queued:
            return
        still_queued = {sequence.request_id for sequence in self._engine.scheduler.waiting}
        if started := self._queued - still_queued:
            self._queued &= still_queued
            self._connection.send(Report([], self._engine.stats(), list(started)))

    def _refuse_what_waited_too_long(self) -> None:
        latest_arrival = time.monotonic() - self._queue_wait_s
        for sequence in list(self._engine.scheduler.waiting):
            if sequence.arrival < latest_arrival and sequence.request_id in self._queued:
                self._abort(sequence.request_id)
                reason = f"the request waited {self._queue_wait_s:g} s for a place in the batch"
                self._connection.send(Rejected(sequence.request_id, reason, overload=True))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add():
                grammar, grammars = message.params.grammar, self._engine.grammars
                if grammar is None or grammars.has(grammar):
                    self._add(message)
                else:
                    self._grammars.begin(message.request_id, message, partial(grammars.compile, grammar))
            case Abort(request_ids):
                for request_id in request_ids:
                    self._abort(request_id)
            case Ping(number):
                self._connection.send(Pong(number, self._engine.stats()))
            case LoadAdapter(name, folder):
                self._adapters.begin(name, message, partial(self._engine.adapters.read, folder))
            case UnloadAdapter(name):
                self._engine.adapters.remove(name)
            case Shutdown():
                self._stopping = True

    def _add(self, message: Add) -> None:
        try:
            self._engine.add_request(**msgspec.structs.asdict(message))
        except ValueError as error:
            self._connection.send(Rejected(message.request_id, str(error)))
        else:
            self._queued.add(message.request_id)

    def _add_adapter(self, message: LoadAdapter, work: "Future[Adapter]") -> None:
        refusal = None
        try:
            self._engine.adapters.add(message.name, work.result())
        except ValueError as error:
            refusal = str(error)
        except Exception:
            log.exception("the adapter in %s cannot be read", message.folder)
            refusal = "the adapter cannot be read"
        self._connection.send(AdapterLoaded(refusal))

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._grammars.abort(request_id)
        self._queued.discard(request_id)


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, even in the middle of a step; else EOF tells it later."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the HTTP process ended while its engine was starting")


def import_engine() -> None:
    """Import torch and the engine, which takes longest of all that needs no model."""
    import_torch()
    import serve.engine.engine
    import serve.engine.warm_up  # noqa: F401


def load(config: EngineConfig) -> tuple["Engine", Ready]:
    """A warm engine and its description. ValueError or OSError when the options or the files are wrong."""
    from serve.engine.engine import Engine
    from serve.engine.kv_cache import PAGE_SIZE
    from serve.engine.warm_up import warm_up

    engine = Engine(config)
    if engine.ranks is not None:
        engine.ranks.on_loss(lambda: os._exit(1))  # in whatever sum this process waits
    warm_up(engine)
    engine.grammars.prepare()
    leave_to_stay()
    return engine, Ready(
        model=config.model,
        draft=" with ".join(name for name in (config.draft, config.draft_model) if name) or None,
        dtype=str(engine.dtype).removeprefix("torch."),
        kv_cache_dtype=str(engine.kv_cache_dtype).removeprefix("torch."),
        kv_bytes_per_token=engine.kv_bytes_per_token,
        device=str(engine.device),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        num_pages=engine.num_pages,
        page_size=PAGE_SIZE,
        stats=engine.stats(),
    )


def leave_to_stay() -> None:
    """Let the collector walk no more over what is there by now: amid steps it took 60 ms to find nothing."""
    gc.collect()
    gc.freeze()


def restore(adapters: "Adapters", folders: dict[str, str]) -> tuple[str, ...]:
    """Load the adapters that an engine before this one had; returns the names of those that cannot be loaded now."""
    lost = []
    for name, folder in folders.items():
        try:
            adapters.add(name, adapters.read(folder))
        except (ValueError, OSError) as error:
            log.error("the adapter %s is gone: %s", name, error)
            lost.append(name)
    return tuple(lost)


def main(
    load: Callable[[EngineConfig], tuple["Engine", Ready]] = load, prepare: Callable[[], None] = import_engine
) -> int:
    """`prepare` is done while nobody waits for this process yet, `load` once it has been called up."""
    parser = argparse.ArgumentParser(prog="serve.engine.process")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--options", required=True, help="EngineConfig as JSON")
    parser.add_argument("--queue-wait-s", type=float, required=True)
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # the HTTP process drains first and then says when to leave
        signal.signal(number, signal.SIG_IGN)
    configure_logging(arguments.log_level)
    prepare()
    if not (call := sys.stdin.readline()):
        return 0  # the HTTP process ended before it needed this one
    config = EngineConfig(**msgspec.json.decode(arguments.options))
    restored = msgspec.json.decode(call, type=dict[str, str] | None)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(arguments.socket)
    connection = EngineSocket(connected)
    try:
        engine, ready = load(config if restored is None else replace(config, adapters={}))
    except (ValueError, OSError) as error:
        connection.send(Failed(str(error)))
        return 1
    if restored:
        ready = msgspec.structs.replace(ready, lost_adapters=restore(engine.adapters, restored))
    connection.send(ready)
    try:
        EngineLoop(engine, connection, queue_wait_s=arguments.queue_wait_s).run()
    except (EOFError, ConnectionError):
        log.warning("the HTTP process is gone; the engine leaves")
    engine.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
