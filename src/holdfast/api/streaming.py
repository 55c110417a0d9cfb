"""Responses that last as long as a run: streams, and JSON that is waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import urlencode
from uuid import UUID

import psycopg
from psycopg.rows import DictRow
from starlette.responses import StreamingResponse
from starlette.types import Send

from holdfast.api.context import WebContext
from holdfast.errors import Gone, NotFound
from holdfast.resources.runs import get_run
from holdfast.resources.threads import get_thread
from holdfast.streams.hub import HubClosed
from holdfast.streams.log import LogEvent, first_after_gap, last_output
from holdfast.streams.serialize import to_json
from holdfast.streams.sse import HEARTBEAT, frame
from holdfast.telemetry.backoff import Backoff

STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Breakable(StreamingResponse):
    """A response that breaks off where it is when the process goes away, for clients that would take a clean end for
    the end of it all. They come back to another process."""

    async def stream_response(self, send: Send) -> None:
        with suppress(HubClosed):
            await super().stream_response(send)


def locations(run: DictRow, suffix: str, *, stateless: bool = False) -> dict[str, str]:
    """Where the run is, and where to go on from when the connection breaks."""
    base = f"/runs/{run['run_id']}" if stateless else f"/threads/{run['thread_id']}/runs/{run['run_id']}"
    return {"content-location": base, "location": f"{base}/{suffix}"}


async def refuse_gap(web: WebContext, thread_id: UUID, after: int) -> None:
    """Raises Gone for a cursor into events of a thread that have expired: what would follow is not known any more.
    From the beginning (0) a stream has whatever is left."""
    if after == 0:
        return
    async with web.database.connection() as connection:
        available = await first_after_gap(connection, thread_id, after)
    if available is not None:
        raise Gone(
            f"The events after {after} have expired, so the stream of thread {thread_id} cannot be resumed there. Read "
            f"the thread's state, and watch on from {available - 1}, or from the beginning of what is kept."
        )


def stream_response(
    web: WebContext,
    run: DictRow,
    *,
    after: int | None,
    modes: frozenset[str] | None = None,
    cancel_on_disconnect: bool = False,
    stateless: bool = False,
) -> StreamingResponse:
    """A run's events from a cursor on (None: from the run's beginning), live until it ends.

    Raises Gone for a cursor into events that have expired: what would follow is not known any more.
    """
    if after is not None and run["first_seq"] is None and run["attempt"] > 0:
        raise Gone(
            f"The events of run {run['run_id']} have expired, so its stream cannot be resumed after {after}. "
            "Its result is kept: join the run, or read the thread's state."
        )

    async def body() -> AsyncIterator[bytes]:
        done = False
        start = max(0, (run["first_seq"] or 1) - 1) if after is None else after
        try:
            async for events in _events(web, run, start):
                yield b"".join(frame(event, modes) for event in events) if events else HEARTBEAT
            done = True
        except HubClosed:
            done = True
            raise  # The run goes on, and so can the client, at the Location it was given.
        finally:
            if cancel_on_disconnect and not done:
                web.spawn(web.cancel(run["thread_id"], [run["run_id"]], "interrupt"))

    # Clients go on at the Location as it stands, so it says what they asked for here.
    asked = [("stream_mode", mode) for mode in sorted(modes or ())]
    if cancel_on_disconnect:
        asked.append(("cancel_on_disconnect", "true"))
    place = f"stream?{urlencode(asked)}" if asked else "stream"
    headers = STREAM_HEADERS | locations(run, place, stateless=stateless)
    return Breakable(body(), media_type="text/event-stream", headers=headers)


def wait_response(
    web: WebContext, run: DictRow, *, cancel_on_disconnect: bool = False, stateless: bool = False
) -> StreamingResponse:
    """A run's result as JSON once it has ended; a newline now and then until it has."""

    async def body() -> AsyncIterator[bytes]:
        done = False
        try:
            start = max(0, (run["first_seq"] or 1) - 1)
            async for events in _events(web, run, start):
                if not events:
                    yield b"\n"
            done = True
        except HubClosed:
            done = True
            raise  # Half an answer must not look like one.
        finally:
            if cancel_on_disconnect and not done:
                web.spawn(web.cancel(run["thread_id"], [run["run_id"]], "interrupt"))
        backoff = Backoff("stream.outage", "stream.recovered")
        while True:
            try:
                answer = await result(web, run["thread_id"], run["run_id"])
                break
            except (psycopg.OperationalError, psycopg.InterfaceError, OSError) as error:
                # Too late to tell the client, and no need: the run has ended, and its result can wait.
                if web.hub.closing:
                    raise HubClosed from error
                await backoff.failed(error)
                yield b"\n"
        backoff.succeeded()
        yield answer

    headers = {"cache-control": "no-store"} | locations(run, "join", stateless=stateless)
    return Breakable(body(), media_type="application/json", headers=headers)


def _events(web: WebContext, run: DictRow, after: int) -> AsyncIterator[list[LogEvent]]:
    """A run's events, and an empty list when it is time to say that we are still there. Whether the run has ended is
    asked of its row, as well: one that ended long ago, and left nothing in the log, tells nobody."""
    over = run["status"] not in ("pending", "running")
    return web.hub.run_events(run["thread_id"], run["run_id"], after, tick=web.settings.stream_heartbeat, over=over)


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
