"""/threads/{thread_id}/stream/events: the thread-centric protocol's events, over SSE and WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from holdfast.api.commands import CommandFailed, answer
from holdfast.api.context import Web, WebContext
from holdfast.api.edge import JsonRoute
from holdfast.api.streaming import STREAM_HEADERS
from holdfast.errors import BadRequest, RequestError
from holdfast.streams.envelopes import CHANNELS, Filter, envelope
from holdfast.streams.hub import HubClosed
from holdfast.streams.log import LogEvent
from holdfast.streams.sse import HEARTBEAT

router = APIRouter(tags=["event streaming"], route_class=JsonRoute)


def _whole_number(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequest(f"{name} must be a whole number from 0 on.")
    return value


def read_filter(params: Any) -> tuple[Filter, int]:
    """A subscription's filter and cursor; BadRequest says what is wrong with it."""
    if not isinstance(params, dict):
        raise BadRequest("A subscription is an object with channels.")
    channels = params.get("channels")
    if not isinstance(channels, list) or not channels:
        raise BadRequest(f"channels must name at least one of: {', '.join(sorted(CHANNELS))}.")
    for channel in channels:
        if not isinstance(channel, str) or not (channel in CHANNELS or channel.startswith("custom:")):
            raise BadRequest(f"channel {channel!r} is not one of: {', '.join(sorted(CHANNELS))}.")
    namespaces = params.get("namespaces") or []
    if not isinstance(namespaces, list) or not all(
        isinstance(prefix, list) and all(isinstance(segment, str) for segment in prefix) for prefix in namespaces
    ):
        raise BadRequest("namespaces must be a list of lists of segments.")
    depth = _whole_number(params.get("depth"), "depth")
    since = _whole_number(params.get("since"), "since")
    return Filter(frozenset(channels), tuple(tuple(prefix) for prefix in namespaces), depth), since or 0


@router.post("/threads/{thread_id}/stream/events")
async def stream_events(web: Web, thread_id: UUID, request: Request) -> Response:
    try:
        wanted, since = read_filter(await request.json())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None

    async def body() -> AsyncIterator[bytes]:
        try:
            async for events in web.hub.thread_events(thread_id, since, tick=web.settings.stream_heartbeat):
                framed = b"".join(_frame(thread_id, event, wanted) for event in events)
                if framed or not events:
                    yield framed or HEARTBEAT
        except HubClosed:
            return

    return StreamingResponse(body(), media_type="text/event-stream", headers=STREAM_HEADERS)


def _frame(thread_id: UUID, event: LogEvent, wanted: Filter) -> bytes:
    shown = _admitted(thread_id, event, [wanted])
    if shown is None:
        return b""
    return b"event: %s\r\ndata: %s\r\nid: %d\r\n\r\n" % (shown["method"].encode(), orjson.dumps(shown), event.seq)


def _admitted(thread_id: UUID, event: LogEvent, filters: list[Filter]) -> dict[str, Any] | None:
    shown = envelope(thread_id, event)
    if shown is None:
        return None
    params = shown["params"]
    if any(wanted.admits(shown["method"], params["namespace"], params["data"]) for wanted in filters):
        return shown
    return None


@dataclass
class Subscription:
    """What a client asked for on a socket: from `since` on, and delivered through `seen`."""

    wanted: Filter
    since: int
    seen: int


class Socket:
    """One WebSocket: commands in, answers and events out. An event is sent once, however many subscriptions match."""

    def __init__(self, web: WebContext, thread_id: UUID, socket: WebSocket) -> None:
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
                await self._receive(await self._socket.receive_text())
        except WebSocketDisconnect:
            pass
        finally:
            if self._follower is not None:
                self._follower.cancel()
                await asyncio.wait({self._follower})

    async def _send(self, message: dict[str, Any]) -> None:
        async with self._sending:
            await self._socket.send_text(orjson.dumps(message).decode())

    async def _receive(self, text: str) -> None:
        identity = None
        try:
            try:
                command = orjson.loads(text)
            except orjson.JSONDecodeError:
                raise CommandFailed("invalid_argument", "The frame is not JSON.") from None
            identity = command.get("id") if isinstance(command, dict) else None
            method = command.get("method") if isinstance(command, dict) else None
            if not isinstance(identity, int) or not isinstance(method, str):
                raise CommandFailed("invalid_argument", "A command has an integer id and a method.")
            params = command.get("params") or {}
            if method.startswith("subscription."):
                result = await self._subscription(method, params)
                await self._send({"type": "success", "id": identity, "result": result})
            else:
                await self._send(await answer(self._web, self._thread_id, command))
        except CommandFailed as failure:
            await self._send({"type": "error", "id": identity, "error": failure.code, "message": str(failure)})
        except RequestError as failure:
            await self._send({"type": "error", "id": identity, "error": "invalid_argument", "message": str(failure)})

    async def _subscription(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        match method:
            case "subscription.subscribe" | "subscription.reconnect":
                wanted, since = read_filter(params)
                if method == "subscription.reconnect" and params.get("since") is None:
                    raise CommandFailed("invalid_argument", "subscription.reconnect needs since.")
                identity = str(params.get("subscription_id") or self._next_subscription)
                self._next_subscription += 1
                await self._follow(identity, Subscription(wanted, since, since))
                return {"subscription_id": identity, "replayed_events": 0}
            case "subscription.unsubscribe":
                if self._subscriptions.pop(str(params.get("subscription_id")), None) is None:
                    raise CommandFailed("no_such_subscription", "There is no subscription with that id.")
                return {}
            case _:
                raise CommandFailed("unknown_command", f"There is no command {method}.")

    async def _follow(self, identity: str, new: Subscription) -> None:
        """Take a subscription in, and read on from where the one that is furthest behind stands."""
        if self._follower is not None:
            async with self._delivering:  # Not between sending an event and noting it.
                self._follower.cancel()
            await asyncio.wait({self._follower})
        self._subscriptions[identity] = new
        self._follower = asyncio.create_task(self._deliver(min(one.seen for one in self._subscriptions.values())))

    async def _deliver(self, since: int) -> None:
        try:
            async for events in self._web.hub.thread_events(
                self._thread_id, since, tick=self._web.settings.stream_heartbeat
            ):
                for event in events:
                    async with self._delivering:
                        await self._deliver_one(event)
        except HubClosed:
            await self._send(
                {"type": "error", "id": None, "error": "unavailable", "message": "The server is stopping."}
            )
            await self._socket.close(1012)

    async def _deliver_one(self, event: LogEvent) -> None:
        subscriptions = list(self._subscriptions.values())
        waiting = [one for one in subscriptions if one.seen < event.seq]
        had = [one.wanted for one in subscriptions if one.since < event.seq <= one.seen]
        shown = _admitted(self._thread_id, event, [one.wanted for one in waiting])
        if shown is not None and _admitted(self._thread_id, event, had) is None:
            await self._send(shown)
        for one in waiting:
            one.seen = event.seq


@router.websocket("/threads/{thread_id}/stream/events")
async def socket_events(socket: WebSocket, thread_id: UUID) -> None:
    await socket.accept()
    web: WebContext = socket.app.state.holdfast
    await Socket(web, thread_id, socket).run()
