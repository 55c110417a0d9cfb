"""The journal: everything a worker's runs make durable goes through here, and is fenced here.

One connection, one loop: take everything that waits, write it in one transaction, resolve the waiters, repeat. A batch
grows for as long as the previous commit takes, and if that was one of several runs, for as long again, unless all runs
there are wait for it: slow commits on a busy machine are followed by large ones, not by many. A run's first entries,
which come right after its claim, rest for about as long as a commit takes, unless somebody waits for them: a run that
is over by then is written in one.

Guarantees:

- What a run hands in is written in that order, whole or not at all with its neighbours in a batch.
- Nothing is written for a run that is not held under its fence. Such a run is told LeaseLost.
- A run whose data the database refuses fails alone.
- While the database is away nothing is dropped; runs wait, and their buffers are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID
from weakref import WeakSet

import orjson
import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import open_session
from holdfast.db.pipelines import gathered
from holdfast.db.plans import KeptPlans
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.queue import LOCK_THREADS
from holdfast.engine.ready import ReadyRun
from holdfast.engine.states import RunStatus
from holdfast.errors import JournalFailed, LeaseLost, RunSignal
from holdfast.settings import Settings
from holdfast.streams.hints import Flush
from holdfast.telemetry import tracing
from holdfast.telemetry.backoff import Backoff
from holdfast.telemetry.metrics import Metrics
from holdfast.worker.batch import (
    INSPECT,
    NO_TIES,
    CheckpointEntry,
    Entry,
    EventEntry,
    Portion,
    Ties,
    UsageEntry,
    WritesEntry,
    write_portions,
)
from holdfast.worker.traces import trace_commits
from holdfast.worker.verdicts import is_refusal, judge, kind_of

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import AttemptSpan

log = structlog.get_logger(__name__)

# Seconds that a run's first entries rest.
BREATH = 0.002
# Seconds that the journal rests at most.
LONGEST_REST = 0.02
# Called after each commit with what became visible, and the queued runs that became ready.
Announce = Callable[[list[Flush], list[ReadyRun]], None]
Waiters = Sequence[asyncio.Future[None]]
# What was taken from a lane: what to write, who waits for it, and how many bytes it is.
Item = tuple[Portion, Waiters, int]
Group = dict["Lane", Item]


class Lane:
    """One run's way into the journal. All methods belong to the worker's event loop."""

    def __init__(self, journal: Journal, run_id: UUID, thread_id: UUID, fence: int, next_seq: int) -> None:
        self.run_id = run_id
        self.thread_id = thread_id
        self.fence = fence
        # The number of the next event that is not committed yet. Numbers are given at commit, so a refused batch
        # leaves no gap.
        self.next_seq = next_seq
        # Why nothing more can be written, once that is so.
        self.failure: RunSignal | None = None
        # The span that commits are told to; None: traces are off.
        self.trace: AttemptSpan | None = None
        self._journal = journal
        self._entries: list[Entry] = []
        self._outcome: Outcome | None = None
        self._ties = NO_TIES
        self._bytes = 0
        self._waiters: list[asyncio.Future[None]] = []
        # Seconds that the run has waited for the database, for its timeline.
        self._waited = 0.0
        # Whether the first entries have rested; None: there are none yet.
        self._rested: bool | None = None

    def event(self, kind: str, data: bytes, namespace: str = "") -> None:
        """Append an event to the thread's log. It gets its number, and becomes visible, when it is committed."""
        self._add(EventEntry(kind, namespace, data), len(data))

    def checkpoint(self, entry: CheckpointEntry) -> None:
        size = len(entry.row[4]) + len(entry.row[5]) + sum(len(blob[5] or b"") for blob in entry.blobs)
        self._add(entry, size)

    def writes(self, entry: WritesEntry) -> None:
        self._add(entry, sum(len(row[3]) for _, row in entry.rows))

    def usage(self, stored: str) -> None:
        """All that the run has used by now. It is durable before whatever is handed in after it."""
        self._add(UsageEntry(stored), len(stored))

    async def flush(self) -> None:
        """Wait until everything handed in so far is durable. Raises what made that impossible."""
        if self.failure is not None:
            raise self.failure
        if self._entries or self in self._journal.in_flight:
            await self._wait()

    @property
    def crowded(self) -> bool:
        """Whether too much of this run is still on its way to the database."""
        return self._bytes > self._journal.settings.journal_buffer_bytes

    async def room(self) -> None:
        """Wait while it is."""
        while self.crowded:
            await self.flush()

    async def finish(self, outcome: Outcome, *, graph_id: str | None = None, ties: Ties = NO_TIES) -> None:
        """Write the outcome after everything handed in before, with what its `ties` ask for, and wait until it is
        durable.

        Raises LeaseLost when the run is not held any more, and Cancelled("rollback") when somebody has asked for a
        rollback before this end was written: then nothing of the outcome has been written, and a RolledBack is due.
        """
        if self.failure is not None:
            raise self.failure
        match outcome:
            case Ended(status=status, error=error, resting=resting):
                paused = status == RunStatus.SUCCESS and resting == "interrupted"
                end = {"status": str(status), "error": error, "paused": paused, "graph_id": graph_id}
                self.event("end", orjson.dumps({**end, "waited": round(self._waited, 6)}))
            case RolledBack():
                self.event("end", orjson.dumps({"status": "rolled_back", "error": None, "graph_id": graph_id}))
            case Released() | Waiting():
                # Hidden from clients. The run's timeline reads when the attempt ended, and what it waited for.
                self.event("released", orjson.dumps({"waited": round(self._waited, 6)}))
        self._outcome = outcome
        self._ties = ties
        await self._wait()

    def discard(self) -> None:
        """Forget what has not been committed, after a failure that was this run's own, so that its end can be
        written."""
        self._entries = []
        self._outcome = None
        self._bytes = 0
        if not isinstance(self.failure, LeaseLost):
            self.failure = None

    def void(self) -> None:
        """The lease is lost: write nothing more, and tell everybody who waits."""
        self._fail(LeaseLost(f"run {self.run_id} is no longer held"))

    async def supersede(self) -> Lane:
        """A new lane for the same run; whoever still holds this one writes nothing more."""
        await self.flush()
        successor = self._journal.open_lane(self.run_id, self.thread_id, self.fence, self.next_seq)
        successor._waited = self._waited
        successor.trace = self.trace
        self.failure = LeaseLost(f"this attempt at run {self.run_id} was left behind")
        self._journal.close_lane(self)
        return successor

    def _add(self, entry: Entry, size: int) -> None:
        if self.failure is not None:
            raise self.failure
        if size > self._journal.settings.max_entry_bytes:
            raise JournalFailed(
                f"A value of {size} bytes was written, and MAX_ENTRY_BYTES is {self._journal.settings.max_entry_bytes}."
            )
        self._entries.append(entry)
        self._bytes += size
        if self._rested is None:
            self._rested = False
            asyncio.get_running_loop().call_later(BREATH, self._rest)
        self._journal.wake(self)

    @property
    def due(self) -> bool:
        """Whether what was handed in is to be written now."""
        return self._rested is True or self.awaited

    @property
    def awaited(self) -> bool:
        """Whether somebody waits until it is written."""
        return bool(self._waiters)

    def _rest(self) -> None:
        self._rested = True
        if self._entries:
            self._journal.wake(self)

    async def _wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self._journal.wake(self)
        began = time.monotonic()
        await future
        self._waited += time.monotonic() - began

    def _take(self) -> Item:
        portion = Portion(
            self.run_id,
            self.thread_id,
            self.fence,
            self.next_seq,
            self._entries,
            self._outcome,
            self._ties,
        )
        waiters, size = self._waiters, self._bytes
        self._entries, self._outcome, self._waiters = [], None, []
        return portion, waiters, size

    def _committed(self, portion: Portion, waiters: Waiters, size: int) -> None:
        self.next_seq = portion.last_seq + 1
        self._bytes -= size
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, failure: RunSignal, waiters: Waiters = ()) -> None:
        if self.failure is None:
            self.failure = failure
        self._entries = []
        self._outcome = None
        self._bytes = 0
        pending, self._waiters = [*waiters, *self._waiters], []
        self._reject(pending)
        self._journal.failed(self)

    def _reject(self, waiters: Waiters) -> None:
        assert self.failure is not None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(self.failure)
                # Whoever waited may have been cancelled meanwhile; an exception nobody fetches would be reported.
                waiter.exception()


