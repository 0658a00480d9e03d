"""Several servers of one model on a Ray cluster, behind one address: Ray Serve starts, watches, scales and ends them.

    Ray's HTTP proxy → Front → PrefixAwareRouter → one of the Replicas → its engine process

A replica is the whole server but its listening socket: the same application, with the same engine process under the
same watch. The front reads a request's body, so that the router can see which replica has its beginning cached; what is
wrong with a request, its key too, only the replica says. potstill needs Ray here alone.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kernels import __version__
from serve.config import with_folders
from serve.http.errors import ApiError, overloaded, unavailable
from serve.http.load import load_of
from serve.http.metrics import joined
from serve.http.options import ServerOptions, options_from_words
from serve.http.routes import FRESH_STATS_S
from serve.http.server import build_app, listen, load_tokenizer, make_service, make_tracer, running
from serve.logs import configure_logging
from serve.replicas import (
    DOWNSCALE_S,
    LOOK_BACK_S,
    UPSCALE_S,
    PrefixRouter,
    ReplicaLoad,
    text_blocks,
    wanted_replicas,
)

try:
    import ray
    from ray import serve as ray_serve
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
except ImportError:
    raise ValueError("--replicas needs Ray: pip install 'potstill[ray]'") from None

APPLICATION = "potstill"
SESSION_HEADER = "x-session-id"
"""Ray's name for it: requests of one session go to one replica."""
PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
"""What the protocols call the parts of a prompt, in the order of most chat templates."""
SCOPE_FIELDS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
                "client", "server")  # fmt: skip
"""Of an ASGI scope, what another process can be told."""
MOST_OPEN = 10_000
"""Requests that the front holds open at once."""
ATTEMPTS = 3
"""How many replicas may die under a request that nothing has been sent back of."""
ROUTING_S = 2.0
"""How often a replica is asked whether its engine answers."""
CONNECT_S = 5.0
"""How long the cluster at RAY_ADDRESS may take to answer at all: Ray itself waits for minutes."""
log = logging.getLogger("potstill.server")


@dataclass(frozen=True)
class RoutedRequest:
    """A request on its way to a replica."""

    scope: dict[str, Any]
    body: bytes
    """Up to one byte more than a body may have: the replica refuses it."""
    blocks: list[int]
    session: str | None


class PrefixAwareRouter(RequestRouter):
    """Ray's choice of replicas, made by `PrefixRouter`; Ray goes on to the next while one is full."""

    def initialize_state(self, **_: Any) -> None:
        self._prefixes = PrefixRouter()
        self._sent: dict[str, tuple[PendingRequest, str]] = {}
        """Requests that are on their way or not answered yet, and where to. Ray's own count of them is what replicas
        last said, and may stay above what they have for ten seconds after a burst."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        request, named = pending_request.args[0], {one.replica_id.unique_id: one for one in candidate_replicas}
        self._sent.pop(pending_request.metadata.internal_request_id, None)
        self._sent = {key: sent for key, sent in self._sent.items() if not sent[0].future.cancelled()}
        places = Counter(name for _, name in self._sent.values())
        loads = {name: float(places[name]) for name in named}
        answering = {name: load for name, load in loads.items() if named[name].routing_stats.get("is_answering", True)}
        ranked = self._prefixes.rank(request.blocks, answering or loads, request.session)
        if ranked:
            self._sent[pending_request.metadata.internal_request_id] = pending_request, ranked[0]
        return [[named[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        request, key = pending_request.args[0], pending_request.metadata.internal_request_id
        if key in self._sent:  # else it is answered already
            self._sent[key] = pending_request, replica_id.unique_id
        self._prefixes.sent(replica_id.unique_id, request.blocks, request.session)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Also of one that the replica refuses; `choose_replicas` is then asked again."""
        self._sent.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._prefixes.keep(one.replica_id.unique_id for one in replicas)


