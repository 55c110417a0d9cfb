"""A worker: its parts put together, started in order and stopped in the opposite order.

start:     migrated database → probes → lease → journal → claims
shutdown:  claim nothing more → wait the grace → stop what is left and hand it back → flush → resign → close
"""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from uuid import UUID

import structlog

from holdfast.claiming.claim_loop import ClaimLoop
from holdfast.db.connect import Database
from holdfast.engine.lease import Renewal
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.execution.executor import Executor
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.checkpointer import checkpointer_section
from holdfast.graphs.exits import contain_exits
from holdfast.graphs.store import store_section
from holdfast.graphs.webhooks import webhooks_section
from holdfast.journal.journal import Journal
from holdfast.lifecycle.service import CoroutineService, Service, Services
from holdfast.resources.store import PooledStore
from holdfast.settings import Settings
from holdfast.signals.choose import signals_for
from holdfast.streams.hints import Flush, flush_hints
from holdfast.telemetry.loop_delay import measure_loop_delay
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.leader import Upkeep
from holdfast.worker.attempts import RunningAttempts
from holdfast.worker.condition import Condition
from holdfast.worker.figures import WorkerFigures
from holdfast.worker.health import HealthServer, Verdict
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.lease import Lease
from holdfast.worker.registration import registration
from holdfast.worker.replacement import Replacement
from holdfast.worker.threads import NodeThreads
from holdfast.worker.watchdog import LoopWatchdog

log = structlog.get_logger(__name__)

# Seconds to close the store and the database, beyond what the parts take.
CLOSE_TIMEOUT_SECONDS = 15.0


