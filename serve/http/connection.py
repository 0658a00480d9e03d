"""uvicorn's HTTP/1.1 connection, hardened: slow or broken clients are answered or dropped, and never hold anything.

Added here: a time limit for request heads and for bodies that nobody reads, OpenAI's error body for bytes that are not
HTTP, and a way for a response to drop a client that does not read (the "drop_connection" entry of the scope's state).
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from serve.http.errors import invalid

MAX_HEAD_BYTES = 16 * 1024
HEAD_S = 30.0
"""From the first byte of a request (or from connecting) to the end of its headers."""
LEFTOVER_S = 5.0
"""How long a client may go on sending a body after it got its response."""


class HttpConnection(H11Protocol):
    """One client."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "drop_connection": transport.abort}
        self._limit(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except (h11.LocalProtocolError, UnicodeDecodeError):  # bytes that uvicorn does not expect to be possible
            self.transport.abort()
        if self.conn.their_state is not h11.IDLE:
            self._limit(None)
        elif self._deadline is None:
            self._limit(HEAD_S)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the head was fine, the body is not
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = invalid("the request is not valid HTTP/1.1, or its headers are too large")
            headers = error.headers() | {"content-length": str(len(error.body())), "connection": "close"}
            events: list[Any] = [
                h11.Response(status_code=error.status, headers=list(headers.items()), reason="Bad Request"),
                h11.Data(data=error.body()),
                h11.EndOfMessage(),
            ]
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._limit(LEFTOVER_S)

    def _limit(self, seconds: float | None) -> None:
        """Drop the connection after this time, unless another limit is set before."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