class Autoscaler:
    """Ray's policy: as many replicas as `wanted_replicas` says; bounds and delays are Ray's."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        names = ReplicaLoad.__dataclass_fields__
        loads = [ReplicaLoad(*(told[name].get(one, 0.0) for name in names)) for one in told.get("num_running", {})]
        if not loads:  # none has said anything yet
            return context.target_num_replicas, {}
        return wanted_replicas(loads, self._max_num_seqs), {}


class Replica:
    """One server of the model. Ray calls the methods; its `__init__` ends when the engine is warm."""

    async def __init__(self, options: ServerOptions, version: str) -> None:  # type: ignore[misc]
        """`version`: of the potstill that deploys it. RuntimeError or ValueError with one sentence."""
        self._open = AsyncExitStack()
        if version != __version__:
            raise ValueError(f"this node has potstill {__version__}, the one that deploys {version}: install the same")
        configure_logging(options.log_level)
        options = replace(options, engine=with_folders(options.engine))
        self._service = make_service(options, load_tokenizer(options))
        tracer = self._open.enter_context(make_tracer(options.otlp_traces_endpoint))
        self._app = build_app(self._service, tracer)
        await self._open.enter_async_context(running(self._service))
        if not await self._service.engine.wait_ready():
            raise RuntimeError(self._service.engine.failure or "the engine has ended")

    async def answer(self, request: RoutedRequest) -> AsyncIterator[list[Message]]:
        """The application's messages, as many at a time as there are. Closing the iterator is the client's leaving."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [{"type": "http.request", "body": request.body}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()  # for ever: when the client leaves, the task is cancelled
            return {"type": "http.disconnect"}

        scope = {**request.scope, "asgi": {"version": "3.0"}, "state": {}}
        working: asyncio.Task[None] = asyncio.create_task(self._app(scope, receive, messages.put))  # type: ignore[arg-type]
        scope["state"]["drop_connection"] = working.cancel
        working.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            is_open = True
            while is_open:
                waiting = [await messages.get()]
                while not messages.empty():
                    waiting.append(messages.get_nowait())
                is_open = waiting[-1] is not None
                if told := [message for message in waiting if message is not None]:
                    yield told
            await working
        finally:
            working.cancel()

    async def metrics(self) -> tuple[str, str]:
        """What Prometheus is told, with the replica's name before."""
        await self._service.engine.ping(FRESH_STATS_S)
        return ray_serve.get_replica_context().replica_tag, self._service.metrics.expose().decode()

    async def record_routing_stats(self) -> dict[str, bool]:
        """Ray tells routers: while an engine loads in place of one that died, or hangs, requests go elsewhere."""
        return {"is_answering": await self._service.engine.ping(self._service.options.health_timeout_s)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        load = load_of(0, self._service.metrics)
        return {
            "num_running": load.num_requests_running,
            "num_waiting": load.num_requests_waiting,
            "kv_cache_usage": load.kv_cache_usage,
        }

    async def check_health(self) -> None:
        """RuntimeError when there will be no further engine. One that has died or hangs is replaced without Ray."""
        if self._service.engine.ended.is_set():
            raise RuntimeError(self._service.engine.failure or "the engine has ended")

    async def __del__(self) -> None:
        """Ray awaits this when all requests have ended, or had drain_s to."""
        await self._open.aclose()


class Front:
    """Passes requests to replicas and their answers back."""

    def __init__(self, replicas: DeploymentHandle, options: ServerOptions) -> None:
        self._all, self._replicas = replicas, replicas.options(method_name="answer", stream=True)
        self._options = options

    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/metrics":
            told = await self._all.broadcast("metrics").results_async()
            return PlainTextResponse(joined(dict(told), "replica"), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        body = bytearray()
        async for portion in request.stream():
            body += portion[: self._options.max_body_bytes + 1 - len(body)]
        scope = {name: request.scope[name] for name in SCOPE_FIELDS if name in request.scope}
        blocks, session = prompt_of(bytes(body), self._options.model_names)
        session = request.headers.get(SESSION_HEADER, session)
        return Answer(self._replicas, RoutedRequest(scope, bytes(body), blocks, session))


def prompt_of(body: bytes, model_names: Iterable[str]) -> tuple[list[int], str | None]:
    """The blocks of a request's prompt, an adapter's name before them, and its `prompt_cache_key`."""
    try:
        wanted = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        wanted = None
    if not isinstance(wanted, dict):
        return [], None
    text = b"".join(msgspec.json.encode(wanted[name]) for name in PROMPT_FIELDS if name in wanted)
    model, session = wanted.get("model"), wanted.get("prompt_cache_key")
    adapter = model if isinstance(model, str) and model not in model_names else None
    return text_blocks(text, adapter), session if isinstance(session, str) else None


class Answer(Response):
    """What a replica answers. While nothing has been sent, a replica that dies is replaced by another."""

    def __init__(self, replicas: DeploymentHandle, request: RoutedRequest) -> None:
        super().__init__()
        self._replicas, self._request = replicas, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = unavailable("the replica died; others go on", "replica_died")
        for _ in range(ATTEMPTS):
            has_begun = False
            answer = self._replicas.remote(self._request)
            try:
                async for messages in answer:
                    for message in messages:
                        has_begun = True
                        await send(_without_request_id(message))
                return
            except BackPressureError:
                error = overloaded("all replicas and their queues are full")
                break
            except RayActorError:
                log.warning("a replica died under a request%s", " that it was answering" if has_begun else "")
                if has_begun:
                    raise  # the connection breaks off
            finally:
                answer.cancel()
        await send_error(error, send)


def _without_request_id(message: Message) -> Message:
    """Ray's proxy says it itself."""
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [(name, value) for name, value in message["headers"] if name != b"x-request-id"]}


async def send_error(error: ApiError, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body()})


