"""Following a piece of work across its pauses: a run, the run that answers what it asked, and so on.

Which run goes on with which is in the log: the next run of the thread that begins after a pause, if it answers or goes
on from there. So every process comes to the same chain, whatever the cursor it starts from.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import orjson
import psycopg
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.interrupts.resume import resume_of
from holdfast.lifecycle.backoff import Backoff
from holdfast.streams.hub import Hub, HubClosed
from holdfast.streams.log import LogEvent
from holdfast.streams.sse import BEGINNINGS

TURNS = """
SELECT seq, run_id, kind, namespace, data, created_at FROM event
WHERE thread_id = %(thread_id)s AND seq > %(after)s AND seq <= %(through)s AND kind IN ('accepted', 'metadata', 'end')
ORDER BY seq
"""

KWARGS = "SELECT kwargs FROM run WHERE run_id = %(run_id)s"

ENDED = "SELECT finished_at IS NOT NULL AS ended FROM run WHERE run_id = %(run_id)s"

RESTS = """
SELECT last_seq, status = 'interrupted' AS paused FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL
"""

# Ticks between two looks whether the thread is still there, for a hint that was lost.
LOOK_EVERY = 12


class Chain:
    """Where the work stands: `current` is the run that does it, or did it last."""

    def __init__(self, database: Database, hub: Hub, thread_id: UUID, run_id: UUID) -> None:
        self._database = database
        self._hub = hub
        self._thread_id = thread_id
        self._first = run_id
        self.current = run_id
        self.paused = False
        self.over = False

    async def catch_up(self, after: int, through: int) -> None:
        """Learn from the log what has been up to a cursor."""
        parameters = {"thread_id": self._thread_id, "after": after, "through": through}
        for row in await self._rows(TURNS, parameters, binary=True):
            if not self.over:
                await self._see(LogEvent(**row))

    async def rest(self, after: int | None) -> int | None:
        """For a run whose events have expired: where to wait, if the thread still waits for an answer and nothing has
        been said after the cursor that cannot be said again."""
        for row in await self._rows(RESTS, {"thread_id": self._thread_id}):
            if row["paused"] and (after is None or after >= row["last_seq"]):
                self.paused = True
                return int(row["last_seq"])
        return None

    async def events(self, after: int, *, tick: float) -> AsyncIterator[list[LogEvent]]:
        """The events of the work after a cursor, live; an empty list about every `tick` seconds, also in a pause. Ends
        with the first run that does not pause, or when somebody goes on otherwise."""
        while not self.over:
            if self.paused:
                begun = None
                async for began_at in self._wait(after, tick):
                    begun = began_at
                    if begun is None:
                        yield []
                if begun is None:
                    return
                after = begun - 1
            async for events in self._run(after, tick):
                if events:
                    after = events[-1].seq
                yield events

    async def _run(self, after: int, tick: float) -> AsyncIterator[list[LogEvent]]:
        run_id, end = self.current, None
        found = await self._rows(ENDED, {"run_id": run_id})
        over = not found or found[0]["ended"]
        async for events in self._hub.run_events(self._thread_id, run_id, after, tick=tick, over=over):
            end = next((event for event in events if event.kind == "end"), end)
            yield events
        self._ended(end)

    async def _wait(self, after: int, tick: float) -> AsyncIterator[int | None]:
        """Until a run goes on: yields None now and then, and at last the number of its first event. Just ends when no
        run will."""
        with self._hub.watch(self._thread_id, after) as feed:
            touched, ticks = feed.touches, 0
            waiting = self._hub.thread_events(self._thread_id, after, tick=tick, touches=True, counted=False)
            async for events in waiting:
                for event in events:
                    if event.kind in BEGINNINGS and event.run_id != self.current:
                        await self._see(event)
                        if self.over:
                            return
                        if not self.paused:
                            yield event.seq
                            return
                if not events:
                    ticks += 1
                    look = feed.touches != touched or ticks % LOOK_EVERY == 0
                    if look and not await self._rows(RESTS, {"thread_id": self._thread_id}):
                        return
                    touched = feed.touches
                    yield None

    async def _rows(self, statement: str, parameters: dict[str, Any], *, binary: bool = False) -> list[DictRow]:
        """Survives an outage of the database, as the hub does."""
        backoff = Backoff("stream.outage", "stream.recovered")
        while True:
            try:
                async with self._database.connection() as connection:
                    found = await (await connection.execute(statement, parameters, binary=binary)).fetchall()
                backoff.succeeded()
                return found
            except (psycopg.Error, OSError) as error:
                if self._hub.closing:
                    raise HubClosed from error
                await backoff.failed(error)

    async def _see(self, event: LogEvent) -> None:
        if not self.paused:
            if event.run_id == self.current and event.kind == "end":
                self._ended(event)
        elif event.kind in BEGINNINGS and event.run_id != self.current:
            found = await self._rows(KWARGS, {"run_id": event.run_id})
            if not found:
                return  # It was undone: the question waits as before.
            if found[0]["kwargs"].get("input") is not None and resume_of(found[0]["kwargs"]) is None:
                self.over = True
                return
            self.current, self.paused = event.run_id, False

    def _ended(self, end: LogEvent | None) -> None:
        """A run that is rolled back has never been: what it answered waits again."""
        told = {"status": "rolled_back"} if end is None else orjson.loads(end.data)
        undone = told["status"] == "rolled_back" and self.current != self._first
        self.paused = bool(told.get("paused")) or undone
        self.over = not self.paused