class Journal:
    """Writes for all runs of one worker. `failed_callback` is told of a lane that can write no more."""

    def __init__(
        self,
        settings: Settings,
        announce: Announce,
        failed: Callable[[Lane], None],
        metrics: Metrics | None = None,
    ) -> None:
        self.settings = settings
        self.in_flight: set[Lane] = set()
        self.commits = 0
        self._metrics = metrics or Metrics(enabled=False)
        self._began = 0.0
        self._announce = announce
        self._on_failed = failed
        self._dirty: dict[Lane, None] = {}
        self._wake = asyncio.Event()
        # Of runs that may still write. Nobody closes that of an attempt that fell over.
        self._open: WeakSet[Lane] = WeakSet()
        # Whether all of them wait. Only asked while the journal rests.
        self._awaited = asyncio.Event()
        self._awaited.set()
        self._closing = False
        # Whether a line about each flush would be seen: nothing is counted for one that is not.
        self._tells = settings.log_level == "debug"
        self._connection: AsyncConnection[DictRow] | None = None
        self._plans = KeptPlans()
        self._backoff = Backoff("journal.outage", "journal.recovered")
        # When what is being written was taken up, for traces.
        self._taken_at = 0

    def open_lane(self, run_id: UUID, thread_id: UUID, fence: int, next_seq: int) -> Lane:
        lane = Lane(self, run_id, thread_id, fence, next_seq)
        self._open.add(lane)
        return lane

    def close_lane(self, lane: Lane) -> None:
        """Nobody has to wait for what the lane may bring."""
        self._open.discard(lane)
        self._look_who_waits()

    def wake(self, lane: Lane) -> None:
        self._dirty[lane] = None
        if lane.due:
            self._wake.set()
            self._look_who_waits()

    def failed(self, lane: Lane) -> None:
        self._dirty.pop(lane, None)
        self.close_lane(lane)
        self._on_failed(lane)

    def _look_who_waits(self) -> None:
        if not self._awaited.is_set() and sum(lane.awaited for lane in self._dirty) >= len(self._open):
            self._awaited.set()

    async def run(self) -> None:
        """Write until `close` is called and nothing waits any more."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while lanes := [lane for lane in self._dirty if lane.due or self._closing]:
                    for lane in lanes:
                        del self._dirty[lane]
                    await self._write([lane for lane in lanes if lane.failure is None])
                if self._closing:
                    return
        finally:
            await self._disconnect()

    def close(self) -> None:
        """Let `run` return once everything handed in is written."""
        self._closing = True
        self._wake.set()

    async def _write(self, lanes: list[Lane]) -> None:
        taken = {lane: lane._take() for lane in lanes}
        # A lane that only waits (its last entries are committed) has nothing to write.
        writing = {lane: item for lane, item in taken.items() if item[0].entries or item[0].outcome is not None}
        for lane, item in taken.items():
            if lane not in writing:
                lane._committed(*item)
        self.in_flight = set(writing)
        began = time.monotonic()
        self._taken_at = time.time_ns()
        await self._settle(writing, repeat=False)
        self.in_flight = set()
        took = time.monotonic() - began
        if self._tells and writing:
            entries = sum(len(item[0].entries) for item in writing.values())
            size = sum(item[2] for item in writing.values())
            log.debug("journal.flushed", runs=len(writing), entries=entries, bytes=size, seconds=round(took, 6))
        if len(writing) > 1 and not self._closing:
            await self._rest(min(LONGEST_REST, took))

    async def _rest(self, seconds: float) -> None:
        """Let more gather, for as long as there is somebody who does not wait already."""
        self._awaited.clear()
        self._look_who_waits()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._awaited.wait()
        self._awaited.set()

    async def _settle(self, group: Group, *, repeat: bool) -> None:
        """Bring a group to its end, whatever it takes: written, told that it is lost, or refused."""
        inspect = False
        while group:
            try:
                if inspect:
                    await self._commit_held(group, repeat=repeat)
                else:
                    self._done(group, *await self._commit([item[0] for item in group.values()], repeat=repeat))
                self._backoff.succeeded()
                return
            except psycopg.errors.DivisionByZero:
                await self._rollback()
                inspect = True
            except Exception as error:
                if is_refusal(error):
                    await self._rollback()
                    await self._isolate(group, error, repeat=repeat)
                    return
                # The commit may or may not have happened. The next try tells, whichever it was.
                await self._disconnect()
                repeat = True
                await self._backoff.failed(error)
            for lane in [lane for lane in group if lane.failure is not None]:
                lane._reject(group.pop(lane)[1])

    async def _isolate(self, group: Group, error: Exception, *, repeat: bool) -> None:
        """The database refused something: write run by run, and let the culprit fail alone."""
        if len(group) > 1:
            for lane, item in group.items():
                await self._settle({lane: item}, repeat=repeat)
            return
        for lane, (_, waiters, _) in group.items():
            ids = {"run_id": str(lane.run_id), "thread_id": str(lane.thread_id)}
            log.warning("journal.refused", **ids, error=kind_of(error))
            lane._fail(JournalFailed(f"The database refused what the run wrote: {error}"), waiters)

    def _done(self, group: Group, promoted: list[ReadyRun], stamp: datetime | None) -> None:
        self.commits += 1
        self._measure(group)
        if tracing.recorder is not None:
            trace_commits(group, self._taken_at)
        visible = []
        ready = list(promoted)
        for lane, (portion, waiters, size) in group.items():
            if portion.outcome is not None:
                self._open.discard(lane)
            if lane.failure is None:
                lane._committed(portion, waiters, size)
            else:
                lane._reject(waiters)
            if portion.last_seq >= portion.first_seq:
                visible.append(portion.flush(stamp))
            if isinstance(portion.outcome, Released):
                ready.append(ReadyRun(portion.run_id, after=portion.outcome.after or 0.0))
        if visible or ready:
            self._announce(visible, ready)

    async def _commit(self, portions: list[Portion], *, repeat: bool) -> tuple[list[ReadyRun], datetime | None]:
        """One pipelined transaction: one round trip. The queued runs that became ready, and the events' time."""
        connection = await self._connected()
        async with asyncio.timeout(self.settings.lease):
            async with gathered(connection):
                await self._begin(connection)
                written = await write_portions(connection, portions, verify=True, repeat=repeat)
                await connection.execute("COMMIT")
        return await written.ready(), await written.stamp()

    async def _commit_held(self, group: Group, *, repeat: bool) -> None:
        """Some run is not held: find out which, tell it, and write the others."""
        connection = await self._connected()
        threads = sorted({portion.thread_id for portion, _, _ in group.values() if portion.touches_thread})
        held: Group = {}
        settled: Group = {}
        refused: dict[Lane, RunSignal] = {}
        promoted: list[ReadyRun] = []
        async with asyncio.timeout(self.settings.lease):
            await self._begin(connection)
            if threads:
                await connection.execute(LOCK_THREADS, {"thread_ids": threads})
            parents = [item[0].parent_to_tell for item in group.values()]
            inspected = [lane.run_id for lane in group] + [parent for parent in parents if parent is not None]
            cursor = await connection.execute(INSPECT, {"run_ids": inspected})
            rows = {row["run_id"]: row for row in await cursor.fetchall()}
            for lane, item in group.items():
                verdict = judge(item[0], rows.get(lane.run_id), repeat=repeat)
                if verdict is None:
                    held[lane] = item
                elif isinstance(verdict, RunSignal):
                    refused[lane] = verdict
                else:
                    settled[lane] = item
            if held:
                portions = [item[0] for item in held.values()]
                promoted = await (await write_portions(connection, portions, verify=False, repeat=repeat)).ready()
            await connection.execute("COMMIT")
        for lane, verdict in refused.items():
            lane._fail(verdict, group[lane][1])
        self._done({**held, **settled}, promoted, None)

    def _measure(self, group: Group) -> None:
        """One commit, as the metrics have it."""
        portions = [item[0] for item in group.values()]
        self._metrics.journal_commit.observe(time.monotonic() - self._began)
        self._metrics.journal_batch.observe(sum(len(portion.entries) for portion in portions))
        self._metrics.events_written.add(sum(portion.last_seq - portion.first_seq + 1 for portion in portions))

    async def _begin(self, connection: AsyncConnection[DictRow]) -> None:
        self._began = time.monotonic()
        await connection.execute("BEGIN")
        await self._plans.use(connection)
        if self.settings.session_url is None:
            await connection.execute(f"SET LOCAL search_path TO {self.settings.db_schema}".encode())

    async def _rollback(self) -> None:
        if self._connection is not None:
            try:
                # Not a plain ROLLBACK: after a pipeline was cut short, psycopg believes in prepared statements that the
                # server has never seen. This forgets them, too.
                await self._connection.rollback()
            except (psycopg.Error, OSError):
                await self._disconnect()

    async def _connected(self) -> AsyncConnection[DictRow]:
        if self._connection is None or self._connection.closed:
            self._connection = await open_session(self.settings, "journal", planned_once=True)
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()
