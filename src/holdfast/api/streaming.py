"""Responses that last as long as a run: streams, and JSON results of a wait."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from urllib.parse import urlencode
from uuid import UUID

import orjson
import psycopg
from psycopg.rows import DictRow
from psycopg_pool import PoolTimeout
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from holdfast.api.context import WebContext
from holdfast.api.disconnects import ClientConnection, WhileOpen
from holdfast.engine.following import RunChain
from holdfast.engine.runs import get_run
from holdfast.engine.threads import get_thread
from holdfast.errors import Gone, NotFound, RequestError
from holdfast.lifecycle.backoff import Backoff
from holdfast.streams.hub import Expired, HubClosed
from holdfast.streams.log import LogEvent, find_position, last_output
from holdfast.streams.serialize import to_json
from holdfast.streams.sse import HEARTBEAT, frame

# White space before JSON is insignificant, so it serves as a heartbeat.
WAITING = b"\n"
# Larger than what uvicorn and the kernel take of a client that does not read.
LARGE_CHUNK_BYTES = 64 * 1024
STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Breakable(StreamingResponse):
    """A response that is aborted when the process stops, because clients would treat a clean end as the end of the
    stream. They reconnect to another process. It breaks off in the same way when the caller's API key stops working:
    the client comes back and is answered 401."""

    def __init__(
        self, web: WebContext, content: AsyncIterable[bytes], *, media_type: str, headers: Mapping[str, str]
    ) -> None:
        self._web = web
        super().__init__(content, media_type=media_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientConnection(receive)
        try:
            with self._web.while_admitted(), WhileOpen(client):
                await self.stream_response(send)
        finally:
            await client.stopped()

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(HubClosed):
            async for chunk in self.body_iterator:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if len(chunk) > LARGE_CHUNK_BYTES:
                    # uvicorn waits for a slow client before it writes, not after: without this, the next chunk would
                    # be loaded while the client has not taken this one.
                    del chunk
                    await send({"type": "http.response.body", "body": b"", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class Awaited(Breakable):
    """JSON whose last part is the answer: what is sent with it is the end of it."""

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(HubClosed):
            async for chunk in self.body_iterator:
                await send({"type": "http.response.body", "body": chunk, "more_body": chunk == WAITING})


class EventStream(Breakable):
    """Server-Sent Events with regular heartbeats. `body` makes the frames, with a heartbeat among them every so many
    seconds, or (None) without."""

    def __init__(
        self, web: WebContext, body: Callable[[float | None], AsyncIterator[bytes]], headers: Mapping[str, str]
    ) -> None:
        self._body = body
        super().__init__(web, _nothing(), media_type="text/event-stream", headers=headers)

    async def stream_response(self, send: Send) -> None:
        if not self._web.own_layers_only:
            self.body_iterator = self._body(self._web.settings.stream_heartbeat)
            await super().stream_response(send)
            return
        # One timer sends the heartbeats of all streams: to wake up each stream's task costs twice as much.
        self.body_iterator = self._body(None)
        with self._web.hub.heartbeat.calling(partial(_send_now, send)):
            await super().stream_response(send)


def _send_now(send: Send) -> None:
    """Send a heartbeat, unless that would have to wait: then the client does not read what was sent before."""
    sending = send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True}).__await__()
    try:
        next(sending)
    except StopIteration:
        return
    sending.close()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


def locations(run: DictRow, suffix: str, *, stateless: bool = False) -> dict[str, str]:
    """Where the run is, and where to go on from when the connection breaks."""
    base = f"/runs/{run['run_id']}" if stateless else f"/threads/{run['thread_id']}/runs/{run['run_id']}"
    return {"content-location": base, "location": f"{base}/{suffix}"}


def _watched(run: DictRow) -> DictRow:
    """The fields of a run that its stream needs. The other fields, such as the input, can be as large as a request
    body, and must not be kept for a stream that is open for days."""
    return {key: run[key] for key in ("run_id", "thread_id", "status", "attempt", "first_seq")}


async def resumed_at(web: WebContext, thread_id: UUID, cursor: int) -> int:
    """Where a stream of a thread goes on for a client's cursor: there, or at the beginning (0) if the thread has never
    given out that number. Raises Gone for a cursor into events that have expired: what would follow is not known any
    more. A stream from the beginning (0) starts at the oldest event that has not expired."""
    if cursor == 0:
        return 0
    async with web.database.connection() as connection:
        after, available = await find_position(connection, thread_id, cursor)
    if available is not None:
        raise Gone(
            f"The events after {cursor} have expired, so the stream of thread {thread_id} cannot be resumed there. "
            f"Read the thread's state, and watch on from {available - 1}, or from the beginning of what is kept. The "
            "server keeps events for EVENT_TTL_SECONDS."
        )
    return after


async def run_resumed_at(web: WebContext, run: DictRow, cursor: int | None) -> int | None:
    """The same for the stream of a run, where None is its beginning. What of it has expired is not looked for here."""
    if cursor is None or _has_expired(run):
        return cursor
    async with web.database.connection() as connection:
        return (await find_position(connection, run["thread_id"], cursor)).after or None


class NoLongerReadable(HubClosed):
    """The caller may not read the thread any more that it watches."""

    def __init__(self, reason: RequestError) -> None:
        super().__init__(str(reason))
        self.reason = reason


async def readable(
    web: WebContext, thread_id: UUID, followed: AsyncIterator[list[LogEvent]], run_id: UUID | None = None
) -> AsyncIterator[list[LogEvent]]:
    """Events of a thread, for as long as the caller may read it. Raises NoLongerReadable.

    Access is checked again whenever a run begins that is not `run_id`: the id of a thread that was deleted can be given
    to a thread of another caller. A caller who may read the later thread may not read the earlier one, and the hub may
    still keep events of the earlier one: so the events must be in the log, too. Raises Expired."""
    async for events in followed:
        if any(event.run_id != run_id for event in events):
            try:
                await web.may_thread(thread_id, "read")
                logged = web.auth is None or await web.hub.is_in_log(thread_id, events[0])
            except RequestError as reason:
                raise NoLongerReadable(reason) from None
            except (psycopg.Error, PoolTimeout, OSError) as error:
                raise HubClosed from error  # The client reconnects and gets the error then.
            if not logged:
                raise Expired(f"Events of thread {thread_id} have expired. Subscribe anew, and read the state.")
            run_id = events[-1].run_id
        yield events


def stream_response(
    web: WebContext,
    run: DictRow,
    *,
    after: int | None,
    modes: frozenset[str] | None = None,
    cancel_on_disconnect: bool = False,
    stateless: bool = False,
    follow: bool = False,
) -> StreamingResponse:
    """A run's events from a cursor on (None: from the run's beginning), live until it ends. `follow`: and those of the
    runs that resume it after an interrupt.

    Raises Gone for a cursor into events that have expired: what would follow is not known any more.
    """
    if not follow:
        _refuse_expired(run, after)
    run = _watched(run)
    chain = _chain(web, run) if follow else None

    async def body(tick: float | None) -> AsyncIterator[bytes]:
        done = False
        start = max(0, (run["first_seq"] or 1) - 1) if after is None else after
        try:
            followed = _events(web, run, start, tick) if chain is None else _followed(web, run, chain, after)
            async for events in followed:
                if events:
                    yield b"".join([frame(event, modes) for event in events])
                elif tick is not None:
                    yield HEARTBEAT
            done = True
        except HubClosed:
            done = True
            raise  # The run goes on, and so can the client, at the Location it was given.
        finally:
            if cancel_on_disconnect and not done:
                _cancel_abandoned(web, run, chain)

    # Clients resume at the Location unchanged, so it contains the parameters of this request.
    asked = [("stream_mode", mode) for mode in sorted(modes or ())]
    if follow:
        asked.append(("follow", "true"))
    if cancel_on_disconnect:
        asked.append(("cancel_on_disconnect", "true"))
    place = f"stream?{urlencode(asked)}" if asked else "stream"
    headers = STREAM_HEADERS | locations(run, place, stateless=stateless)
    return EventStream(web, body, headers)


def wait_response(
    web: WebContext,
    run: DictRow,
    *,
    cancel_on_disconnect: bool = False,
    stateless: bool = False,
    follow: bool = False,
) -> StreamingResponse:
    """A run's result as JSON once it has ended; a newline now and then until it has. `follow`: that of the run that
    brings its work to an end."""
    run = _watched(run)
    chain = _chain(web, run) if follow else None
    reader = _ResultReader()

    async def body() -> AsyncIterator[bytes]:
        done = False
        try:
            start = max(0, (run["first_seq"] or 1) - 1)
            tick = web.settings.stream_heartbeat
            followed = _events(web, run, start, tick) if chain is None else _followed(web, run, chain, None)
            async for events in followed:
                reader.read(events)
                if not events:
                    yield WAITING
            done = True
        except HubClosed:
            done = True
            raise  # A partial response must not look complete.
        finally:
            if cancel_on_disconnect and not done:
                _cancel_abandoned(web, run, chain)
        if chain is None and (answer := reader.result()) is not None:
            yield answer
            return
        backoff = Backoff("stream.outage", "stream.recovered")
        while True:
            try:
                answer = await result(web, run["thread_id"], run["run_id"] if chain is None else chain.current)
                break
            except (psycopg.OperationalError, psycopg.InterfaceError, OSError) as error:
                # The response has started, so its status cannot change. The run has ended, and its result remains
                # available.
                if web.hub.closing:
                    raise HubClosed from error
                await backoff.failed(error)
                yield WAITING
        backoff.succeeded()
        yield answer

    place = "join?follow=true" if follow else "join"
    headers = {"cache-control": "no-store"} | locations(run, place, stateless=stateless)
    return Awaited(web, body(), media_type="application/json", headers=headers)


def _cancel_abandoned(web: WebContext, run: DictRow, chain: RunChain | None) -> None:
    """Cancel the run that a client has stopped watching. A key that was revoked meanwhile cancels nothing: then it is
    the server that ended the stream."""
    if web.still_admitted:
        current = run["run_id"] if chain is None else chain.current
        web.abandoned.add(run["thread_id"], current)


class _ResultReader:
    """Computes a run's result from its events, if all of them are read from the beginning."""

    def __init__(self) -> None:
        self._output: bytes | None = None
        self._end: bytes | None = None

    def read(self, events: Sequence[LogEvent]) -> None:
        for event in events:
            if event.kind == "end":
                self._end = event.data
            elif not event.namespace and (event.kind == "values" or event.kind == "output"):
                self._output = event.data

    def result(self) -> bytes | None:
        """The result, equal to that in the database; None when it must be read from the database."""
        end = {} if self._end is None else orjson.loads(self._end)
        if end.get("status") in ("error", "timeout"):
            return to_json({"__error__": end["error"]})
        return self._output if end.get("status") in ("success", "interrupted") else None


