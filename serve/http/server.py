"""The HTTP process: `run_server(options)` listens, runs the engine, and drains when it is told to stop.

It listens at once; until the engine is warm, /health and every request get 503. After SIGTERM or SIGINT new requests
get 503 and running ones have drain_s to finish; then the process ends with code 0. A second signal ends it at once.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kernels import __version__
from serve.config import with_folders
from serve.http.accounts import accounts_of
from serve.http.connection import MAX_HEAD_BYTES, HttpConnection
from serve.http.engine_client import EngineClient
from serve.http.engine_process import ENGINE_COMMAND
from serve.http.generation import Service
from serve.http.metrics import Metrics
from serve.http.middleware import Middleware
from serve.http.options import ServerOptions
from serve.http.routes import Routes
from serve.http.tools.formats import formats_of
from serve.logs import configure_logging
from serve.messages import Ready

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from serve.http.tracing import Tracer

__all__ = ["ServerOptions", "build_app", "run_server"]

CLOSE_S = 2.0
"""How long connections may take to close at the end."""
KEEP_ALIVE_S = 75.0
"""How long an idle connection stays: longer than clients use one again, OpenAI's after up to 5 s, load balancers after
a minute. A request that is sent while the server closes would be lost."""
BACKLOG = 1024
UNREAD_MS = 30_000
log = logging.getLogger("potstill.server")


def run_server(options: ServerOptions, *, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until told to stop. Returns the exit code: 0 after a drain, 1 when the engine is beyond help, 2 when it
    refuses the options or the files.

    `engine_command` is what runs as the engine process; tests put a scripted one there.
    ValueError or OSError with one sentence when the options do not fit the files, or the port is taken.
    """
    configure_logging(options.log_level)
    options = replace(options, engine=with_folders(options.engine))
    tokenizer = load_tokenizer(options)
    with make_tracer(options.otlp_traces_endpoint) as tracer, listen(options.host, options.port) as listener:
        return asyncio.run(_serve(options, tokenizer, listener, engine_command, tracer))


@contextlib.contextmanager
def make_tracer(endpoint: str | None) -> Iterator["Tracer | None"]:
    """What traces requests, if they are to be; at the end it sends what is left."""
    if endpoint is None:
        yield None
        return
    from serve.http.tracing import Tracer

    tracer = Tracer(endpoint)
    try:
        yield tracer
    finally:
        tracer.close()


def load_tokenizer(options: ServerOptions) -> "Tokenizer":
    """The served model's tokenizer, with the chat template that the options name."""
    from model.text.chat_template import ChatTemplate
    from model.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(options.engine.model)
    if options.chat_template is not None:
        source = Path(options.chat_template).read_text(encoding="utf-8")
        tokenizer.templates = {"default": ChatTemplate(source, tokenizer.special_tokens)}
    return tokenizer


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Its connections are dropped when the other side takes no bytes for UNREAD_MS."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = f"{error.strerror}; choose another with --port, or 0 for any that is free"
        raise OSError(f"cannot listen on {host} port {port}: {reason}") from None
    listener.listen(BACKLOG)
    return listener


def build_app(service: Service, tracer: "Tracer | None" = None) -> ASGIApp:
    """The ASGI application of one server."""
    routes, options = Routes(service), service.options
    app: ASGIApp = Middleware(
        routes.router,
        accounts=service.accounts,
        metrics=service.metrics,
        routes=routes.paths,
        error_bodies=routes.error_bodies,
        tracer=tracer,
    )
    if not options.allowed_origins:
        return app
    return CORSMiddleware(  # outermost: a browser asks first, without a key, and reads errors too
        app,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=["X-Request-Id", "Retry-After"],
    )


def make_service(
    options: ServerOptions, tokenizer: "Tokenizer", *, engine_command: Sequence[str] = ENGINE_COMMAND
) -> Service:
    """What the routes of one server share; its engine is not started yet. `options` name folders."""
    metrics = Metrics(options.model_names[0], *options.engine.adapters, price_per_hour=options.price_per_hour)
    engine = EngineClient(options, metrics, command=engine_command)
    max_loras = options.engine.max_loras if options.engine.enable_lora else len(options.engine.adapters)
    if max_loras:
        metrics.watch_adapters(max_loras, engine.adapter_requests)
    formats = formats_of(tokenizer, options.tool_call_parser, options.reasoning_parser)
    return Service(options, engine, tokenizer, metrics, formats, accounts_of(options))


@contextlib.asynccontextmanager
async def running(service: Service) -> AsyncIterator[None]:
    """The engine runs meanwhile; at the end its calls are failed, and it stops."""
    measuring = asyncio.create_task(service.metrics.measure_lag())
    service.engine.start()
    try:
        yield
    finally:
        await service.engine.stop()
        await service.grammars.close()
        measuring.cancel()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling: ours drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    options: ServerOptions,
    tokenizer: "Tokenizer",
    listener: socket.socket,
    engine_command: Sequence[str],
    tracer: "Tracer | None",
) -> int:
    service = make_service(options, tokenizer, engine_command=engine_command)
    engine = service.engine
    web = _Uvicorn(
        uvicorn.Config(
            build_app(service, tracer),
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=int(CLOSE_S),
        )
    )
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    serving = asyncio.create_task(web.serve([listener]))
    serving.add_done_callback(lambda _: stop.set())
    try:
        async with running(service):
            announce_address(options, listener)
            began = time.monotonic()
            if await _first(engine.wait_ready(), stop.wait()) and engine.info is not None:
                announce_engine(options, engine.info, time.monotonic() - began)
            await _first(stop.wait(), engine.ended.wait())
            if not engine.ended.is_set():
                await _drain(engine, options.drain_s, hurry)
    finally:
        web.should_exit = True
        await serving
    if engine.failure is not None:
        print(f"potstill: {engine.failure}", file=sys.stderr, flush=True)
        return 2 if engine.is_refused else 1
    return 0


async def _first(*waits) -> bool:  # type: ignore[no-untyped-def]
    """Wait for the first of several; its result."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return bool(next(iter(done)).result())


async def _drain(engine: EngineClient, drain_s: float, hurry: asyncio.Event) -> None:
    """Refuse what is new, let what runs finish. Calls that are left are failed when the engine stops."""
    engine.draining = True
    left = f": {engine.num_calls} requests may take up to {drain_s:g} s to finish" if engine.num_calls else ""
    log.info("stopping%s", left)
    deadline = asyncio.get_running_loop().time() + drain_s
    while engine.num_calls and not hurry.is_set() and not engine.ended.is_set():
        if asyncio.get_running_loop().time() > deadline:
            log.warning("%d requests did not finish in time and are given up", engine.num_calls)
            return
        await asyncio.sleep(0.05)


def announce_address(options: ServerOptions, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"potstill {__version__} listens on http://{shown}:{port} and loads {options.engine.model}", flush=True)


def announce_engine(options: ServerOptions, info: Ready, seconds: float) -> None:
    draft = f"verified: tokens are drafted by {info.draft}" if info.draft else "not verified: there is no draft"
    adapters = f"; adapters: {', '.join(options.engine.adapters)}" if options.engine.adapters else ""
    print(
        f"ready after {seconds:.1f} s: {options.model_names[0]}, {info.dtype} on {info.device}, "
        f"{info.num_pages} KV pages = {info.num_pages * info.page_size} tokens "
        f"of {info.kv_bytes_per_token:,} bytes in {info.kv_cache_dtype}, "
        f"context {info.max_model_len} tokens, {draft}{adapters}",
        flush=True,
    )