def application_of(options: ServerOptions) -> Any:
    """What Ray Serve runs. Needs a connection to Ray."""
    least, most = options.replicas or (1, 1)
    policy = AutoscalingPolicy(policy_function=Autoscaler, policy_kwargs={"max_num_seqs": options.engine.max_num_seqs})
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        policy=policy,
        upscale_delay_s=UPSCALE_S,
        downscale_delay_s=DOWNSCALE_S,
        look_back_period_s=LOOK_BACK_S,
    )
    replicas = ray_serve.deployment(
        Replica,
        **({"num_replicas": least} if least == most else {"autoscaling_config": scaling}),
        max_ongoing_requests=options.engine.max_num_seqs + options.max_queue,
        max_queued_requests=max(options.max_queue, 1),
        max_constructor_retry_count=ATTEMPTS,
        graceful_shutdown_timeout_s=options.drain_s,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixAwareRouter,
            request_routing_stats_period_s=ROUTING_S,
            request_routing_stats_timeout_s=options.health_timeout_s + ROUTING_S,
        ),
        ray_actor_options=_needs(options, most),
    )
    front = ray_serve.deployment(
        Front,
        max_ongoing_requests=MOST_OPEN,
        graceful_shutdown_timeout_s=options.drain_s,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas.bind(options, __version__), options)


def _needs(options: ServerOptions, most: int) -> dict[str, float]:
    """What one replica takes of a node: the GPUs of its ranks, or on CPUs an even share, as Ray gives threads by it."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if options.engine.device != "cpu" and any(node.get("GPU") for node in nodes):
        return {"num_cpus": 1, "num_gpus": options.engine.tensor_parallel_size * options.engine.pipeline_parallel_size}
    cpus = [node["CPU"] for node in nodes if node.get("CPU")]
    return {"num_cpus": max(1, min(cpus) // ceil(most / len(cpus))) if cpus else 1}


def application(arguments: dict[str, str]) -> Any:
    """For `serve run` and RayService: `arguments["command"]` is what stands behind `potstill serve`."""
    return application_of(options_from_words(arguments["command"].split()))


def _connect() -> None:
    """Join the cluster of RAY_ADDRESS, or start one. OSError with one sentence when none, or another Ray, is there."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(include_dashboard=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"no Ray cluster to join at {address or 'this machine'}: {' '.join(str(error).split())}"
        ) from None


def run_cluster(options: ServerOptions) -> int:
    """Serve on the Ray cluster of RAY_ADDRESS, or on one of this machine's own, until told to stop.

    Returns the exit code: 0 after a drain, 1 when no replica starts. ValueError or OSError with one sentence when the
    options do not fit the files, the port is taken, or there is no cluster to join.
    """
    configure_logging(options.log_level)
    load_tokenizer(replace(options, engine=with_folders(options.engine)))  # what is wrong with the files, once
    listen(options.host, options.port).close()
    _connect()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        ray_serve.start(http_options={"host": options.host, "port": options.port})
        ray_serve.run(application_of(options), name=APPLICATION)
        address = f"http://{options.host}:{options.port}"
        print(f"potstill {__version__} serves {options.model_names[0]} on {address}", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return 0
    except RuntimeError as error:
        print(f"potstill: no replica starts: {_reason(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        ray_serve.delete(APPLICATION)
        ray.shutdown()


def _reason(error: RuntimeError) -> str:
    """Why a deployment failed: Ray's own error names it alone, its status has what was raised, last."""
    deployments = ray_serve.status().applications[APPLICATION].deployments.values()
    told = [one.message for one in deployments if one.status == "DEPLOY_FAILED"] or [str(error)]
    return told[0].strip().splitlines()[-1].removeprefix("RuntimeError: ").removeprefix("ValueError: ")
