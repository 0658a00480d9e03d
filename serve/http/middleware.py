"""The outermost layer of the server: request id, keys, errors, one log line and one count for every request.

Every path needs a key, if there are keys, but the probes, the page and the protocol's description: a later route is
closed until somebody opens it.
"""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.http.accounts import Account
from serve.http.errors import ApiError
from serve.http.metrics import Metrics, RequestSummary
from serve.http.page import PAGE_PATHS

if TYPE_CHECKING:
    from serve.http.tracing import Tracer

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/openapi.json", "/docs", *PAGE_PATHS})
QUIET_PATHS = OPEN_PATHS | {"/load"}
"""What is asked every few seconds and says nothing new in the log."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
log = logging.getLogger("potstill.server")


class Middleware:
    """Wraps the application. `routes` are the paths that may appear in logs and labels; others are "other".

    `error_bodies`: how errors look below a path, where that is not OpenAI's way.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        accounts: Sequence[Account],
        metrics: Metrics,
        routes: Iterable[str],
        error_bodies: Mapping[str, Callable[[ApiError], bytes]],
        tracer: "Tracer | None" = None,
    ) -> None:
        self._app = app
        self._error_bodies = error_bodies
        self._accounts = accounts
        self._metrics = metrics
        self._routes = frozenset(routes)
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        exchange = _Exchange(scope, send)
        scope["app"] = self  # with it, starlette's router raises HTTPException instead of answering by itself
        try:
            exchange.account = scope["state"]["account"] = self._authenticate(scope)
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.failed(499, "client_left")  # nobody will see it; nginx counts such requests so
        except HTTPException as error:
            await self._send_error(scope, exchange, _no_route(error))
        except ApiError as error:
            await self._send_error(scope, exchange, error)
        except Exception as error:
            # The text of an unexpected error may quote a prompt: only where it happened is logged.
            log.error("request %s failed: %s at %s", exchange.request_id, type(error).__name__, _line_of(error))
            failure = ApiError(500, "an internal error occurred", code="internal_error")
            await self._send_error(scope, exchange, failure)
        finally:
            self._record(scope, exchange)

    async def _send_error(self, scope: Scope, exchange: "_Exchange", error: ApiError) -> None:
        prefixes = [prefix for prefix in self._error_bodies if scope["path"].startswith(prefix)]
        await exchange.send_error(error, self._error_bodies[prefixes[0]](error) if prefixes else error.body())

    def _authenticate(self, scope: Scope) -> Account | None:
        """Whose key the request brings; None when none is needed. ApiError 401 without a right one."""
        if not self._accounts or scope["path"] in OPEN_PATHS:
            return None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        given += [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key).digest()
        # Every key is compared, and in constant time, so that timing tells nothing about any of them.
        matches = [hmac.compare_digest(digest, account.digest) for account in self._accounts]
        if scheme.lower() != b"bearer" or not any(matches):
            text = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(401, text, code="invalid_api_key")
        return self._accounts[matches.index(True)]

    def _record(self, scope: Scope, exchange: "_Exchange") -> None:
        route = scope["path"] if scope["path"] in self._routes else "other"
        self._metrics.http_requests.labels(route=route, status=str(exchange.status or 500)).inc()
        level = logging.DEBUG if route in QUIET_PATHS else logging.INFO
        call = scope["state"].get("call")
        summary = None if call is None else call.summary()
        e2e_s = time.monotonic() - exchange.began
        if self._tracer is not None and summary is not None:
            outcome = exchange.status or 500, exchange.failure
            self._tracer.record(scope, exchange.request_id, outcome, e2e_s, summary)
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        details = "" if summary is None else _details(exchange, summary)
        named = f"id={exchange.request_id}{details}"
        log.log(level, "%s %s %s %.0f ms %s", method, route, exchange.status, 1000 * e2e_s, named)


class _Exchange:
    """One request's id and what has been sent back so far."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        usable = len(given) == 1 and REQUEST_ID.fullmatch(given[0])
        self.request_id = given[0].decode() if usable else uuid.uuid4().hex
        self.began = time.monotonic()
        self.status: int | None = None
        self.failure: str | None = None
        """The code of what it failed by, if it did."""
        self.account: Account | None = None
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            limits = () if self.account is None else self.account.headers()
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode()), *limits]
        await self._send(message)

    def failed(self, status: int, code: str) -> bool:
        """Note a failure under its own status; returns whether a response has begun, under another one."""
        has_begun = self.status is not None
        self.status, self.failure = status, code
        return has_begun

    async def send_error(self, error: ApiError, body: bytes) -> None:
        """Answer with an error; once a response has begun, nothing can be said any more."""
        if self.failed(error.status, error.code):
            return
        headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _details(exchange: _Exchange, summary: RequestSummary) -> str:
    """What a line says of a request that was to generate: "-" for what it did not come to."""

    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1000 * seconds:.1f}"

    key = "-" if exchange.account is None else exchange.account.name
    finish = exchange.failure or "+".join(summary.finish_reasons) or "-"
    return (
        f" key={key} model={summary.model_name} prompt={summary.num_prompt_tokens} "
        f"completion={summary.num_output_tokens} queue_ms={milliseconds(summary.queue_s)} "
        f"ttft_ms={milliseconds(summary.ttft_s)} tpot_ms={milliseconds(summary.tpot_s)} finish={finish}"
    )


def _no_route(error: HTTPException) -> ApiError:
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow")
        taken = f"; it takes {allow}" if allow else ""
        return ApiError(405, f"this path does not take this method{taken}", code="method_not_allowed", allow=allow)
    return ApiError(404, "there is nothing at this path", code="not_found")


def _line_of(error: BaseException) -> str:
    """File and line of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "an unknown line" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