def _events(web: WebContext, run: DictRow, after: int, tick: float | None) -> AsyncIterator[list[LogEvent]]:
    """A run's events, with an empty list when a heartbeat is due. The run's row also shows whether it has ended,
    because the events of a run that ended long ago have expired."""
    over = run["status"] not in ("pending", "running")
    return web.hub.run_events(run["thread_id"], run["run_id"], after, tick=tick, ended=over)


def _has_expired(run: DictRow) -> bool:
    """Whether the events of a run that has begun are gone."""
    return run["first_seq"] is None and run["attempt"] > 0


def _refuse_expired(run: DictRow, after: int | None) -> None:
    if after is not None and _has_expired(run):
        raise Gone(
            f"The events of run {run['run_id']} have expired, so its stream cannot be resumed after {after}. "
            "Its result is kept: join the run, or read the thread's state. The server keeps events for "
            "EVENT_TTL_SECONDS."
        )


async def check_followed(web: WebContext, run: DictRow, after: int | None) -> None:
    """Raise Gone for a cursor from where a run cannot be followed: its events have expired, unless the thread still
    waits there."""
    if await _chain(web, run).paused_at(after) is None:
        _refuse_expired(run, after)


def _chain(web: WebContext, run: DictRow) -> RunChain:
    return RunChain(web.database, web.hub, run["thread_id"], run["run_id"])


