"""Gives up the runs that a worker owns in the database but does not execute."""

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
from holdfast.engine.unexecuted import disown, find_unexecuted, return_unexecuted
from holdfast.signals import Signals
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

Change = Callable[[AsyncConnection[DictRow], UUID, Sequence[UUID]], Awaitable[list[UUID]]]


class UnexecutedRuns:
    """`executing`: the runs that the worker executes. `wake`: called when there are runs to claim, or to give up."""

    def __init__(
        self,
        database: Database,
        signals: Signals,
        executing: Callable[[], Collection[UUID]],
        wake: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._database = database
        self._signals = signals
        self._executing = executing
        self._wake = wake
        self._due = time.monotonic() + database.settings.lease
        # Runs that have been executed here and whose end the database refuses.
        self._unended: set[UUID] = set()
        self._aside = RowsSetAside("unexecuted_runs", "run_id", metrics)

    def is_due(self) -> bool:
        """Whether to look for such runs: once a lease, for runs left by a defect, and after a failure."""
        return time.monotonic() >= self._due

    def check_soon(self) -> None:
        """A claim has failed, and may have been committed all the same."""
        self._due = 0.0

    def disown_soon(self, run_id: UUID) -> None:
        """No outcome can be written for this run. Leave it to the reaper, which counts a crash."""
        self._unended.add(run_id)
        self._due = 0.0
        self._wake()

    def claimed(self, run_id: UUID) -> None:
        """The worker has claimed this run, which it may have given up before."""
        self._unended.discard(run_id)

    async def give_up(self, worker_id: UUID) -> bool:
        """Look once. False: it must be repeated. A run that cannot be changed is set aside and delays no other."""
        try:
            done = await self._give_up_found(worker_id)
        except (psycopg.Error, OSError):
            return False  # Still due. The claim that follows will back off, and log it.
        if done and self._unended.issubset(self._aside.ids()):
            self._due = time.monotonic() + self._database.settings.lease
        return done

    async def _give_up_found(self, worker_id: UUID) -> bool:
        async with self._database.connection() as connection:
            # Both at the same moment: a run counts as executing until it is known that it has no outcome.
            executing, unended = list(self._executing()), set(self._unended)
            found = await find_unexecuted(connection, worker_id, executing)
        # The others do not belong to this worker any more.
        self._unended -= unended.difference(row["run_id"] for row in found)
        skipped = self._aside.ids()
        runs = [row for row in found if row["run_id"] not in skipped]
        disowned = await self._change([row for row in runs if row["run_id"] in unended], worker_id, disown)
        self._unended.difference_update(disowned)
        if disowned:
            log.error("worker.runs_disowned", run_ids=[str(run_id) for run_id in disowned])
        never_begun = [row for row in runs if row["run_id"] not in unended]
        returned = await self._change(never_begun, worker_id, return_unexecuted)
        if returned:
            log.warning("worker.unexecuted_runs_returned", run_ids=[str(run_id) for run_id in returned])
            announce_ready(self._signals, [ReadyRun(run_id) for run_id in returned])
            self._wake()
        return {row["run_id"] for row in runs} <= {*disowned, *returned, *self._aside.ids()}

    async def _change(self, runs: list[DictRow], worker_id: UUID, change: Change) -> list[UUID]:
        async def together(rows: Sequence[DictRow]) -> list[UUID]:
            async with self._database.transaction() as connection:
                return await change(connection, worker_id, [row["run_id"] for row in rows])

        return await process_rows(self._database, runs, together, self._aside) if runs else []
