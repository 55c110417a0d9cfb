"""Gives away the runs that a worker owns although it does not execute them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from uuid import UUID

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.row_by_row import RowsSetAside, process_rows
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.engine.unexecuted import disown, find_strays, return_strays
from holdfast.signals import Signals

log = structlog.get_logger(__name__)

Give = Callable[[AsyncConnection[DictRow], UUID, Sequence[UUID]], Awaitable[list[UUID]]]


class Strays:
    """`held`: the runs that the worker executes. `wake`: called when there are runs to claim, or to give away."""

    def __init__(
        self, database: Database, signals: Signals, held: Callable[[], Collection[UUID]], wake: Callable[[], None]
    ) -> None:
        self._database = database
        self._signals = signals
        self._held = held
        self._wake = wake
        self._due = time.monotonic() + database.settings.lease
        # Runs that have been executed here, and whose end the database refuses.
        self._unended: set[UUID] = set()
        self._aside = RowsSetAside("strays", "run_id", database.metrics)

    def is_due(self) -> bool:
        """Whether to look for strays: now and then, for runs left by a defect."""
        return time.monotonic() >= self._due

    def look_soon(self) -> None:
        """A claim has failed, and may have been made all the same."""
        self._due = 0.0

    def unended(self, run_id: UUID) -> None:
        """No outcome can be written for this run. It is given to the reaper, which counts a crash."""
        self._unended.add(run_id)
        self._due = 0.0
        self._wake()

    def claimed(self, run_id: UUID) -> None:
        """The worker has claimed this run, which it may have given away before."""
        self._unended.discard(run_id)

    async def give_away(self, worker_id: UUID) -> bool:
        """One look. False if it has to be repeated. A run that cannot be changed is set aside, and keeps no other."""
        try:
            done = await self._look(worker_id)
        except (psycopg.Error, OSError):
            return False  # Still due. The claim that follows will wait and say so.
        if done and self._unended.issubset(self._aside.ids()):
            self._due = time.monotonic() + self._database.settings.lease
        return done

    async def _look(self, worker_id: UUID) -> bool:
        async with self._database.connection() as connection:
            # At the same moment: a run is held until it is known that it has no outcome.
            held, unended = list(self._held()), set(self._unended)
            found = await find_strays(connection, worker_id, held)
        # The others are not this worker's any more.
        self._unended -= unended.difference(row["run_id"] for row in found)
        passed = self._aside.ids()
        runs = [row for row in found if row["run_id"] not in passed]
        disowned = await self._give([row for row in runs if row["run_id"] in unended], worker_id, disown)
        self._unended.difference_update(disowned)
        if disowned:
            log.error("worker.runs_disowned", run_ids=[str(run_id) for run_id in disowned])
        returned = await self._give([row for row in runs if row["run_id"] not in unended], worker_id, return_strays)
        if returned:
            log.warning("worker.strays_returned", run_ids=[str(run_id) for run_id in returned])
            announce_ready(self._signals, [ReadyRun(run_id) for run_id in returned])
            self._wake()
        return {row["run_id"] for row in runs} <= {*disowned, *returned, *self._aside.ids()}

    async def _give(self, runs: list[DictRow], worker_id: UUID, give: Give) -> list[UUID]:
        async def together(rows: Sequence[DictRow]) -> list[UUID]:
            async with self._database.transaction() as connection:
                return await give(connection, worker_id, [row["run_id"] for row in rows])

        return await process_rows(self._database, runs, together, self._aside) if runs else []
