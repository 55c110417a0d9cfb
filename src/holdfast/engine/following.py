"""Following a chain of runs across interrupts: a run, the run that resumes it, and so on.

The event log decides which run continues which: the next run of the thread that begins after a pause, if it resumes or
continues from there. So every process finds the same chain from any cursor.
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
from holdfast.streams.sse import START_KINDS

BEGINNINGS_AND_ENDS = """
SELECT seq, run_id, kind, namespace, data, created_at FROM event
WHERE thread_id = %(thread_id)s AND seq > %(after)s AND seq <= %(through)s AND kind IN ('accepted', 'metadata', 'end')
ORDER BY seq
"""

KWARGS = "SELECT kwargs FROM run WHERE run_id = %(run_id)s"

ENDED = "SELECT finished_at IS NOT NULL AS ended FROM run WHERE run_id = %(run_id)s"

THREAD_STATUS = """
SELECT last_seq, status = 'interrupted' AS paused FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL
"""

# How many ticks pass between two checks that the thread still exists, in case a hint was lost.
TICKS_BETWEEN_CHECKS = 12


class RunChain:
    """A chain of runs. `current` is the run that is executing, or that ended last."""

    def __init__(self, database: Database, hub: Hub, thread_id: UUID, run_id: UUID) -> None:
        self._database = database
        self._hub = hub
        self._thread_id = thread_id
        self._first = run_id
        self.current = run_id
        self.paused = False
        self.over = False

    async def catch_up(self, after: int, through: int) -> None:
        """Read the log up to a cursor, to find the current run."""
        parameters = {"thread_id": self._thread_id, "after": after, "through": through}
        for row in await self._rows(BEGINNINGS_AND_ENDS, parameters, binary=True):
            if not self.over:
                await self._see(LogEvent(**row))

    async def paused_at(self, after: int | None) -> int | None:
        """For a run whose events have expired: the event number to wait from. None if the thread no longer waits for a
        resume, or if events after the cursor have expired."""
        for row in await self._rows(THREAD_STATUS, {"thread_id": self._thread_id}):
            if row["paused"] and (after is None or after >= row["last_seq"]):
                self.paused = True
                return int(row["last_seq"])
        return None

    async def events(self, after: int, *, tick: float) -> AsyncIterator[list[LogEvent]]:
        """The events of the chain after a cursor, live; an empty list about every `tick` seconds, also during a pause.

        Ends after the first run that does not pause, or when the thread continues with another input.
        """
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
        async for events in self._hub.run_events(self._thread_id, run_id, after, tick=tick, ended=over):
            end = next((event for event in events if event.kind == "end"), end)
            yield events
        self._ended(end)

    async def _wait(self, after: int, tick: float) -> AsyncIterator[int | None]:
        """Wait for the run that continues. Yields None on each tick, and at last the number of the run's first event.
        Ends without a number if no run will continue."""
        with self._hub.watch(self._thread_id, after) as feed:
            touched, ticks = feed.changes, 0
            waiting = self._hub.thread_events(self._thread_id, after, tick=tick, include_changes=True, counted=False)
            async for events in waiting:
                for event in events:
                    if event.kind in START_KINDS and event.run_id != self.current:
                        await self._see(event)
                        if self.over:
                            return
                        if not self.paused:
                            yield event.seq
                            return
                if not events:
                    ticks += 1
                    look = feed.changes != touched or ticks % TICKS_BETWEEN_CHECKS == 0
                    if look and not await self._rows(THREAD_STATUS, {"thread_id": self._thread_id}):
                        return
                    touched = feed.changes
                    yield None

    async def _rows(self, statement: str, parameters: dict[str, Any], *, binary: bool = False) -> list[DictRow]:
        """Execute a statement, and try again during an outage of the database, like the hub."""
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
        elif event.kind in START_KINDS and event.run_id != self.current:
            found = await self._rows(KWARGS, {"run_id": event.run_id})
            if not found:
                return  # It was rolled back: the interrupt waits as before.
            if found[0]["kwargs"].get("input") is not None and resume_of(found[0]["kwargs"]) is None:
                self.over = True
                return
            self.current, self.paused = event.run_id, False

    def _ended(self, end: LogEvent | None) -> None:
        """Note the end of the current run. After a rollback the interrupt that it resumed waits again."""
        data = {"status": "rolled_back"} if end is None else orjson.loads(end.data)
        undone = data["status"] == "rolled_back" and self.current != self._first
        self.paused = bool(data.get("paused")) or undone
        self.over = not self.paused
