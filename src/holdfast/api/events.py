"""/threads/{thread_id}/stream/events: the thread-centric protocol's events, over SSE and WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
import psycopg
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from holdfast.api.commands import CommandFailed, MalformedCommand, answer, read_command
from holdfast.api.context import CALLER, Web, WebContext, admitted, identified, seen_by
from holdfast.api.response_models import LAST_EVENT, EventFilter, streamed_thread, takes
from holdfast.api.routes import Routes
from holdfast.api.streaming import STREAM_HEADERS, EventStream, NoLongerReadable, readable, resumed_at
from holdfast.errors import BadRequest, Denied, RequestError
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.streams.envelopes import CHANNELS, EnvelopeFilter, envelope
from holdfast.streams.hub import Expired, HubClosed
from holdfast.streams.log import LogEvent, find_position, newest_seqs
from holdfast.streams.serialize import MAX_RESPONSE_DEPTH, to_json
from holdfast.streams.sse import HEARTBEAT

routes = Routes(tags=["event streaming"])

# Bytes of JSON in a subscription, and in all subscriptions of one WebSocket together. They are kept, and every event is
# compared with each namespace in them.
MAX_SUBSCRIPTION_BYTES = 64 * 1024


def _whole_number(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LAST_EVENT:
        raise BadRequest(f"{name} must be a whole number from 0 to {LAST_EVENT}.")
    return value


def subscription_size(params: Any) -> int:
    """Bytes of JSON."""
    return len(orjson.dumps(params))


def read_filter(params: Any) -> tuple[EnvelopeFilter, int]:
    """A subscription's filter and cursor; BadRequest says what is wrong with it."""
    if not isinstance(params, dict):
        raise BadRequest("A subscription is an object with channels.")
    if (size := subscription_size(params)) > MAX_SUBSCRIPTION_BYTES:
        raise BadRequest(
            f"A subscription may have {MAX_SUBSCRIPTION_BYTES:,} bytes of JSON at most, and this one has {size:,}."
        )
    channels = params.get("channels")
    if not isinstance(channels, list) or not channels:
        raise BadRequest(f"channels must name at least one of: {', '.join(sorted(CHANNELS))}.")
    for channel in channels:
        if not isinstance(channel, str) or not (channel in CHANNELS or channel.startswith("custom:")):
            raise BadRequest(f"channel {channel!r} is not one of: {', '.join(sorted(CHANNELS))}.")
    namespaces = [] if params.get("namespaces") is None else params["namespaces"]
    if not isinstance(namespaces, list) or not all(
        isinstance(prefix, list) and all(isinstance(segment, str) for segment in prefix) for prefix in namespaces
    ):
        raise BadRequest("namespaces must be a list of lists of segments.")
    depth = _whole_number(params.get("depth"), "depth")
    since = _whole_number(params.get("since"), "since")
    return EnvelopeFilter(frozenset(channels), tuple(tuple(prefix) for prefix in namespaces), depth), since or 0


@routes.post(
    "/threads/{thread_id}/stream/events",
    summary="Stream a thread's events of the thread-centric protocol",
    response_class=Response,
    responses=streamed_thread(400, 410),
    openapi_extra=takes(EventFilter),
)
async def stream_events(web: Web, thread_id: UUID, request: Request) -> Response:
    try:
        wanted, since = read_filter(await request.json())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None
    await web.may_thread(thread_id, "read")
    after = await resumed_at(web, thread_id, since)

    async def body(tick: float | None) -> AsyncIterator[bytes]:
        async for events in readable(web, thread_id, web.hub.thread_events(thread_id, after, tick=tick)):
            framed = b"".join(_frame(thread_id, event, wanted) for event in events)
            if framed or not events:
                yield framed or HEARTBEAT

    return EventStream(web, body, STREAM_HEADERS)


def _frame(thread_id: UUID, event: LogEvent, wanted: EnvelopeFilter) -> bytes:
    shown = envelope(thread_id, event)
    if shown is None or not _admits(wanted, shown):
        return b""
    return b"event: %s\r\ndata: %s\r\nid: %d\r\n\r\n" % (
        shown["method"].encode(),
        to_json(shown, MAX_RESPONSE_DEPTH),
        event.seq,
    )


def _admits(wanted: EnvelopeFilter, shown: dict[str, Any]) -> bool:
    return wanted.matches(shown["method"], shown["params"]["namespace"], shown["params"]["data"])