async def _followed(web: WebContext, run: DictRow, chain: RunChain, after: int | None) -> AsyncIterator[list[LogEvent]]:
    """The events of the run and of the runs that resume it."""
    start = max(0, (run["first_seq"] or 1) - 1)
    cursor = start if after is None else max(start, after)
    if _has_expired(run):
        paused_at = await chain.paused_at(after)
        if paused_at is None and after is None:
            return
        # The run was paused at the cursor when the request was accepted, so all newer events come after the cursor.
        chain.paused = True
        cursor = paused_at or cursor
    elif cursor > start:
        await chain.catch_up(start, cursor)
    followed = chain.events(cursor, tick=web.settings.stream_heartbeat)
    async for events in readable(web, run["thread_id"], followed, run["run_id"]):
        yield events


async def result(web: WebContext, thread_id: UUID, run_id: UUID) -> bytes:
    """What `wait` and `join` return for a run that has ended: its last values, or its error."""
    async with web.database.connection() as connection:
        try:
            run = await get_run(connection, run_id)
        except NotFound:
            return b"{}"  # Rolled back: it left nothing.
        if run["status"] in ("error", "timeout"):
            return to_json({"__error__": run["error"]})
        if run["first_seq"] is not None:
            output = await last_output(connection, thread_id, run_id, run["first_seq"])
            if output is not None:
                return output
        try:
            thread = await get_thread(connection, thread_id)
        except NotFound:
            return b"{}"
        asked = [interrupt for of_task in thread["interrupts"].values() for interrupt in of_task]
        return to_json({**(thread["values"] or {}), "__interrupt__": asked} if asked else thread["values"] or {})
