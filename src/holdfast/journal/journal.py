"""The journal: everything a worker's runs make durable goes through here, and is fenced here.

One connection, one loop: take everything that waits, write it in one transaction, resolve the waiters, repeat. A batch
grows for as long as the previous commit takes, and if that was one of several runs, for as long again, unless all runs
there are wait for it: slow commits on a busy machine are followed by large ones, not by many. A run's first entries,
which come right after its claim, rest for about as long as a commit takes, unless somebody waits for them: a run that
is over by then is written in one.

Guarantees:

- What a run hands in is written in that order, whole or not at all with its neighbours in a batch.
- Nothing is written for a run that is not held under its fence. Such a run is told LeaseLost.
- A run whose data the database refuses fails alone, and so does one whose data it cannot write in time, or not at all,
  although it writes what others hand in. A run that waits for a lock is written apart from the others.
- A run fails so only when it is certain that the data is not stored, and will not be.
- While the database is away nothing is dropped; runs wait, and their buffers are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from uuid import UUID
from weakref import WeakSet

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.buffered_pipeline import buffered_pipeline
from holdfast.db.generic_plans import PlanRefresh
from holdfast.db.session_options import BEGIN, transaction_options
from holdfast.engine.outcome import Released
from holdfast.engine.queue import LOCK_THREADS
from holdfast.engine.ready import ReadyRun
from holdfast.errors import JournalFailed, RunSignal
from holdfast.journal.batch import INSPECT, LAST_EVENT, Portion, write_portions
from holdfast.journal.run_writer import Group, Item, RunWriter
from holdfast.journal.session import COMMIT_TIMEOUT_LEASE_SHARE, JournalSession
from holdfast.journal.traces import trace_commits
from holdfast.journal.write_errors import (
    is_locked,
    is_refusal,
    is_too_slow,
    judge,
    kind_of,
    largest_part,
    waits_for_others,
)
from holdfast.lifecycle.backoff import Backoff
from holdfast.settings import Settings
from holdfast.streams.hints import Flush
from holdfast.telemetry import tracing
from holdfast.telemetry.metrics import Metrics

__all__ = ["Group", "Journal", "RunWriter"]

log = structlog.get_logger(__name__)

# Seconds that the journal rests at most.
MAX_GROUP_DELAY_SECONDS = 0.02
# How long the commit of an isolated writer may wait for a lock: the other runs wait for that long, too.
LIMIT_LOCKS = "SET LOCAL lock_timeout = '100ms'"
# After this many failures of a group, while the server answers, its runs are written one by one.
FAILURES_TOGETHER = 2
# After this many runs in a row that could not be written, the others are not tried.
FAILED_RUNS = 2
# So often the write of one run alone may lose its connection, or find the server short of memory, while others are
# written. Then the run fails.
MAX_FAILED_TRIES = 3
# What is larger may be too much for a server that is well otherwise.
LARGE_WRITE_BYTES = 4 * 1024 * 1024
# Called after each commit with what became visible, and the queued runs that became ready.
Announce = Callable[[list[Flush], list[ReadyRun]], None]


class Journal:
    """Writes for all runs of one worker. `failed_callback` is told of a writer that can write no more."""

    def __init__(
        self,
        settings: Settings,
        announce: Announce,
        failed: Callable[[RunWriter], None],
        metrics: Metrics | None = None,
    ) -> None:
        self.settings = settings
        self.in_flight: set[RunWriter] = set()
        self.commits = 0
        self._metrics = metrics or Metrics(enabled=False)
        self._began = 0.0
        self._announce = announce
        self._on_failed = failed
        self._dirty: dict[RunWriter, None] = {}
        self._wake = asyncio.Event()
        # Of runs that may still write. Nobody closes that of an attempt that fell over.
        self._open: WeakSet[RunWriter] = WeakSet()
        # Whether all of them wait. Only asked while the journal rests.
        self._awaited = asyncio.Event()
        self._awaited.set()
        self.closing = False
        """Whether `close` was called: from then on the end of `run` is expected."""
        # Whether a line about each flush would be seen: nothing is counted for one that is not.
        self._tells = settings.log_level == "debug"
        self.session = JournalSession(settings)
        self._plans = PlanRefresh()
        self.backoff = Backoff("journal.outage", "journal.recovered")
        # When what is being written was taken up, for traces.
        self._taken_at = 0

    def open_writer(self, run_id: UUID, thread_id: UUID, fence: int, next_seq: int) -> RunWriter:
        writer = RunWriter(self, run_id, thread_id, fence, next_seq)
        self._open.add(writer)
        return writer

    def close_writer(self, writer: RunWriter) -> None:
        """Nobody has to wait for what the writer may bring."""
        self._open.discard(writer)
        self._look_who_waits()

    def wake(self, writer: RunWriter) -> None:
        self._dirty[writer] = None
        if writer.due:
            self._wake.set()
            self._look_who_waits()

    def failed(self, writer: RunWriter) -> None:
        self._dirty.pop(writer, None)
        self.close_writer(writer)
        self._on_failed(writer)

    def _look_who_waits(self) -> None:
        if not self._awaited.is_set() and sum(writer.awaited for writer in self._dirty) >= len(self._open):
            self._awaited.set()

    async def run(self, connected: Callable[[], None] = lambda: None) -> None:
        """Connect, then write until `close` is called and nothing waits any more. `connected` is called when there is
        a session again after there was none."""
        self.session.on_found = connected
        try:
            while True:
                await self._connect()
                await self._wake.wait()
                self._wake.clear()
                while writers := [writer for writer in self._dirty if writer.due or self.closing]:
                    for writer in writers:
                        del self._dirty[writer]
                    writers = [writer for writer in writers if writer.failure is None]
                    await self._write([writer for writer in writers if not writer.isolated])
                    if isolated := [writer for writer in writers if writer.isolated and writer.failure is None]:
                        await self._write(isolated, apart=True)
                if self.closing:
                    return
        finally:
            await self.session.close()

    async def _connect(self) -> None:
        """Open a session if there has been none yet, or if none could be opened when there was something to write:
        until then the worker claims nothing. Ends when there is something to write, which opens one as well."""
        while self.session.missing and not self._wake.is_set():
            try:
                await self.session.connection()
                self.backoff.succeeded()
            except (psycopg.Error, OSError) as error:
                await self.session.close()
                await self.backoff.failed(error)

    def close(self) -> None:
        """Let `run` return once everything handed in is written."""
        self.closing = True
        self._wake.set()

    async def _write(self, writers: list[RunWriter], *, apart: bool = False) -> None:
        taken = {writer: writer._take() for writer in writers}
        # A writer that only waits (its last entries are committed) has nothing to write.
        writing = {writer: item for writer, item in taken.items() if item[0].entries or item[0].outcome is not None}
        for writer, item in taken.items():
            if writer not in writing:
                writer._committed(*item)
        self.in_flight = set(writing)
        began = time.monotonic()
        self._taken_at = time.time_ns()
        if apart:
            await self._write_apart(writing)
        else:
            await self._settle(writing, repeat=False)
        self.in_flight = set()
        took = time.monotonic() - began
        if self._tells and writing:
            entries = sum(len(item[0].entries) for item in writing.values())
            size = sum(item[2] for item in writing.values())
            log.debug("journal.flushed", runs=len(writing), entries=entries, bytes=size, seconds=round(took, 6))
        if len(writing) > 1 and not self.closing:
            await self._rest(min(MAX_GROUP_DELAY_SECONDS, took))

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
        failures = 0
        while group:
            try:
                if inspect:
                    await self._commit_held(group, repeat=repeat)
                else:
                    self._done(group, *await self._commit([item[0] for item in group.values()], repeat=repeat))
                self.backoff.succeeded()
                return
            except psycopg.errors.DivisionByZero:
                await self.session.rollback()
                inspect = True
            except Exception as error:
                if is_refusal(error):
                    await self.session.rollback()
                    await self._isolate(group, error, repeat=repeat)
                    return
                if is_locked(error):
                    await self.session.rollback()
                    await self._write_apart(group)
                    return
                # The commit may or may not have happened. The next try tells, whichever it was.
                await self.session.close()
                repeat = True
                failures += 1
                if failures >= FAILURES_TOGETHER and not waits_for_others(error) and await self.session.answers():
                    await self._write_apart(group)
                    return
                await self.backoff.failed(error)
            for writer in [writer for writer in group if writer.failure is not None]:
                writer._reject(group.pop(writer)[1])

    async def _isolate(self, group: Group, error: Exception, *, repeat: bool) -> None:
        """The database refused something: write run by run, and let the culprit fail alone."""
        if len(group) > 1:
            for writer, item in group.items():
                await self._settle({writer: item}, repeat=repeat)
            return
        for writer, item in group.items():
            self._refuse(writer, item, error, f"The database refused what the run wrote: {error}")

    async def _write_apart(self, group: Group) -> None:
        """The server answers, but what a group wrote does not get through. Write run by run, each once: those first
        that have been tried least often, of these the smallest. What cannot be written now is tried again later, apart
        from the others."""
        commits = self.commits
        failed = 0
        error: Exception | None = None
        for writer, item in sorted(group.items(), key=lambda one: (one[0].tries, one[1][2])):
            if writer.failure is not None:
                writer._reject(item[1])
            elif failed >= FAILED_RUNS:
                # It is not these runs: the server is short of something, or somebody has locked a table.
                writer._put_back(*item[:2])
            elif (kept := await self._write_alone(writer, item, commits)) is None:
                failed = 0
                self.backoff.succeeded()
            else:
                failed += 1
                error = kept
        # One run that waits for a lock is no outage. The others do not wait for the pause: the writers do.
        if error is not None and self.commits == commits and (failed > 1 or not is_locked(error)):
            self.backoff.note(error)

    async def _write_alone(self, writer: RunWriter, item: Item, commits: int) -> Exception | None:
        """Write what one run wrote, and decide about it. Returns what kept it from being written or refused. `commits`:
        how many there were when the first of several runs was tried.

        The server may be short of memory, or slow, for a moment, and so for every run. The run is to blame only if
        others were written meanwhile, or if it has written much.
        """
        if writer.commits_at_failure is not None:
            commits = writer.commits_at_failure
        writer.tries += 1
        try:
            try:
                self._done({writer: item}, *await self._commit([item[0]], repeat=True, lock_limit=True))
            except psycopg.errors.DivisionByZero:
                await self.session.rollback()
                await self._commit_held({writer: item}, repeat=True, lock_limit=True)
            return None
        except Exception as error:
            if is_refusal(error):
                await self.session.rollback()
                self._refuse(writer, item, error, f"The database refused what the run wrote: {error}")
                return None
            writer.commits_at_failure = self.commits
            if is_locked(error):
                await self.session.rollback()
            else:
                await self.session.close()
                to_blame = self.commits > commits or item[2] > LARGE_WRITE_BYTES
                if to_blame and not waits_for_others(error) and await self.session.answers():
                    writer.failed_tries += 1
                    if is_too_slow(error) or writer.failed_tries >= MAX_FAILED_TRIES:
                        return await self._give_up(writer, item, error)
            self._try_later(writer, item)
            return error

    def _try_later(self, writer: RunWriter, item: Item) -> None:
        if writer.failure is None:
            writer._put_back(*item[:2])
        else:
            # Its lease was lost meanwhile: nobody takes it up again.
            writer._reject(item[1])

    async def _give_up(self, writer: RunWriter, item: Item, error: Exception) -> Exception | None:
        """Let a run fail whose write was not answered, unless it was stored all the same."""
        try:
            verdict = await self._look_up(item[0])
        except (psycopg.Error, OSError, TimeoutError) as failure:
            await self.session.close()
            self._try_later(writer, item)
            return failure
        if isinstance(verdict, RunSignal):
            writer._fail(verdict, item[1])
        elif verdict:
            self._done({writer: item}, [], None, {})
        else:
            seconds = COMMIT_TIMEOUT_LEASE_SHARE * self.settings.lease
            what = f"did not store it within {seconds:g} seconds" if is_too_slow(error) else "could not store it"
            self._refuse(writer, item, error, f"The database {what}: of what the run wrote, {largest_part(item[0])}")
        return None

    async def _look_up(self, portion: Portion) -> RunSignal | bool:
        """Whether a commit that was not answered has happened, or the signal to give to its run. If it has not, it
        never will: the session that was to do it has been ended (`journal_session.py`), unless it has the run's row
        locked."""
        connection = await self.session.connection()
        async with asyncio.timeout(self.settings.lease):
            await self._begin(connection, lock_limit=True)
            run = await (await connection.execute(INSPECT, {"run_ids": [portion.run_id]})).fetchone()
            # A statement of its own: it sees what was committed while the one before waited.
            last = await (await connection.execute(LAST_EVENT, {"thread_id": portion.thread_id})).fetchone()
            await connection.execute("COMMIT")
        verdict = judge(portion, run, repeat=True)
        if verdict is None:
            return last is not None and portion.first_seq <= portion.last_seq <= last["seq"]
        return verdict

    def _refuse(self, writer: RunWriter, item: Item, error: Exception, about: str) -> None:
        ids = {"run_id": str(writer.run_id), "thread_id": str(writer.thread_id)}
        log.warning("journal.refused", **ids, error=kind_of(error))
        writer._fail(JournalFailed(about), item[1])

    def _done(
        self, group: Group, promoted: list[ReadyRun], stamp: datetime | None, shared: Mapping[UUID, list[DictRow]]
    ) -> None:
        self.commits += 1
        self._measure(group)
        if tracing.recorder is not None:
            trace_commits(group, self._taken_at)
        visible = []
        ready = list(promoted)
        for writer, (portion, waiters, size) in group.items():
            if portion.outcome is not None:
                self._open.discard(writer)
            if writer.failure is None:
                writer._committed(portion, waiters, size)
            else:
                writer._reject(waiters)
            if portion.outcome is None and writer.run_id in shared:
                writer._share(shared[writer.run_id])
            if portion.last_seq >= portion.first_seq:
                visible.append(portion.flush(stamp))
            if isinstance(portion.outcome, Released) and all(run.run_id != portion.run_id for run in promoted):
                ready.append(ReadyRun(portion.run_id, after=portion.outcome.after or 0.0))
        if visible or ready:
            self._announce(visible, ready)

    async def _commit(
        self, portions: list[Portion], *, repeat: bool, lock_limit: bool = False
    ) -> tuple[list[ReadyRun], datetime | None, Mapping[UUID, list[DictRow]]]:
        """One pipelined transaction: one round trip. The queued runs that became ready, the events' time, and what
        others have used of shared budgets."""
        connection = await self.session.connection()
        async with asyncio.timeout(self.settings.lease):
            async with buffered_pipeline(connection):
                await self._begin(connection, lock_limit=lock_limit)
                written = await write_portions(connection, portions, verify=True, repeat=repeat)
                await connection.execute("COMMIT")
        return await written.ready(), await written.stamp(), await written.shared()

    async def _commit_held(self, group: Group, *, repeat: bool, lock_limit: bool = False) -> None:
        """Some run is not held: find out which, tell it, and write the others."""
        connection = await self.session.connection()
        threads = sorted({portion.thread_id for portion, _, _ in group.values() if portion.touches_thread})
        held: Group = {}
        settled: Group = {}
        refused: dict[RunWriter, RunSignal] = {}
        promoted: list[ReadyRun] = []
        shared: Mapping[UUID, list[DictRow]] = {}
        async with asyncio.timeout(self.settings.lease):
            await self._begin(connection, lock_limit=lock_limit)
            if threads:
                await connection.execute(LOCK_THREADS, {"thread_ids": threads})
            parents = [item[0].parent_to_wake for item in group.values()]
            inspected = [writer.run_id for writer in group] + [parent for parent in parents if parent is not None]
            cursor = await connection.execute(INSPECT, {"run_ids": inspected})
            rows = {row["run_id"]: row for row in await cursor.fetchall()}
            for writer, item in group.items():
                verdict = judge(item[0], rows.get(writer.run_id), repeat=repeat)
                if verdict is None:
                    held[writer] = item
                elif isinstance(verdict, RunSignal):
                    refused[writer] = verdict
                else:
                    settled[writer] = item
            if held:
                portions = [item[0] for item in held.values()]
                written = await write_portions(connection, portions, verify=False, repeat=repeat)
                promoted, shared = await written.ready(), await written.shared()
            await connection.execute("COMMIT")
        for writer, verdict in refused.items():
            writer._fail(verdict, group[writer][1])
        self._done({**held, **settled}, promoted, None, shared)

    def _measure(self, group: Group) -> None:
        """One commit, as the metrics have it."""
        portions = [item[0] for item in group.values()]
        self._metrics.journal_commit.observe(time.monotonic() - self._began)
        self._metrics.journal_batch.observe(sum(len(portion.entries) for portion in portions))
        self._metrics.events_written.add(sum(portion.last_seq - portion.first_seq + 1 for portion in portions))

    async def _begin(self, connection: AsyncConnection[DictRow], *, lock_limit: bool) -> None:
        self._began = time.monotonic()
        bouncer = self.settings.session_url is None
        await connection.execute(BEGIN if bouncer else "BEGIN")
        await self._plans.use(connection)
        if bouncer:
            await connection.execute(transaction_options(self.settings))
        if lock_limit:
            await connection.execute(LIMIT_LOCKS)


async def outlive(journal: asyncio.Task[None]) -> None:
    """A worker without its journal can finish nothing. Raise what ended the journal, so that the worker ends too and
    its runs go on elsewhere."""
    await asyncio.wait({journal})
    if not journal.cancelled() and (error := journal.exception()) is not None:
        raise error
    await asyncio.Event().wait()  # Closed in good order: the worker is leaving, and ends when it has left.