@dataclass(eq=False)
class Subscription:
    """What a client asked for on a socket, delivered through `seen`. Its past ends at `end`, the last event there was
    when it came."""

    wanted: EnvelopeFilter
    seen: int
    end: int
    caught_up: asyncio.Future[None]
    size: int
    """Bytes of JSON that it was asked for with."""
    replayed: int = 0


class Socket:
    """One WebSocket: commands in, answers and events out. Each new subscription is sent the past that it asks for;
    later events are sent once, even if several subscriptions match."""

    def __init__(self, process: WebContext, web: WebContext, thread_id: UUID, socket: WebSocket) -> None:
        self._process = process
        self._web = web
        self._thread_id = thread_id
        self._socket = socket
        self._subscriptions: dict[str, Subscription] = {}
        self._delivering = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self._next_subscription = 1

    async def run(self) -> None:
        try:
            while True:
                await self._receive(await self._frame())
        except WebSocketDisconnect:
            pass
        finally:
            if self._follower is not None:
                await cancel_all([self._follower])

    async def _send(self, message: dict[str, Any]) -> None:
        async with self._sending:
            if self._socket.application_state is WebSocketState.DISCONNECTED:
                raise WebSocketDisconnect(1006)
            await self._socket.send_text(to_json(message, MAX_RESPONSE_DEPTH).decode())

    async def _frame(self) -> bytes:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"], message.get("reason"))
        return message.get("bytes") or (message.get("text") or "").encode()

    async def _receive(self, frame: bytes) -> None:
        identity: int | None = None
        try:
            command = read_command(frame)
            identity, method = command["id"], command["method"]
            web = await self._readmitted(identity)
            params = {} if command.get("params") is None else command["params"]
            if method.startswith("subscription."):
                if not isinstance(params, dict):
                    raise CommandFailed("invalid_argument", "params must be an object.")
                result = await self._subscription(web, method, params)
                await self._send({"type": "success", "id": identity, "result": result})
            else:
                await self._send(await answer(web, self._thread_id, command))
        except MalformedCommand as failure:
            await self._send(failure.answer(failure.identity))
        except CommandFailed as failure:
            await self._send(failure.answer(identity))
        except RequestError as failure:
            await self._send({"type": "error", "id": identity, "error": "invalid_argument", "message": str(failure)})

    async def _readmitted(self, identity: int) -> WebContext:
        """The context of one command. The caller is authenticated again by the headers of the handshake, because rights
        may have changed since the socket was opened. Closes the socket of a refused caller. Raises OverLimit."""
        try:
            caller = await admitted(self._process, self._socket)
        except Denied as refusal:
            message = f"{refusal.status}: {refusal}"
            await self._send({"type": "error", "id": identity, "error": "unknown_error", "message": message})
            await refuse(self._socket, refusal)
            raise WebSocketDisconnect(4000 + refusal.status) from None
        self._socket.scope[CALLER] = caller
        return seen_by(self._process, caller)

    async def _subscription(self, web: WebContext, method: str, params: dict[str, Any]) -> dict[str, Any]:
        match method:
            case "subscription.subscribe" | "subscription.reconnect":
                wanted, since = read_filter(params)
                await web.may_thread(self._thread_id, "read")
                if method == "subscription.reconnect" or since:
                    since = await self._resumed_at(params.get("since"))
                identity = str(params.get("subscription_id") or self._next_subscription)
                size = subscription_size(params)
                self._refuse_too_many(identity, size)
                self._next_subscription += 1
                caught_up = asyncio.get_running_loop().create_future()
                new = Subscription(wanted, since, await self._head(), caught_up, size)
                await self._follow(identity, new)
                return {"subscription_id": identity, "replayed_events": new.replayed}
            case "subscription.unsubscribe":
                if self._subscriptions.pop(str(params.get("subscription_id")), None) is None:
                    raise CommandFailed("no_such_subscription", "There is no subscription with that id.")
                return {}
            case _:
                raise CommandFailed("unknown_command", f"There is no command {method}.")

    def _refuse_too_many(self, identity: str, size: int) -> None:
        """Raise CommandFailed when another subscription would make the filters of this socket too large."""
        others = sum(one.size for name, one in self._subscriptions.items() if name != identity)
        if others + size > MAX_SUBSCRIPTION_BYTES:
            raise CommandFailed(
                "invalid_argument",
                f"The subscriptions of a WebSocket may have {MAX_SUBSCRIPTION_BYTES:,} bytes of JSON together. End "
                "some of them with subscription.unsubscribe, or open another WebSocket.",
            )

    async def _follow(self, identity: str, new: Subscription) -> None:
        """Add a subscription, and continue reading at the lowest position of all subscriptions. Returns when the past
        events were sent. Otherwise a client that knows a run's end from another subscription would treat this one as
        finished when it is confirmed, and would ignore later events."""
        if self._follower is not None:
            # Do not cancel between sending an event and recording its position: it would be sent twice.
            async with self._delivering:
                await cancel_all([self._follower])
        self._subscriptions[identity] = new
        self._follower = asyncio.create_task(self._deliver(min(one.seen for one in self._subscriptions.values())))
        if new.seen < new.end:
            await asyncio.wait({self._follower, new.caught_up}, return_when=asyncio.FIRST_COMPLETED)

    async def _resumed_at(self, since: int | None) -> int:
        """The position for a client's cursor. Raises an error when the next events have expired, so that the client
        does not miss them unnoticed."""
        if since is None:
            raise CommandFailed("invalid_argument", "subscription.reconnect needs since.")
        async with self._web.database.connection() as connection:
            after, available = await find_position(connection, self._thread_id, since)
        if available is not None:
            raise CommandFailed(
                "resume_gap",
                f"The events after {since} have expired. Subscribe anew, and read the state.",
                since=since,
                min_available_seq=available,
            )
        return after

    async def _head(self) -> int:
        """The number of the log's last event; none to wait for while the database is out of reach."""
        try:
            async with self._web.database.connection() as connection:
                return (await newest_seqs(connection, {self._thread_id: 0})).get(self._thread_id, 0)
        except (psycopg.Error, OSError):
            return 0

    async def _deliver(self, since: int) -> None:
        with suppress(WebSocketDisconnect):  # The task that reads the commands gets this exception as well.
            try:
                tick = self._web.settings.stream_heartbeat
                followed = self._web.hub.thread_events(self._thread_id, since, tick=tick)
                async for events in readable(self._web, self._thread_id, followed):
                    for event in events:
                        async with self._delivering:
                            await self._deliver_one(event)
                    if not events:  # There is no more for now, even if there was once.
                        for one in self._subscriptions.values():
                            _settle(one)
            except NoLongerReadable as refusal:
                await refuse(self._socket, refusal.reason)
            except Expired as gap:
                await self._send({"type": "error", "id": None, "error": "resume_gap", "message": str(gap)})
                await self._socket.close(1012)
            except HubClosed:
                await self._send(
                    {"type": "error", "id": None, "error": "unavailable", "message": "The server is stopping."}
                )
                await self._socket.close(1012)

    async def _deliver_one(self, event: LogEvent) -> None:
        shown = envelope(self._thread_id, event)
        waiting = [one for one in self._subscriptions.values() if one.seen < event.seq]
        takers = {one for one in waiting if shown is not None and _admits(one.wanted, shown)}
        if shown is not None and takers:
            await self._send(shown)
        for one in waiting:
            one.seen = event.seq
            one.replayed += one in takers and event.seq <= one.end
            if event.seq >= one.end:
                _settle(one)


def _settle(subscription: Subscription) -> None:
    if not subscription.caught_up.done():
        subscription.caught_up.set_result(None)


@routes.websocket("/threads/{thread_id}/stream/events")
async def socket_events(process: Web, socket: WebSocket, thread_id: UUID) -> None:
    # The client's messages are not read before the handshake is accepted.
    try:
        web = await identified(process, socket)
        await web.may_thread(thread_id, "read")
    except RequestError as error:
        # Browsers see the code of a close frame, and not the status of a refused handshake.
        await socket.accept()
        await refuse(socket, error)
        return
    await socket.accept()
    with web.while_admitted():
        await Socket(process, web, thread_id, socket).run()
    if not web.still_admitted and socket.application_state is WebSocketState.CONNECTED:
        await refuse(socket, Denied(401, "The API key is missing, has expired or was revoked."))


async def refuse(socket: WebSocket, error: RequestError) -> None:
    """Close a socket with a code that clients of the protocol map to an HTTP status, so that they do not reconnect."""
    with suppress(WebSocketDisconnect):  # The client has already disconnected.
        await socket.close(4000 + error.status, str(error)[:100])
