"""/threads/{thread_id}/stream: the runs of a thread, one after the other, in v1 shapes. It does not end with a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated
from uuid import UUID

import orjson
import psycopg
import structlog
from fastapi import Header, Query
from langgraph.types import StateSnapshot
from psycopg_pool import PoolTimeout
from starlette.responses import Response

from holdfast.api.context import Web, WebContext
from holdfast.api.response_models import streamed_thread
from holdfast.api.routes import Routes
from holdfast.api.runs import event_cursor, split_list
from holdfast.api.state import present_state
from holdfast.api.streaming import STREAM_HEADERS, Breakable, readable, resumed_at
from holdfast.engine.thread_state import read_state
from holdfast.engine.threads import state_times
from holdfast.errors import InvalidRequest, NotFound, RequestError
from holdfast.streams.log import LogEvent, newest_seqs, read_after
from holdfast.streams.serialize import to_json
from holdfast.streams.sse import HEARTBEAT, START_KINDS, frame
from holdfast.telemetry.exceptions import type_and_place

log = structlog.get_logger(__name__)

routes = Routes(tags=["threads"])

MODES = ("run_modes", "lifecycle", "state_update")
DESCRIPTION = """
`run_modes` (the default) has the events of every run, as in that run's own stream. `lifecycle` has the `metadata` with
which a run begins, or continues after its worker was lost. Both have `metadata` with the status
`run_done` at the end of a run that had begun. `state_update` has the thread's state, as `GET …/state` shows it,
whenever a run has ended or the state was updated by hand. It is the state at the time of sending: of several updates
in quick succession only the last may be sent.

Without `Last-Event-ID` the stream begins with the next event. With `-`, `-1`, `0` or any other value that is not the id
of an event here it begins with the thread's first event that is still kept. An id after which events have expired is
answered 410. A stream that resumes at an id begins with the present state, if the request asks for states.
The stream ends when the thread is deleted.
"""

Modes = Annotated[
    Sequence[str], Query(description=f"Any of {', '.join(MODES)}: repeated, separated by commas, or a JSON array.")
]


@routes.get(
    "/threads/{thread_id}/stream",
    summary="Stream all runs of a thread",
    description=DESCRIPTION,
    response_class=Response,
    responses=streamed_thread(404, 410),
)
async def stream(
    web: Web,
    thread_id: UUID,
    stream_mode: Modes = (),
    stream_modes: Modes = (),
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    modes = split_list([*stream_mode, *stream_modes]) or ["run_modes"]
    for mode in modes:
        if mode not in MODES:
            raise InvalidRequest(f"stream_mode: '{mode}' is not one of {', '.join(MODES)}.")
    await web.may_thread(thread_id, "read")
    resumed = last_event_id is not None
    cursor = event_cursor(last_event_id) or 0
    async with web.database.connection() as connection:
        moments = await state_times(connection, thread_id)
        if moments is None:
            raise NotFound("Thread", thread_id)
        after = 0 if resumed else (await newest_seqs(connection, {thread_id: 0})).get(thread_id, 0)
    if resumed:
        after = await resumed_at(web, thread_id, cursor)
    created_at, updated_at = moments
    shown = created_at if resumed else updated_at
    follower = Follower(web, thread_id, created_at, frozenset(modes), after, shown)
    location = {"location": f"/threads/{thread_id}/stream?stream_mode={','.join(modes)}"}
    return Breakable(web, follower.body(), media_type="text/event-stream", headers=STREAM_HEADERS | location)


class Gone(Exception):
    """The thread has been deleted."""


class Follower:
    """One watcher of a thread: where it stands in the log, and the state it was shown last."""

    def __init__(
        self,
        web: WebContext,
        thread_id: UUID,
        created_at: datetime,
        modes: Collection[str],
        after: int,
        state_shown: datetime,
    ) -> None:
        self._web = web
        self._thread_id = thread_id
        self._created_at = created_at
        self._modes = modes
        self._after = after
        self._state_shown = state_shown

    async def body(self) -> AsyncIterator[bytes]:
        hub, tick = self._web.hub, self._web.settings.stream_heartbeat
        try:
            # Subscribe before reading the thread, so that no change is missed in between.
            with hub.watch(self._thread_id, self._after):
                if first := await self._state():
                    yield first
                followed = hub.thread_events(self._thread_id, self._after, tick=tick, include_changes=True)
                async for events in readable(self._web, self._thread_id, followed):
                    if not events:
                        yield await self._state() or HEARTBEAT
                        continue
                    self._after = events[-1].seq
                    if framed := b"".join(self._frame(event) for event in events):
                        yield framed
                    ends = [event for event in events if event.kind == "end"]
                    if ends and (state := await self._state(undone=any(_rolled_back(end) for end in ends))):
                        yield state
        except Gone:
            # Send all events from before the deletion, unless the id already belongs to another caller's thread.
            with suppress(psycopg.Error, PoolTimeout, OSError, RequestError):
                more = True
                while more:
                    async with self._web.database.connection() as connection:
                        rest, more = await read_after(connection, self._thread_id, self._after)
                    await self._web.may_thread(self._thread_id, "read")
                    self._after = rest[-1].seq if rest else self._after
                    yield b"".join(self._frame(event) for event in rest)
        # HubClosed breaks the connection: clients interpret a clean end as the deletion of the thread and would not
        # reconnect.

    def _frame(self, event: LogEvent) -> bytes:
        if event.kind == "end":
            if self._modes == {"state_update"}:
                return b""
            done = orjson.dumps({"status": "run_done", "run_id": str(event.run_id)})
            return b"event: metadata\r\ndata: %s\r\nid: %d\r\n\r\n" % (done, event.seq)
        if "run_modes" in self._modes or ("lifecycle" in self._modes and event.kind in START_KINDS):
            return frame(event)
        return b""

    async def _state(self, *, undone: bool = False) -> bytes:
        """The state, if it was asked for and has been updated since it was last shown, or gone back to what it was
        before a run that is undone. Raises Gone."""
        try:
            async with self._web.database.connection() as connection:
                moments = await state_times(connection, self._thread_id)
            # A thread that was created later is another one, which has been given the same id.
            if moments is None or moments[0] != self._created_at:
                raise Gone
            updated_at = moments[1]
            if "state_update" not in self._modes or not (undone or updated_at != self._state_shown):
                return b""
            state = await self._read_state()
        except (psycopg.Error, PoolTimeout, OSError):
            # Tried again at the next tick: the state that was shown last is still the old one.
            return b""
        self._state_shown = updated_at
        if state is None:
            return b""
        shown = to_json({"state": present_state(state), "thread_id": str(self._thread_id)})
        return b"event: state_update\r\ndata: %s\r\nid: %d\r\n\r\n" % (shown, self._after)

    async def _read_state(self) -> StateSnapshot | None:
        try:
            return await read_state(self._web.database, self._web.catalog, self._thread_id, {}, subgraphs=False)
        except (psycopg.Error, PoolTimeout, OSError):
            raise
        except Exception as error:
            # The thread's graph is not here any more, or its factory fails. The runs can be watched all the same.
            log.warning("state.unreadable", thread_id=str(self._thread_id), error=type_and_place(error))
            return None


def _rolled_back(end: LogEvent) -> bool:
    return bool(orjson.loads(end.data)["status"] == "rolled_back")
