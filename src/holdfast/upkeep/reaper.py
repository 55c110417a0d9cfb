"""The duty that finds lost workers and returns their runs to the queue."""

from __future__ import annotations

import structlog

from holdfast.db.connect import Database
from holdfast.engine.reap import mark_lost, release_orphans, watch_workers
from holdfast.signals import Signals

log = structlog.get_logger(__name__)


class Reaper:
    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals
        self._settings = database.settings
        self._first = True

    async def run(self) -> float | None:
        """One look. Returns when to look again, if a worker is missing and its grace is running."""
        settings = self._settings
        async with self._database.connection() as connection:
            missing, lost = await watch_workers(connection, grace=settings.session_grace, young=settings.lease)
            gone = [row for row in lost if await mark_lost(connection, row["worker_id"], grace=settings.session_grace)]
        for worker in gone:
            log.warning(
                "worker.declared_lost",
                worker_id=str(worker["worker_id"]),
                host=worker["host"],
                pid=worker["pid"],
                reason="its lease expired" if worker["lease_expired"] else "its session is gone",
            )
        if gone or self._first:
            # A leader before us may have died between declaring a worker lost and releasing its runs.
            self._first = False
            await self._release()
        return settings.session_grace + 0.01 if missing else None

    async def _release(self) -> None:
        while released := await release_orphans(self._database, max_crashes=self._settings.max_crashes):
            for run in released:
                log.warning(
                    "run.released",
                    run_id=str(run["run_id"]),
                    status=run["status"],
                    attempt=run["attempt"],
                    crashes=run["crashes"],
                )
            self._signals.publish("work", "")
