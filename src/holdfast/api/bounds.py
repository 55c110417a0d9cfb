"""What one client may make a web process hold: the bytes, the number and the time of what it sends, and the bytes of
what it does not take.

uvicorn bounds none of these. An unfinished header, body or WebSocket message would be kept for as long as its client
likes, and so would an answer that the client does not read. The bounds are kept here, where bytes come in, because
everything behind this point runs only once a request's headers are complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from websockets.http11 import MAX_LINE_LENGTH

from holdfast.api.turns import Turns
from holdfast.settings import Settings

log = structlog.get_logger(__name__)

# More than any browser, proxy and SDK send together. The WebSocket library refuses 128 of them without an answer.
MAX_HEADERS = 100
# Requests that a client may send ahead on one connection before the first of them is answered.
MAX_PIPELINED_REQUESTS = 32
# Bytes of an unfinished body or message that are not counted against the process's budget. Of a client that is not
# authenticated yet, less than this is received: its body is not read, and its WebSocket is paused until it is accepted.
UNCOUNTED_BYTES = 512 * 1024
# Bytes of a body or message that is handled without being counted.
SMALL_BYTES = 16 * 1024
# Of the bytes that the process may hold of bodies, the part that is handled at once.
HANDLED_PART = 1 / 8
# Seconds for which a complete body may wait until others are handled.
TURN_SECONDS = 60.0
# Seconds for which a refused client can still send, so that it reads the answer instead of a reset connection.
LINGER_SECONDS = 2.0
# Seconds between two looks at what clients have not taken.
UNSENT_INTERVAL_SECONDS = 1.0


@dataclass(slots=True)
class Limits:
    """The bounds of one process, and what its connections hold together of `buffered_bytes`."""

    header_bytes: int
    header_seconds: float
    body_seconds: float
    buffered_bytes: int
    held_bytes: int = 0
    """Of bodies and messages that are not answered yet."""
    handled_messages_bytes: int = 0
    """Of WebSocket messages that are being handled."""
    turns: Turns = field(init=False)
    _complete: dict[RequestResponseCycle, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = Turns(self.handled_bytes)

    @property
    def handled_bytes(self) -> int:
        """Of bodies that are handled at once, and as many of messages."""
        return int(self.buffered_bytes * HANDLED_PART)

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        # One body of the largest size can always be received.
        buffered = max(settings.max_buffered_bytes, settings.max_body_bytes)
        return cls(settings.max_header_bytes, settings.header_timeout, settings.body_timeout, buffered)

    def completed(self, cycle: RequestResponseCycle, share: Share) -> None:
        """Hold a complete body until its request is answered."""
        self._complete[cycle] = share.hand_over()

    def answered(self, cycle: RequestResponseCycle) -> None:
        """The application has begun to answer a request, or it has ended: its body is not needed any more."""
        if cycle in self._complete:
            self.held_bytes -= self._complete.pop(cycle)
            self.turns.end(cycle)


class Share:
    """What one connection holds of its process's budget for bodies and messages."""

    __slots__ = ("_counted", "_limits", "_received")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._received = 0
        self._counted = 0

    def add(self, size: int) -> bool:
        """Count bytes that were received. False: the process holds too much."""
        self._received += size
        grown = max(0, self._received - UNCOUNTED_BYTES) - self._counted
        if not grown:
            return True
        self._counted += grown
        self._limits.held_bytes += grown
        return self._limits.held_bytes <= self._limits.buffered_bytes

    def replace(self, size: int) -> bool:
        """Count what the connection holds now, in place of what was counted. False: the process holds too much."""
        self.clear()
        return self.add(size)

    @property
    def received(self) -> int:
        """Bytes of the body or message."""
        return self._received

    def hand_over(self) -> int:
        """The body is complete. Returns what was counted, which the caller counts from now on."""
        counted, self._received, self._counted = self._counted, 0, 0
        return counted

    def clear(self) -> None:
        """The message is complete, or the body or message is gone."""
        self._limits.held_bytes -= self._counted
        self._received = self._counted = 0


def _may_be_large(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the body of a request with these headers can be larger than SMALL_BYTES."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and int(value) > SMALL_BYTES):
            return True
    return False


class Refused(Exception):
    """Stops the parser. The answer is in `refusal` of the protocol."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds. A client that exceeds one gets an answer where HTTP permits it, and its
    connection is closed."""

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.url = b""
        self._limits = limits
        self._share = Share(limits)
        # Bytes received since the parser last completed a head, a message or a piece of a body. What is incomplete is
        # kept by the parser: a head, the trailers behind a body, a chunk's extensions.
        self._pending = 0
        self._arrived = 0
        self._completed = False
        # Until the head has come, or the body.
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
            # Nothing reads the rest of the body. The client has a short time to end it, and can then go on with
            # another request.
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

    # --- bounds -------------------------------------------------------------------------------------

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
            # We do not read it: the application is busy with something else, or with an earlier request.
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


class UnsentBytes:
    """Closes connections whose clients take nothing, while the process holds more for its clients than it may.

    A connection counts as stalled when its buffer has not shrunk since the last look, so a client that reads may be
    among them if it has been sent as much meanwhile. Clients of streams resume where they were.
    """

    def __init__(self, connections: set[Any], limits: Limits) -> None:
        self._connections = connections
        self._limits = limits
        self._seen: dict[Any, int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(UNSENT_INTERVAL_SECONDS)
            self.look()

    def look(self) -> None:
        """Abort stalled connections, the largest buffer first, until the total fits."""
        held: dict[Any, int] = {}
        for connection in self._connections:
            transport = connection.transport
            if transport is not None and (size := transport.get_write_buffer_size()):
                held[connection] = size
        total = sum(held.values())
        stalled = sorted(
            (connection for connection, size in held.items() if size >= self._seen.get(connection, size + 1)),
            key=lambda connection: held[connection],
        )
        while total > self._limits.buffered_bytes and stalled:
            connection = stalled.pop()
            size = held.pop(connection)
            total -= size
            log.warning("connection.stalled", unsent_bytes=size)
            connection.transport.abort()
        self._seen = held
