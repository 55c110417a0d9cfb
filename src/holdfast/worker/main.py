"""A worker: claims runs, executes them, keeps its lease, and leaves in good order.

start:     migrated database → graphs → heartbeat registers → claim
shutdown:  draining → no more claims → wait the grace → stop what is left and hand it back → flush → resign
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from contextlib import suppress
from functools import partial
from uuid import UUID

import orjson
import psycopg
import structlog

import holdfast
from holdfast.db.connect import Database
from holdfast.db.kept import KeptConnection
from holdfast.engine.claim import NO_TURN, claim, next_due, return_strays
from holdfast.engine.lease import Registration, Renewal
from holdfast.engine.outbox import announce_webhooks, has_webhook
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.ready import OCCASION, ReadyRun, announce_ready, announce_taken
from holdfast.errors import Cancelled, Drained, LeaseLost, RunSignal
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.checkpointer import checkpointer_section
from holdfast.graphs.store import store_section
from holdfast.graphs.webhooks import webhooks_section
from holdfast.resources.store import PooledStore
from holdfast.settings import Settings
from holdfast.signals.choose import signals_for
from holdfast.streams.hints import Flush, tell
from holdfast.telemetry.backoff import Backoff
from holdfast.telemetry.cancelling import cancel_all, run_together
from holdfast.telemetry.loop_delay import watch_loop
from holdfast.telemetry.rates import Rate
from holdfast.telemetry.run_context import logging_run
from holdfast.upkeep.leader import Upkeep
from holdfast.worker.cores import usable_cores
from holdfast.worker.dozing import Dozing, ask_front
from holdfast.worker.executor import Attempt, Executor
from holdfast.worker.figures import WorkerFigures, count_claim, count_end
from holdfast.worker.graph_stream import Claimed
from holdfast.worker.health import HealthServer, Verdict
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.journal import Journal, Lane
from holdfast.worker.traces import trace_attempt, trace_crash, trace_end
from holdfast.worker.wakes import Wakes
from holdfast.worker.watchdog import LoopWatchdog

log = structlog.get_logger(__name__)

# Not to be waited for longer than this once the grace is over: flush, resign, close.
CLEANUP_TIMEOUT = 5.0
# Seconds the word that a run is taken may wait for the run's first events, to be sent with them.
TAKEN_PATIENCE = 0.01
# The same of the word that it has begun.
BEGUN_PATIENCE = 0.005


class Worker:
    """Everything one worker process does. `run` returns when the worker has left."""

    def __init__(
        self,
        settings: Settings,
        catalog: GraphCatalog,
        *,
        upkeep: bool = True,
        probes: socket.socket | None = None,
    ) -> None:
        self._settings = settings
        self._probes = probes
        self._catalog = catalog
        self.database = Database(settings, "worker")
        self.signals = signals_for(self.database)
        # Hints are sent by another one that is kept.
        self._claiming = KeptConnection(self.database, others=2, planned_once=True)
        self.journal = Journal(settings, self._announce, self._lane_failed, self.database.metrics)
        self.executor = Executor(settings, self.database, catalog)
        self.executor.signals = self.signals
        items = store_section(catalog.project)
        threads = checkpointer_section(catalog.project)
        webhooks = webhooks_section(catalog.project)
        duties = Upkeep(self.database, self.signals, items.sweep_interval, threads, webhooks) if upkeep else None
        self._upkeep = duties
        self._attempts: dict[UUID, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker_id: UUID | None = None
        self._journal_task: asyncio.Task[None] | None = None
        self._watchdog: LoopWatchdog | None = None
        self._wake = asyncio.Event()
        self._wakes = Wakes(
            catalog.graph_ids, self._wake.set, self._ask_database, degraded=lambda: self.signals.degraded
        )
        self._stopping = asyncio.Event()
        self._draining = False
        # Whether more may be ready than there was room for when we last looked. Whatever becomes ready after a look
        # that found less than there was room for comes with a hint.
        self._more = True
        # Which tenant was served last, and whether its turn is over.
        self._turn = NO_TURN
        self._ask_schedule = True
        # When it last began to, for traces.
        self._looked_at = 0
        self._strays_due = time.monotonic() + settings.lease
        self.finished = 0
        self.claims = Rate(60.0)
        self._heartbeat = Heartbeat(settings, self._registration(), self._renewed, self._lost, self.claims.count)

    def stop(self) -> None:
        """Begin the shutdown; `run` returns when it is done."""
        self._stopping.set()

    async def run(self) -> None:
        health = self._health_server()
        await self.database.open()
        store = await self._open_store()
        self.signals.listen("work", self._wakes.hint)
        self.signals.listen("cancel", self._cancel_hint)
        watchdog = self._watchdog = LoopWatchdog(self._settings.blocked_loop, lambda: bool(self._attempts))
        journal = self._journal_task = asyncio.create_task(self.journal.run(), name="journal")
        work = {
            "signals": self.signals.run(),
            "lease": self._watch_lease(),
            "stats": self._report(),
            "loop_delay": watch_loop(self.database.metrics),
            "journal_watch": _outlive(journal),
            "dozing": self._dozing().run(),
            "serving": self._serve(journal),
        }
        if self._upkeep is not None:
            work["upkeep"] = self._upkeep.run()
        try:
            self._heartbeat.start()
            watchdog.start()
            if health is not None:
                health.start()
            await run_together(**work)
        finally:
            watchdog.stop()
            if health is not None:
                health.close()
            await cancel_all([journal])
            await store.close()
            await self.database.close()

    def _dozing(self) -> Dozing:
        front = partial(ask_front, self.database)
        return Dozing(self.signals, self._wakes, lambda: bool(self._attempts), self._wake.set, front)

    async def _serve(self, journal: asyncio.Task[None]) -> None:
        """Claim until told to stop, then leave in good order."""
        await run_together(claim=self._claim_loop(), stop=self._told_to_stop())
        await self._claiming.part()
        await self._drain()
        self.journal.close()
        await asyncio.wait({journal}, timeout=CLEANUP_TIMEOUT)
        await self._heartbeat.resign(CLEANUP_TIMEOUT)
        log.info("worker.offline", finished=self.finished)

    async def _told_to_stop(self) -> None:
        await self._stopping.wait()
        self._draining = True
        self._heartbeat.drain()

    async def _open_store(self) -> PooledStore:
        try:
            store = PooledStore(self.database, self._catalog.project)
            await store.setup()
        except BaseException:
            await self.database.close()
            raise
        self.executor.store = store
        return store

    async def _drain(self) -> None:
        if self._tasks:
            log.info("worker.draining", runs=len(self._tasks), grace=self._settings.drain_timeout)
            await asyncio.wait(self._tasks, timeout=self._settings.drain_timeout)
        for attempt in self._attempts.values():
            attempt.stop(Drained("the worker is shutting down"))
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._worker_id is not None:
            # The claim that was interrupted may have been made.
            with suppress(TimeoutError):
                async with asyncio.timeout(CLEANUP_TIMEOUT):
                    while not await self._return_strays(self._worker_id):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)

    # --- claiming ---------------------------------------------------------------------------------

    async def _claim_loop(self) -> None:
        backoff = Backoff("claim.outage", "claim.recovered")
        while not self._draining:
            worker_id = await self._heartbeat.registered()
            if self._worker_id != worker_id:
                self._worker_id = worker_id
                log.info("worker.online", worker_id=str(worker_id), jobs=self._settings.jobs)
            self._wake.clear()
            # Also of a place that becomes free during the look: it was not asked for.
            self._more = True
            free = self._settings.jobs - len(self._attempts)
            pause = self._settings.degraded_poll if self.signals.degraded else self._settings.poll_interval
            if time.monotonic() >= self._strays_due:
                await self._return_strays(worker_id)
                if worker_id != self._worker_id:
                    # The lease was lost while this waited for a connection: the deadline is another identity's.
                    continue
            if free > 0 and time.monotonic() < self._heartbeat.deadline:
                try:
                    pause = min(pause, await self._claim(worker_id, free))
                except (psycopg.Error, OSError) as error:
                    self._strays_due = 0.0
                    await backoff.failed(error)
                    continue
                backoff.succeeded()
            else:
                self._wakes.passed()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _claim(self, worker_id: UUID, free: int) -> float:
        """Take what is due and start it. Returns how long until something else is, as far as that is known."""
        looking = self._wakes.looking()
        self._looked_at = time.time_ns()
        due = None
        async with self._claiming.connection() as connection:
            most = self._settings.tenant_max_running
            rows = await claim(connection, worker_id, free, self._catalog.graph_ids, turn=self._turn, max_running=most)
            self._turn = self._turn.after(rows)
            drained = len(rows) < free
            self._more = not drained
            if drained and self._ask_schedule:
                due = await next_due(connection)
                # Nothing is scheduled: whatever will be comes with a hint, or is found by the slow poll.
                self._ask_schedule = due is not None or self._settings.session_url is None
        settled = self._wakes.looked(looking, drained=drained)
        self.claims.add(len(rows))
        for row in rows:
            run = Claimed(**row)
            self._announce([run.announced()], [], patience=BEGUN_PATIENCE)
            self._start(worker_id, run)
        if self._wakes.in_company:
            taken = [str(row["run_id"]) for row in rows] + [name for name in settled if name.startswith(OCCASION)]
            announce_taken(self.signals, self._wakes.telling(taken), patience=TAKEN_PATIENCE)
        return math.inf if due is None else due.after + 0.001 + self._wakes.delay(str(due.run_id), due.graph_id)

    async def _return_strays(self, worker_id: UUID) -> bool:
        """After a claim that may have been made although it failed; and now and then, for runs left by a defect."""
        try:
            async with self.database.connection() as connection:
                strays = await return_strays(connection, worker_id, list(self._attempts))
        except (psycopg.Error, OSError):
            return False  # Still due. The claim that follows will wait and say so.
        self._strays_due = time.monotonic() + self._settings.lease
        if strays:
            log.warning("worker.strays_returned", run_ids=[str(run_id) for run_id in strays])
            announce_ready(self.signals, [ReadyRun(run_id) for run_id in strays])
            self._wake.set()
        return True

    def _start(self, worker_id: UUID, run: Claimed) -> None:
        lane = self.journal.open_lane(run.run_id, run.thread_id, run.fence, run.next_seq)
        attempt = Attempt(run, lane)
        attempt.trace = lane.trace = trace_attempt(run, self._looked_at)
        self._attempts[run.run_id] = attempt
        self.signals.deaf = False
        if worker_id != self._worker_id:
            attempt.stop(LeaseLost("the worker was declared lost while it claimed"))
        count_claim(self.database.metrics, run)
        task = asyncio.create_task(self._execute(attempt), name=f"attempt {run.run_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, attempt: Attempt) -> None:
        run = attempt.run
        # Once for the whole attempt, its task being its own: on all lines of ours and of the graph's code.
        with logging_run(
            run_id=str(run.run_id),
            thread_id=str(run.thread_id),
            assistant_id=str(run.assistant_id),
            graph_id=run.graph_id,
            tenant=run.tenant_id,
            attempt=run.attempt,
            worker_id=str(run.worker_id),
        ):
            await self._attempt(attempt)

    async def _attempt(self, attempt: Attempt) -> None:
        run = attempt.run
        log.info("run.claimed", waited=round(run.waited, 3))
        started = time.monotonic()
        outcome: Outcome | None = None
        if attempt.trace is not None:
            attempt.trace.enter()
        try:
            outcome = await self.executor.execute(attempt)
        except Exception as error:
            # The run goes back with the next strays: nothing is lost, but it must be seen.
            log.exception("run.crashed")
            trace_crash(attempt.trace, error)
        finally:
            trace_end(attempt.trace, outcome)
            if self._attempts.get(run.run_id) is attempt:
                del self._attempts[run.run_id]
            self.finished += 1
            # A tenant at its limit may have one more now. Without hints, any moment is as good as another.
            if run.tenant_id or self.signals.degraded:
                self._wake.set()
            elif self._more:
                self._wakes.more()
        count_end(self.database.metrics, run, outcome, time.monotonic() - started)
        match outcome:
            case Ended(status=status):
                ended = str(status)
                if has_webhook(run.kwargs):
                    announce_webhooks(self.signals)
            case Released(after=None):
                ended = "handed back"
            case Released(after=after):
                ended = "retry"
                asyncio.get_running_loop().call_later((after or 0) + 0.001, self._wake.set)
            case RolledBack():
                ended = "rolled back"
            case Waiting():
                ended = "waiting for its children"
            case None:
                return
        log.info("run.finished", outcome=ended, seconds=round(time.monotonic() - started, 3))

    # --- what others tell us ----------------------------------------------------------------------

    def _ask_database(self) -> None:
        """Hints may have been missed, and with them what is scheduled."""
        self._ask_schedule = True

    def _cancel_hint(self, payload: str | None) -> None:
        if payload is None:
            return
        with suppress(ValueError, KeyError, TypeError):
            order = orjson.loads(payload)
            attempt = self._attempts.get(UUID(order["run_id"]))
            if attempt is not None:
                attempt.stop(Cancelled(order["action"]))

    def _renewed(self, worker_id: UUID, renewal: Renewal) -> None:
        self._wakes.meet(worker_id, renewal.peers)
        for order in renewal.cancels:
            attempt = self._attempts.get(order.run_id)
            if attempt is not None and attempt.run.fence == order.fence:
                attempt.stop(Cancelled(order.action))
        if renewal.status == "draining" and not self._draining:
            log.info("worker.drain_requested", worker_id=str(worker_id))
            self.stop()

    def _lost(self, worker_id: UUID) -> None:
        """Declared lost, or cut off for longer than the lease. Whatever we hold belongs to others: drop it all, and
        come back as somebody new."""
        if worker_id != self._worker_id:
            return
        log.warning("worker.lease_lost", worker_id=str(worker_id), runs=len(self._attempts))
        self.database.metrics.leases_lost.add()
        self._worker_id = None
        for attempt in list(self._attempts.values()):
            attempt.stop(LeaseLost("the worker was declared lost"))
        if not self._draining:
            self._heartbeat.register_anew()

    async def _watch_lease(self) -> None:
        """The process's own clock ends the lease too, when no renewal comes through to say so."""
        while True:
            await asyncio.sleep(min(0.5, self._settings.lease / 10))
            if self._worker_id is not None and time.monotonic() > self._heartbeat.deadline:
                self._lost(self._worker_id)

    # --- what probes ask, from their own thread ---------------------------------------------------

    def _health_server(self) -> HealthServer | None:
        if self._probes is not None:
            return HealthServer(self, listener=self._probes)
        if self._settings.health_port is None:
            return None
        return HealthServer(self, self._settings.health_host, self._settings.health_port)

    def live(self) -> Verdict:
        if not self._heartbeat.alive:
            return Verdict(False, "the heartbeat has ended")
        if self._journal_task is not None and self._journal_task.done():
            return Verdict(False, "the journal has ended")
        return Verdict(True)

    def ready(self) -> Verdict:
        if self._draining or self._stopping.is_set():
            return Verdict(False, "draining")
        if self._worker_id is None or time.monotonic() >= self._heartbeat.deadline:
            return Verdict(False, "the database does not know this worker: no lease")
        return Verdict(True)

    def metrics(self) -> WorkerFigures:
        watchdog = self._watchdog
        return WorkerFigures(
            database=self.database,
            signals=self.signals,
            leading=self._upkeep is not None and self._upkeep.leading,
            active=len(self._attempts),
            ready=self.ready().well,
            blocked=(0, 0.0) if watchdog is None else (watchdog.blocked_total, watchdog.blocked_seconds_total),
            deadline=self._heartbeat.deadline,
        )

    # --- what we tell others ----------------------------------------------------------------------

    def _announce(self, visible: list[Flush], ready: list[ReadyRun], *, patience: float = 0.0) -> None:
        for flush in visible:
            for hint in tell(flush, self.signals.max_payload):
                self.signals.publish("events", hint, thread_id=flush.thread_id, patience=patience)
        if ready:
            announce_ready(self.signals, ready)
            self._wake.set()

    def _lane_failed(self, lane: Lane) -> None:
        attempt = self._attempts.get(lane.run_id)
        if attempt is not None and attempt.lane is lane:
            assert isinstance(lane.failure, RunSignal)
            attempt.stop(lane.failure)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._settings.stats_interval)
            log.info(
                "worker.stats",
                running=len(self._attempts),
                capacity=self._settings.jobs,
                finished=self.finished,
                commits=self.journal.commits,
            )

    def _registration(self) -> Registration:
        cores = usable_cores()
        return Registration(
            worker_id=UUID(int=0),
            host=socket.gethostname(),
            pid=os.getpid(),
            version=holdfast.__version__,
            capacity=self._settings.jobs,
            graphs=tuple(self._catalog.graph_ids),
            cores=cores.count,
            cpus=cores.which,
        )


async def _outlive(journal: asyncio.Task[None]) -> None:
    """A worker without its journal can finish nothing. It ends with it, loudly, and its runs go on elsewhere."""
    await asyncio.wait({journal})
    if not journal.cancelled() and (error := journal.exception()) is not None:
        raise error
    await asyncio.Event().wait()  # Closed in good order: the worker is leaving, and ends when it has left.
