"""The duty that finds lost workers and returns their runs to the queue."""

from __future__ import annotations

import time

import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.outbox import announce_webhooks
from holdfast.engine.ready import ReadyRun, announce_perhaps_ready, announce_ready
from holdfast.engine.reap import mark_lost, release_orphans, watch_workers
from holdfast.signals import Signals
from holdfast.streams.hints import tell_ended, tell_to_look
from holdfast.upkeep.traces import trace_lost

# Seconds between two looks for runs that nobody holds.
RELEASE_INTERVAL = 10.0

log = structlog.get_logger(__name__)


class Reaper:
    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals
        self._settings = database.settings
        self._release_due = 0.0

    async def run(self, connection: AsyncConnection[DictRow]) -> float | None:
        """One look. Returns when to look again, if a worker is missing and its grace is running."""
        settings = self._settings
        found = await watch_workers(connection, grace=settings.session_grace)
        gone = [
            worker
            for worker in found
            if worker["lost"] and await mark_lost(connection, worker["worker_id"], grace=settings.session_grace)
        ]
        for worker in gone:
            log.warning(
                "worker.lost",
                worker_id=str(worker["worker_id"]),
                host=worker["host"],
                worker_pid=worker["pid"],
                reason="its lease expired" if worker["expired"] else "its session is gone",
            )
        if gone:
            self._database.metrics.workers_lost.add(len(gone))
            self._release_due = 0.0
        if time.monotonic() >= self._release_due:
            await self._release()
            # Now and then without a reason, too: a worker may have claimed in the moment it was declared lost.
            self._release_due = time.monotonic() + (settings.reaper_interval if gone else RELEASE_INTERVAL)
        return min((worker["grace_left"] for worker in found if not worker["lost"]), default=None)

    async def _release(self) -> None:
        while released := await release_orphans(self._database, max_crashes=self._settings.max_crashes):
            trace_lost(released)
            for run in released:
                about = {"run_id": str(run["run_id"]), "thread_id": str(run["thread_id"]), "graph_id": run["graph_id"]}
                if run["status"] == "error":
                    log.warning("run.dead_letter", reason="poison", attempt=run["attempt"], **about)
                else:
                    log.warning("run.released", attempt=run["attempt"], crashes=run["crashes"], **about)
            ready = [ReadyRun(run["run_id"], run["graph_id"]) for run in released if run["status"] == "pending"]
            self._database.metrics.takeovers.add(len(ready))
            announce_ready(self._signals, ready)
            if poisoned := [run for run in released if run["status"] == "error"]:
                self._database.metrics.dead_letters.add(len(poisoned), "poison")
                for hint in tell_ended([run["run_id"] for run in poisoned]):
                    self._signals.publish("events", hint)
                for run in poisoned:
                    self._signals.publish("events", tell_to_look(run["thread_id"]), thread_id=run["thread_id"])
                announce_webhooks(self._signals)
                # The next runs of their threads.
                announce_perhaps_ready(self._signals)
