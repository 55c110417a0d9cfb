"""The duty that finds lost workers and returns their runs to the queue."""

from __future__ import annotations

import time
from uuid import UUID

import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside
from holdfast.engine.outbox import announce_webhooks
from holdfast.engine.ready import ReadyRun, announce_perhaps_ready, announce_ready
from holdfast.engine.reap import Watched, mark_lost, release_orphans, watch_workers
from holdfast.signals import Signals
from holdfast.streams.hints import check_log_hint, ended_runs_hints
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.traces import trace_lost

# Seconds between two checks for runs whose worker is gone.
RELEASE_INTERVAL_SECONDS = 10.0

# While runs are executing, the workers are checked after this fraction of REAPER_INTERVAL_SECONDS: every 0.1 seconds by
# default, so that a dead worker's runs wait half of that on average. When nothing is executing, nothing can be taken
# over, and frequent checks would be waste.
BUSY_SHARE = 0.1

# A fraction of LEASE_DURATION_SECONDS. If the server's clock gains more than this on ours between two checks, or a
# check takes longer, expired leases are ignored for a while. With less, a healthy worker still has time to renew.
UNDISTURBED_SHARE = 1 / 3

log = structlog.get_logger(__name__)


class Reaper:
    """Declares workers lost whose session or lease has ended, and releases their runs."""

    def __init__(self, database: Database, signals: Signals, metrics: Metrics) -> None:
        self._database = database
        self._signals = signals
        self._metrics = metrics
        self._settings = database.settings
        self._release_due = 0.0
        self._aside = RowsSetAside("takeover", "run_id", metrics)
        # Runs to release that shared their worker with others, as `release_orphans` needs them.
        self._accompanied: set[UUID] = set()
        # Whether all leases may have expired although the workers are well.
        self._disturbed = False
        # Until then, on the monotonic clock, an expired lease alone does not make a worker lost.
        self._leases_distrusted_until = 0.0
        # The server's clock and our monotonic clock at the last check.
        self._clocks: tuple[float, float] | None = None

    def distrust_leases(self) -> None:
        """All leases may have expired although the workers are well. After the next check that succeeds, each worker
        gets time to reconnect and renew before an expired lease counts."""
        self._disturbed = True

    async def run(self, database: Database) -> float | None:
        """One look. Returns when to look again, if that is sooner than usual: a worker is missing and its grace is
        running, or runs are being executed that may have to be taken over. `database`: the leader's session, or the
        pool behind PgBouncer."""
        settings = self._settings
        began = time.monotonic()
        watched: Watched | None = None
        try:
            async with database.connection() as connection:
                watched = await self._watch(connection, began)
                gone, failure = await self._mark_lost(connection, watched.missing)
        finally:
            if watched is None:
                # The database may be away for the workers too, so that none of them can renew.
                self.distrust_leases()
        for worker in gone:
            log.warning(
                "worker.lost",
                worker_id=str(worker["worker_id"]),
                host=worker["host"],
                worker_pid=worker["pid"],
                reason=_reason(worker),
            )
        if gone:
            self._metrics.workers_lost.add(len(gone))
            self._release_due = 0.0
        if time.monotonic() >= self._release_due:
            passed_over = self._aside.ids()
            await self._release(database)
            # Release runs regularly even if no worker is lost: one may have claimed just when it was declared lost.
            # Release again soon if a run was set aside, because the time may not have sufficed for the others.
            soon = gone or self._aside.ids() != passed_over
            self._release_due = time.monotonic() + (settings.reaper_interval if soon else RELEASE_INTERVAL_SECONDS)
        if failure is not None:
            raise failure
        pauses = [worker["grace_left"] for worker in watched.missing if not worker["lost"]]
        # Behind PgBouncer there are no sessions: only leases decide, and every process checks.
        if watched.busy and settings.session_url is not None:
            pauses.append(settings.reaper_interval * BUSY_SHARE)
        return min(pauses, default=None)

    async def _watch(self, connection: AsyncConnection[DictRow], began: float) -> Watched:
        """Look for lost workers. After an outage all leases have expired at once, and the workers do not know yet that
        it is over. After a laptop or a virtual machine was asleep, or the server's clock was set, their heartbeats
        do not know it yet. `began`: when the look did, which had to wait for a connection."""
        grace, heartbeat = self._settings.session_grace, self._settings.heartbeat
        longest = UNDISTURBED_SHARE * self._settings.lease
        if time.monotonic() - began > longest:
            self.distrust_leases()
        if self._disturbed:
            watched = await watch_workers(connection, grace=grace, settled=False)
            self._disturbed = False
            self._leases_distrusted_until = time.monotonic() + heartbeat + grace
        else:
            settled = time.monotonic() >= self._leases_distrusted_until
            watched = await watch_workers(connection, grace=grace, settled=settled)
        before, self._clocks = self._clocks, (watched.server_time, time.monotonic())
        if before is None:
            return watched
        there, here = (now - then for now, then in zip(self._clocks, before, strict=True))
        if there - here <= longest:
            return watched
        log.warning("upkeep.clock_jumped", seconds=round(there - here, 1))
        self.distrust_leases()
        return await self._watch(connection, time.monotonic())

    async def _mark_lost(
        self, connection: AsyncConnection[DictRow], missing: list[DictRow]
    ) -> tuple[list[DictRow], Exception | None]:
        """Declare those lost that are. Returns them, and the failure of one that could not be, if any: the runs of the
        others do not wait for it."""
        gone, failure = [], None
        for worker in missing:
            try:
                if worker["lost"] and await mark_lost(connection, worker["worker_id"], grace=worker["grace"]):
                    gone.append(worker)
            except Exception as error:
                if is_outage(error):
                    raise
                failure = error
        return gone, failure

    async def _release(self, database: Database) -> None:
        crashes = self._settings.max_crashes
        while released := await release_orphans(
            database, max_crashes=crashes, aside=self._aside, shared_worker=self._accompanied
        ):
            for run in released:
                about = {"run_id": str(run["run_id"]), "thread_id": str(run["thread_id"]), "graph_id": run["graph_id"]}
                if run["status"] == "error":
                    log.warning("run.dead_letter", reason="poison", attempt=run["attempt"], **about)
                else:
                    log.warning("run.released", attempt=run["attempt"], crashes=run["crashes"], **about)
            ready = [ReadyRun(run["run_id"], run["graph_id"]) for run in released if run["status"] == "pending"]
            self._metrics.takeovers.add(len(ready))
            announce_ready(self._signals, ready)
            if poisoned := [run for run in released if run["status"] == "error"]:
                self._metrics.dead_letters.add(len(poisoned), "poison")
                for hint in ended_runs_hints([run["run_id"] for run in poisoned]):
                    self._signals.publish("events", hint)
                for run in poisoned:
                    self._signals.publish("events", check_log_hint(run["thread_id"]), thread_id=run["thread_id"])
                announce_webhooks(self._signals)
                # The next runs of their threads.
                announce_perhaps_ready(self._signals)
            await trace_lost(self._database, released)


def _reason(worker: DictRow) -> str:
    if worker["expired"]:
        return "its lease expired"
    return "its process ended" if worker["ended"] else "its session is gone"