class Worker(Service):
    """Claims runs and executes them until it is stopped. See `run_until` and `stop_requested`."""

    name = "worker"

    def __init__(
        self,
        settings: Settings,
        catalog: GraphCatalog,
        *,
        upkeep: bool = True,
        probes: socket.socket | None = None,
        node_threads: NodeThreads | None = None,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.stop_requested = asyncio.Event()
        self.replaced = False
        """Whether the process ends because it cannot work, and another one should be started."""
        self.database = Database(settings, "worker")
        self._metrics = Metrics(enabled=settings.metrics)
        self.signals = signals_for(self.database)
        self._store = PooledStore(self.database, catalog.project)
        executor = Executor(settings, self.database, catalog, self._metrics, store=self._store, signals=self.signals)
        self.heartbeat = Heartbeat(
            settings,
            registration(settings, catalog.graph_ids),
            self._on_renewal,
            lambda worker_id: self.lease.lose(worker_id),
            lambda: self.claims.rate.count(),
            lambda: self.condition.reason(),
            on_no_answer=self._on_no_answer,
        )
        self.journal = Journal(
            settings, self._announce, lambda writer: self.attempts.writer_failed(writer), self._metrics
        )
        self.lease = Lease(settings, self.heartbeat, self._metrics, self._on_lease_lost)
        self.attempts = RunningAttempts(
            settings, executor, self.journal, self.signals, self._metrics, self.lease, lambda: self.claims, self._grace
        )
        self.claims = ClaimLoop(
            self.database,
            self.signals,
            catalog.graph_ids,
            self._metrics,
            self.lease,
            self.attempts,
            lambda: self.condition.problem() is None,
        )
        self.journal.session.on_available = self.claims.wake
        watchdog = LoopWatchdog(
            settings.blocked_loop, lambda: bool(self.attempts.executing()), lambda about: self._replacement.look(about)
        )
        self.condition = Condition(
            settings,
            self.database,
            self.heartbeat,
            self.journal,
            watchdog,
            node_threads,
            self.attempts.held,
            self.claims.wake,
            self._replace,
        )
        self._replacement = Replacement(settings, self.heartbeat, self.condition, lambda: self.lease.worker_id)
        project = catalog.project
        sections = store_section(project).sweep_interval, checkpointer_section(project), webhooks_section(project)
        self._upkeep = Upkeep(self.database, self.signals, self._metrics, *sections) if upkeep else None
        self._parts = Services(
            "worker.parts",
            HealthServer(self, settings, probes),
            watchdog,
            self.signals,
            self.condition,
            CoroutineService("stats", self._report),
            CoroutineService("loop_delay", lambda: measure_loop_delay(self._metrics)),
            *([self._upkeep] if self._upkeep is not None else []),
            self.heartbeat,
            self.lease,
            self.journal,
            self.attempts,
            self.claims,
            # The condition notices their end, and the worker drains.
            tolerated=(watchdog, self.heartbeat),
        )
        self._parts.on_failure(self._on_part_failed)
        self.stop_timeout_seconds = self._parts.stop_timeout_seconds + CLOSE_TIMEOUT_SECONDS

    def request_stop(self) -> None:
        """Begin to drain. Returns at once."""
        self.stop_requested.set()

    def request_stop_from_signal(self) -> None:
        """The same for a signal handler, which may interrupt graph code that blocks the event loop."""
        self._replacement.stop_asked_at = time.monotonic()
        with suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self.request_stop)

    async def _start(self) -> None:
        contain_exits(self._loop)
        await self.database.open()
        await self._store.setup()
        await self._parts.start()

    async def _stop(self) -> None:
        self.stop_requested.set()
        if self.failure is None:
            self.heartbeat.drain()
        await self._parts.stop()
        await self._store.close()
        await self.database.close()
        if self.started and self.failure is None:
            log.info("worker.offline", finished=self.attempts.finished)

    # --- what the parts report ----------------------------------------------------------------------------------------

    def _on_renewal(self, worker_id: UUID, renewal: Renewal) -> None:
        self.claims.timing.set_workers(worker_id, renewal.peers)
        self.attempts.cancel(renewal.cancels)
        if renewal.status == "draining" and not self.stop_requested.is_set():
            log.info("worker.drain_requested", worker_id=str(worker_id))
            self.request_stop()

    def _on_lease_lost(self) -> int:
        return self.attempts.drop_all("the worker was declared lost")

    async def _on_no_answer(self) -> None:
        """The server did not answer a renewal. Other connections may lead to a server that hangs, too."""
        self.journal.session.shut_down()
        await self.database.replace_connections()

    def _on_part_failed(self, error: BaseException) -> None:
        """A worker without one of its parts cannot work. It ends, and its runs are executed elsewhere."""
        self.attempts.fail()
        self.heartbeat.keep_lease()
        self._ended_by_itself(error)

    def _replace(self) -> None:
        """Drain, and have another process started, unless the worker drains already."""
        if not self.stop_requested.is_set():
            self.replaced = True
            self.request_stop()

    def _grace(self) -> float:
        return 0.0 if self.condition.journal_cut_off else self._settings.drain_timeout

    def _announce(self, visible: list[Flush], ready: list[ReadyRun]) -> None:
        """The journal has committed."""
        for flush in visible:
            for hint in flush_hints(flush, self.signals.max_payload):
                self.signals.publish("events", hint, thread_id=flush.thread_id)
        if ready:
            announce_ready(self.signals, ready)
            self.claims.wake()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._settings.stats_interval)
            running, capacity, commits = len(self.attempts.executing()), self._settings.jobs, self.journal.commits
            finished = self.attempts.finished
            log.info("worker.stats", running=running, capacity=capacity, finished=finished, commits=commits)

    # --- probes, from their own thread --------------------------------------------------------------------------------

    def live(self) -> Verdict:
        problem = self.condition.problem()
        return Verdict(False, problem.reason) if problem is not None and problem.lasting else Verdict(True)

    def ready(self) -> Verdict:
        if self.stop_requested.is_set():
            return Verdict(False, "draining")
        if not self.lease.held:
            return Verdict(False, "the database does not know this worker: no lease")
        reason = self.condition.reason()
        return Verdict(True) if reason is None else Verdict(False, reason)

    def metrics(self) -> WorkerFigures:
        return WorkerFigures(
            counted=self._metrics,
            database=self.database,
            signals=self.signals,
            leading=self._upkeep is not None and self._upkeep.leading,
            active=len(self.attempts.executing()),
            ready=self.ready().well,
            blocked=self.condition.blocked,
            deadline=self.heartbeat.deadline,
        )
