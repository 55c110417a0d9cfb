"""A worker taken apart: an identity, a journal and an executor, with the claims made by hand.

Nothing happens in it that the test did not ask for, so a test can put a crash at an exact place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

from holdfast.db.connect import Database
from holdfast.engine.claim import claim
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.outcome import Outcome
from holdfast.engine.ready import ReadyRun
from holdfast.engine.reap import release_orphans
from holdfast.errors import LeaseLost
from holdfast.execution.attempt import Attempt
from holdfast.execution.executor import Executor
from holdfast.graphs.catalog import GraphCatalog
from holdfast.journal.entries import Entry
from holdfast.journal.journal import Journal
from holdfast.journal.run_writer import Group, RunWriter
from holdfast.settings import Settings
from holdfast.streams.hints import Flush
from holdfast.telemetry.metrics import Metrics
from tests.support.records import query

REGISTER = """
INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until)
VALUES (%s, 'online', 'test', 0, 'test', 1, '{}', now() + interval '1 hour') RETURNING worker_id
"""
DECLARE_LOST = "UPDATE worker SET status = 'lost', stopped_at = now() WHERE worker_id = %s RETURNING worker_id"


class MortalJournal(Journal):
    """A journal whose process dies once `lifetime` entries are durable; an outcome counts as one entry.

    A batch may be cut anywhere, because in real life it may have ended anywhere. Unless `whole`: then what was handed
    in without a pause becomes durable together, as the journal promises, even past the lifetime.
    """

    def __init__(self, *arguments: Any, lifetime: int | None = None, whole: bool = False) -> None:
        super().__init__(*arguments)
        self.lifetime = lifetime
        self.whole = whole
        self.durable: list[Entry | Outcome] = []

    @property
    def dead(self) -> bool:
        return self.lifetime is not None and len(self.durable) >= self.lifetime

    async def _write_together(self, group: Group) -> None:
        cut: Group = {}
        for writer, item in group.items():
            portion = item.portion
            left = None if self.lifetime is None else self.lifetime - len(self.durable)
            if self.whole and left is not None and left > 0:
                left = None
            if left is not None and left <= len(portion.entries):
                portion = replace(portion, entries=portion.entries[: max(0, left)], outcome=None)
                # Whoever waits never hears of it: the process is gone by then.
                cut[writer] = item._replace(portion=portion, waiters=())
            else:
                cut[writer] = item
            self.durable += portion.entries
            if portion.outcome is not None:
                self.durable.append(portion.outcome)
        writing = {writer: item for writer, item in cut.items() if item.portion.entries or item.portion.outcome}
        await super()._write_together(writing)
        if self.dead:
            for writer, item in group.items():
                writer.fail(LeaseLost("the process died"), item.waiters)


class Station:
    """See the module's description. `open_station` makes one."""

    def __init__(self, settings: Settings, database: Database, catalog: GraphCatalog, **mortality: Any) -> None:
        self.database = database
        self.catalog = catalog
        self.worker_id = uuid4()
        self.journal = MortalJournal(settings, self._announce, self._writer_failed, **mortality)
        self.metrics = Metrics()
        self.executor = Executor(settings, database, catalog, self.metrics)
        self.announced: list[tuple[UUID, int]] = []
        self.flushes: list[Flush] = []
        self._attempts: dict[UUID, Attempt] = {}

    async def claim(self, slots: int = 1) -> list[Attempt]:
        """Claim what is due and open its writers."""
        async with self.database.connection() as connection:
            rows = await claim(connection, self.worker_id, slots, self.catalog.graph_ids)
        return [self.attempt(run) for run in rows]

    def attempt(self, run: ClaimedRun) -> Attempt:
        writer = self.journal.open_writer(run.run_id, run.thread_id, run.fence, run.next_seq)
        attempt = self._attempts[run.run_id] = Attempt(run, writer)
        return attempt

    async def execute_next(self) -> tuple[Attempt, Outcome | None]:
        """Claim the one run that is due and execute it to the end of the attempt."""
        [attempt] = await self.claim()
        return attempt, await self.executor.execute(attempt)

    async def die(self) -> None:
        """Be declared lost, and have the runs taken over, as the reaper does it."""
        await query(self.database, DECLARE_LOST, self.worker_id)
        await release_orphans(self.database, max_crashes=1000)

    def _announce(self, visible: Iterable[Flush], ready: list[ReadyRun]) -> None:
        self.flushes += visible
        self.announced += [(flush.thread_id, flush.last_seq) for flush in visible]

    def _writer_failed(self, writer: RunWriter) -> None:
        attempt = self._attempts.get(writer.run_id)
        if attempt is not None and attempt.writer is writer and writer.failure is not None:
            attempt.stop(writer.failure)


@asynccontextmanager
async def open_station(
    settings: Settings,
    database: Database,
    catalog: GraphCatalog,
    *,
    lifetime: int | None = None,
    whole: bool = False,
) -> AsyncIterator[Station]:
    """A registered station whose journal runs for the length of the block."""
    station = Station(settings, database, catalog, lifetime=lifetime, whole=whole)
    await query(database, REGISTER, station.worker_id)
    await station.journal.start()
    try:
        yield station
    finally:
        await station.journal.stop()
