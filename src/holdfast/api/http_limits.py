"""Limits on HTTP clients: the bytes, the number and the duration of their requests.

uvicorn limits none of these, and keeps an unfinished header or body for as long as its client is connected. Middleware
runs only once a request's headers are complete, so the limits are checked here, where the bytes come in.

This module relies on private parts of uvicorn. docs/dependencies.md says why, and tests/test_private_parts.py fails
when they change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any

import orjson
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from websockets.http11 import MAX_LINE_LENGTH

from holdfast.api.connection_limits import BufferShare, ConnectionLimits

log = structlog.get_logger(__name__)

# More than any browser, proxy and SDK send together. The WebSocket library refuses 128 of them without an answer.
MAX_HEADERS = 100
# Requests that a client may send ahead on one connection before the first of them is answered.
MAX_PIPELINED_REQUESTS = 32
# Bytes of a body or message that is handled without being counted.
SMALL_BYTES = 16 * 1024
# Seconds for which a complete body may wait until others are handled.
TURN_SECONDS = 60.0
# Seconds for which a refused client can still send, so that it reads the answer instead of a reset connection.
LINGER_SECONDS = 2.0


def _may_be_large(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the body of a request with these headers can be larger than SMALL_BYTES."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and int(value) > SMALL_BYTES):
            return True
    return False


class Refused(Exception):
    """Stops the parser. The answer is in `refusal` of the protocol."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits. A client that exceeds one gets an answer where HTTP permits it, and its
    connection is closed."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.url = b""
        self._limits = limits
        self._share = BufferShare(limits)
        # Bytes received since the parser last completed a head, a message or a piece of a body. What is incomplete is
        # kept by the parser: a head, the trailers behind a body, a chunk's extensions.
        self._pending = 0
        self._arrived = 0
        self._completed = False
        # Timeout for the head or the body.
        self._deadline: asyncio.TimerHandle | None = None
        # Until a complete body is handled.
        self._waiting: asyncio.TimerHandle | None = None
        # The request that is being answered; `cycle` is the last that was received.
        self._running: RequestResponseCycle | None = None
        self._refusal: tuple[int, str] | None = None
        # Whether what is received does not matter any more: the client was refused, or speaks another protocol now.
        self._done = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._limits.header_seconds, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._stop_waiting()
        self._share.clear()
        running = self._running
        super().connection_lost(exc)
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._done:
            return
        self._completed, self._arrived = False, len(data)
        super().data_received(data)
        if self._completed:
            self._pending = 0
        else:
            self._pending += len(data)
            self._check_incomplete()
        if self._deadline is None:
            self._set_deadline()

    def _set_deadline(self) -> None:
        if not self._done:
            cycle = self.cycle
            if cycle is None or cycle.response_complete:
                self._deadline = self.loop.call_later(self._limits.header_seconds, self._head_late)
            elif cycle.more_body and self._waiting is None:
                self._deadline = self.loop.call_later(self._limits.body_seconds, self._body_late)

    def handle_websocket_upgrade(self) -> None:
        self._done = True
        super().handle_websocket_upgrade()

    # --- parser callbacks ---------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._completed = True
        self._stop_deadline()
        if len(self.headers) > MAX_HEADERS or self._pending + self._arrived > self._limits.header_bytes:
            self._check_head()
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            self._refusal = (400, f"More than {MAX_PIPELINED_REQUESTS} requests were sent ahead on one connection.")
            raise Refused
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            # Trailers come by the same callback as headers. uvicorn would append them to the request's headers.
            self.headers = []
        else:
            self._check_handshake()

    def on_body(self, body: bytes) -> None:
        self._completed = True
        if self.cycle is not None and self.cycle.response_complete:
            return  # Nothing keeps these bytes, so they are not counted.
        if not self._share.add(len(body)):
            self._refusal = (
                503,
                f"The server holds MAX_BUFFERED_BYTES={self._limits.buffered_bytes} of request bodies that are not "
                "answered yet. Try again later.",
            )
            raise Refused
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._completed = True
        self._stop_deadline()
        cycle = self.cycle
        if self._share.received <= SMALL_BYTES or cycle.response_started:
            self._share.clear()
            super().on_message_complete()
            return
        size = self._share.received
        self._limits.completed(cycle, self._share)

        def start() -> None:
            self._stop_waiting()
            cycle.more_body = False
            cycle.message_event.set()

        if not self._limits.turns.begin(cycle, size, start):
            self._waiting = self.loop.call_later(TURN_SECONDS, self._turn_late)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        cycle = self.cycle
        if cycle.response_complete and cycle.more_body:
            # The application does not read the rest of the body. The client has a short time to complete it, and can
            # then send another request.
            self._share.clear()
            self._stop_deadline()
            self._deadline = self.loop.call_later(LINGER_SECONDS, self._close_unread)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if _may_be_large(cycle.scope["headers"]):
            app = partial(self._answer_large, cycle, app)
        super()._start_asgi_task(cycle, app)

    async def _answer_large(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run the application, and count the body until it answers."""

        def answer(message: Message) -> Awaitable[None]:
            self._limits.answered(cycle)
            return send(message)

        try:
            await app(scope, receive, answer)
        finally:
            self._limits.answered(cycle)

    # --- limits -------------------------------------------------------------------------------------

    def _check_incomplete(self) -> None:
        if self._done:
            return
        if len(self.headers or ()) > MAX_HEADERS:
            self._refuse(431, self._too_many())
        elif self._pending > self._limits.header_bytes:
            self._refuse(*self._too_large())

    def _check_head(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = (431, self._too_many())
        elif size > self._limits.header_bytes:
            self._refusal = self._too_large()
        else:
            return
        raise Refused

    def _check_handshake(self) -> None:
        """The WebSocket library parses the head again, and drops a connection with a longer line without an answer."""
        longest = max(len(name) + len(value) for name, value in self.headers)
        if max(longest, len(self.url) + len(" HTTP/1.1") + len("GET ")) + 4 > MAX_LINE_LENGTH:
            self._refusal = (431, f"A line of a WebSocket handshake is longer than {MAX_LINE_LENGTH} bytes.")
            raise Refused

    def _too_many(self) -> str:
        return f"The request has more than {MAX_HEADERS} header fields."

    def _too_large(self) -> tuple[int, str]:
        limit = self._limits.header_bytes
        if self.cycle is None or self.cycle.response_complete:
            if len(self.url) > limit:
                return 414, f"The request's URL is longer than MAX_HEADER_BYTES={limit}."
            return 431, f"The request's headers are larger than MAX_HEADER_BYTES={limit}."
        return 431, f"The request's trailers or chunk extensions are larger than MAX_HEADER_BYTES={limit}."

    def _head_late(self) -> None:
        self._deadline = None
        seconds = self._limits.header_seconds
        if self._pending:
            self._refuse(408, f"The request's headers were not complete within HEADER_TIMEOUT_SECONDS={seconds:g}.")
        else:
            self.transport.close()

    def _body_late(self) -> None:
        self._deadline = None
        seconds = self._limits.body_seconds
        if self.flow.read_paused:
            # The timeout does not apply: reading is paused because the application is busy.
            self._deadline = self.loop.call_later(seconds, self._body_late)
        else:
            self._refuse(408, f"The request's body was not complete within BODY_TIMEOUT_SECONDS={seconds:g}.")

    def _turn_late(self) -> None:
        self._waiting = None
        self._refuse(503, f"Others were handled for {TURN_SECONDS:g} s before this request's body. Try again later.")

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _close_unread(self) -> None:
        """Close a connection whose request was answered before its body was complete."""
        self._deadline = None
        self._done = True
        self.transport.close()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # --- refusing -----------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, msg)))

    def _refuse(self, status: int, detail: str) -> None:
        """Answer and close. If a response has already started, only close."""
        self._done = True
        self._stop_deadline()
        self._stop_waiting()
        self._unset_keepalive_if_required()
        self._share.clear()
        self.pipeline.clear()
        running, answering = self._running, False
        if running is not None and not running.response_complete:
            answering = running.response_started
            running.disconnected = True
            running.message_event.set()
        if answering or self.transport.is_closing():
            self.transport.close()
            return
        body = orjson.dumps({"detail": detail})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        self.transport.write(STATUS_LINE[status] + head + retry + b"\r\n" + body)
        # A connection that is closed before all is read is reset, and the client loses the answer.
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)
