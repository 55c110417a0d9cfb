"""Limits on WebSocket clients, as `api/http_limits.py` has them for HTTP.

This module relies on private parts of uvicorn. docs/dependencies.md says why, and tests/test_private_parts.py fails
when they change.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.protocol import State

from holdfast.api.connection_limits import BufferShare, ConnectionLimits
from holdfast.api.http_limits import LINGER_SECONDS, SMALL_BYTES

# Frames that one WebSocket message may be cut into. An empty frame is kept too.
MAX_FRAGMENTS = 1024
# Bytes of an incomplete frame that are kept after a WebSocket's close frame was sent. The client's own close frame is
# expected there, and what it had sent before.
MAX_CLOSING_BYTES = 64 * 1024


class LimitedWebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with limits. `ws_max_size` of uvicorn limits one message."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.close_timeout = LINGER_SECONDS
        self._limits = limits
        self._share = BufferShare(limits)
        # Until the message or frame that has begun is complete.
        self._deadline: asyncio.TimerHandle | None = None
        # Whether all that arrives is dropped.
        self._dropping = False
        # Bytes of messages that the application has been given and is not done with.
        self._handled_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._share.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._dropping:
            return
        super().data_received(data)
        if self.close_sent or self.transport.is_closing():
            self._release()
            return
        unfinished = (self.conn.current_size or 0) + len(self.conn.reader.buffer)
        if not self._share.replace(unfinished):
            most = self._limits.buffered_bytes
            self._fail(CloseCode.TRY_AGAIN_LATER, f"The server holds MAX_BUFFERED_BYTES={most} of unfinished messages.")
        elif not unfinished:
            self._stop_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.body_seconds, self._message_late)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.close_sent:
            if self.initial_response is not None:
                # The handshake was answered with a refusal. uvicorn would log it as an error of the application.
                self.handshake_complete = True
            self._release()
        # uvicorn waits for a slow client before it writes, not after: without this, the next event would be loaded
        # while the client has not taken this one.
        await self.writable.wait()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        # uvicorn reads again when the application takes the handshake: it does so when it accepts the client.
        if not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def handle_events(self) -> None:
        # If a frame is complete and no message is unfinished, what is incomplete now has only just begun.
        if self.conn.events and self.conn.current_size is None:
            self._stop_deadline()
        super().handle_events()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(CloseCode.POLICY_VIOLATION, f"A message has at most {MAX_FRAGMENTS} frames.")
        elif not self.close_sent:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._stop_deadline()
        size = sum(map(len, self.frames))
        if size > SMALL_BYTES and not self.close_sent:
            self._handled_bytes += size
            self._limits.handled_messages_bytes += size
            if self._limits.handled_messages_bytes > max(self._limits.handled_bytes, self._handled_bytes):
                self._fail(CloseCode.TRY_AGAIN_LATER, "The server handles too many large messages.")
                return
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        # The application is done with what it was given before, unless there was more in one packet.
        if self.queue.empty():
            self._release_handled()
        return await super().receive()

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            self._release_handled()

    def _release_handled(self) -> None:
        self._limits.handled_messages_bytes -= self._handled_bytes
        self._handled_bytes = 0

    def handle_ping(self) -> None:
        # A client that sends pings and takes no pongs would fill the memory with them.
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        if self.close_sent:
            self._release()

    def _message_late(self) -> None:
        self._deadline = None
        seconds = self._limits.body_seconds
        if self.read_paused:
            # The timeout does not apply: reading is paused because the application is busy with an earlier message.
            self._deadline = self.loop.call_later(seconds, self._message_late)
        else:
            detail = f"A message was not complete within BODY_TIMEOUT_SECONDS={seconds:g}."
            self._fail(CloseCode.POLICY_VIOLATION, detail)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Send a close frame, and close the connection when the client has answered it, or soon."""
        if self.close_sent:
            return
        if not self.handshake_complete:
            self.transport.abort()
            return
        if self.conn.state is State.OPEN:  # Otherwise the client has sent a close frame.
            self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.close_sent = self.disconnected = True
        # A connection that is closed before all is read is reset, and the client loses the close frame.
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self._release()

    def _release(self) -> None:
        """Keep nothing of what a client sends after the close frame, except the beginning of its own close frame."""
        self._stop_deadline()
        self._share.clear()
        self.frames = []
        if len(self.conn.reader.buffer) > MAX_CLOSING_BYTES:
            self._dropping = True
            self.conn.reader.discard()
