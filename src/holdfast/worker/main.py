"""A worker: claims runs, executes them, keeps its lease, and leaves in good order.

start:     migrated database → graphs → heartbeat registers → claim
shutdown:  draining → no more claims → wait the grace → stop what is left and hand it back → flush → resign
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from contextlib import suppress
from uuid import UUID

import orjson
import psycopg
import structlog

from holdfast.claiming.announcement import announcement_of
from holdfast.claiming.claim_size import ClaimSize
from holdfast.claiming.claim_timing import ClaimTiming, run_ids_of
from holdfast.claiming.refused_runs import RefusedRuns
from holdfast.claiming.unexecuted_runs import UnexecutedRuns
from holdfast.db.connect import Database
from holdfast.db.kept_connection import KeptConnection
from holdfast.engine.claim import NO_TURN, SUSPECT_SECONDS, claim
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.lease import Renewal
from holdfast.engine.outbox import announce_webhooks, has_webhook
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.ready import ANONYMOUS_HINT, ReadyRun, announce_ready, announce_taken
from holdfast.engine.states import CANCEL_ACTIONS
from holdfast.engine.upcoming import next_due
from holdfast.errors import Cancelled, Drained, LeaseLost, RunSignal
from holdfast.execution.attempt import Attempt
from holdfast.execution.executor import Executor
from holdfast.execution.finishing import finish_crashed
from holdfast.execution.traces import trace_attempt
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.checkpointer import checkpointer_section
from holdfast.graphs.exits import contain_exits
from holdfast.graphs.store import store_section
from holdfast.graphs.webhooks import webhooks_section
from holdfast.journal.journal import Journal, watch_journal
from holdfast.journal.run_writer import RunWriter
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.cancelling import cancel_all, run_together
from holdfast.resources.store import PooledStore
from holdfast.settings import Settings
from holdfast.signals.choose import signals_for
from holdfast.streams.hints import Flush, flush_hints
from holdfast.telemetry.exceptions import ESCAPING
from holdfast.telemetry.loop_delay import watch_loop
from holdfast.telemetry.run_context import logging_run
from holdfast.upkeep.leader import Upkeep
from holdfast.worker.condition import WATCH_SECONDS, Condition
from holdfast.worker.figures import WorkerFigures, count_claim, count_end
from holdfast.worker.health import Verdict, health_server
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.recent_rate import Rate
from holdfast.worker.registration import registration
from holdfast.worker.replacement import Replacement
from holdfast.worker.threads import Attempted, NodeThreads
from holdfast.worker.watchdog import LoopWatchdog

log = structlog.get_logger(__name__)

# Not to be waited for longer than this once the grace is over: flush, resign, close.
CLEANUP_TIMEOUT = 5.0
# Seconds the word that a run is taken may wait for the run's first events, to be sent with them.
TAKEN_HINT_MAX_DELAY_SECONDS = 0.01
# The same of the word that it has begun.
BEGUN_HINT_MAX_DELAY_SECONDS = 0.005
# Seconds between two claims while the tenants at their limit have not all been passed over.
WALK_PAUSE = 0.01


class Worker:
    """Everything one worker process does. `run` returns when the worker has left."""

    def __init__(
        self,
        settings: Settings,
        catalog: GraphCatalog,
        *,
        upkeep: bool = True,
        probes: socket.socket | None = None,
        node_threads: NodeThreads | None = None,
    ) -> None:
        self._settings = settings
        self._probes = probes
        self._loop = asyncio.get_running_loop()
        self._catalog = catalog
        self.database = Database(settings, "worker")
        self.signals = signals_for(self.database)
        # Hints are sent by another one that is kept.
        self._claiming = KeptConnection(self.database, others=2, generic_plans=True)
        self.journal = Journal(settings, self._announce, self._writer_failed, self.database.metrics)
        self.executor = Executor(settings, self.database, catalog)
        self.executor.environment.signals = self.signals
        project = catalog.project
        sections = store_section(project).sweep_interval, checkpointer_section(project), webhooks_section(project)
        self._upkeep = Upkeep(self.database, self.signals, *sections) if upkeep else None
        self._attempts: dict[UUID, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker_id: UUID | None = None
        self._wake = asyncio.Event()
        self._timing = ClaimTiming(catalog.graph_ids, self._wake.set, self._ask_database)
        self._stopping = asyncio.Event()
        # Whether the process ends because it cannot work, and another one should be started.
        self.replaced = False
        self._draining = False
        # Whether more may be ready than there was room for when we last looked. Whatever becomes ready after a look
        # that found less than there was room for comes with a hint.
        self._more = True
        self._claim_size = ClaimSize(settings.jobs)
        self._refused = RefusedRuns(self.database.metrics)
        # Which tenant was served last, and whether its turn is over.
        self._turn = NO_TURN
        # Tenants of which a run has ended here since the last claim: they may have room for another.
        self._freed: set[str] = set()
        self._ask_schedule = True
        # When it last began to, for traces.
        self._looked_at = 0
        self._unexecuted = UnexecutedRuns(self.database, self.signals, lambda: self._attempts, self._wake.set)
        self.finished = 0
        self.claims = Rate(60.0)
        self._heartbeat = Heartbeat(
            settings,
            registration(settings, catalog.graph_ids),
            self._renewed,
            self._lost,
            self.claims.count,
            lambda: self.condition.reason(),
            on_no_answer=self._unanswered,
        )
        self.condition = Condition(settings, self.database, self._heartbeat, self.journal, node_threads, self._held)
        self._replacement = Replacement(settings, self._heartbeat, self.condition, lambda: self._worker_id)

    def stop(self) -> None:
        """Begin the shutdown; `run` returns when it is done."""
        self._stopping.set()

    def stop_soon(self) -> None:
        """The same for a signal handler, which may interrupt graph code that blocks the event loop."""
        self._replacement.stop_asked_at = time.monotonic()
        with suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self.stop)

    async def run(self) -> None:
        contain_exits(asyncio.get_running_loop())
        health = health_server(self, self._settings, self._probes)
        await self.database.open()
        store = await self._open_store()
        self.signals.listen("work", self._timing.on_hint)
        self.signals.listen("cancel", self._cancel_hint)
        watchdog = LoopWatchdog(self._settings.blocked_loop, lambda: bool(self._attempts), self._replacement.look)
        journal = asyncio.create_task(self.journal.run(self._wake.set), name="journal")
        self.condition.watchdog, self.condition.journal_task = watchdog, journal
        work = {
            "signals": self.signals.run(),
            "lease": self._watch_lease(),
            "condition": self.condition.watch(self._wake.set, self._replace),
            "stats": self._report(),
            "loop_delay": watch_loop(self.database.metrics),
            "journal_watch": watch_journal(journal),
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

    async def _serve(self, journal: asyncio.Task[None]) -> None:
        """Claim until told to stop, then leave in good order."""
        await run_together(claim=self._claim_loop(), stop=self._told_to_stop())
        await self._claiming.release()
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
        self.executor.environment.store = store
        return store

    async def _drain(self) -> None:
        grace = 0.0 if self.condition.journal_cut_off else self._settings.drain_timeout
        if self._tasks:
            log.info("worker.draining", runs=len(self._tasks), grace=grace)
            await asyncio.wait(self._tasks, timeout=grace)
        for attempt in self._attempts.values():
            attempt.stop(Drained("the worker is shutting down"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLEANUP_TIMEOUT)
        # The journal cannot write, or graph code does not stop. A worker that drains blames no run for its end.
        for attempt in self._attempts.values():
            attempt.stop(LeaseLost("the worker has given the run back"))
        self._attempts.clear()
        if self._worker_id is not None:
            # These, and those of a claim that was interrupted. If that fails, upkeep does it once we have resigned.
            with suppress(TimeoutError):
                async with asyncio.timeout(CLEANUP_TIMEOUT):
                    while not await self._unexecuted.give_up(self._worker_id):  # noqa: ASYNC110
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
            if self._unexecuted.is_due():
                await self._unexecuted.give_up(worker_id)
                if worker_id != self._worker_id:
                    # The lease was lost while this waited for a connection: the deadline is another identity's.
                    continue
            if free > 0 and time.monotonic() < self._heartbeat.deadline and self.condition.problem() is None:
                try:
                    pause = min(pause, await self._claim(worker_id, free))
                except (psycopg.Error, OSError) as error:
                    self._unexecuted.check_soon()
                    self._claim_size.failed(error)
                    if not self._refused.failed(error):
                        await backoff.failed(error)
                    continue
                self._claim_size.succeeded()
                self._refused.claimed()
                backoff.succeeded()
            else:
                pause = min(pause, WATCH_SECONDS) if free > 0 else pause  # A problem may be over in a moment.
                self._timing.skip_turns()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _claim(self, worker_id: UUID, free: int) -> float:
        """Take what is due and start it. Returns how long until something else is, as far as that is known."""
        hints = self._timing.claim_started()
        self._looked_at = time.time_ns()
        due = None
        wanted, limited = self._claim_size.of(free), self._claim_size.limited
        # A connection of the pool waits for its answer longer than the one that is kept.
        connect = self.database.connection if limited else self._claiming.connection
        async with self.database.transaction() if self._refused.one_by_one else connect() as connection:
            # Those whose runs end during the claim are for the next one.
            freed, self._freed = self._freed, set()
            try:
                claimed = await claim(
                    connection,
                    worker_id,
                    wanted,
                    self._catalog.graph_ids,
                    turn=self._turn,
                    max_running=self._settings.tenant_max_running,
                    tenants=list(freed),
                    hinted=run_ids_of(hints),
                    aside=self._refused.ids(),
                    look=self._refused.look,
                )
            except BaseException:
                self._freed |= freed
                raise
            self._turn = claimed.turn
            walking = self._turn.walking_since is not None
            drained = len(claimed) < wanted and not walking
            self._more = not drained
            if drained and self._ask_schedule:
                due = await next_due(connection)
                # Nothing is scheduled: whatever will be comes with a hint, or is found by the slow poll.
                self._ask_schedule = due is not None or self._settings.session_url is None
        answered = self._timing.claim_finished(hints, emptied=drained)
        self.claims.add(len(claimed))
        for run in claimed:
            self._announce([announcement_of(run)], [], max_delay=BEGUN_HINT_MAX_DELAY_SECONDS)
            self._start(worker_id, run)
        if self._timing.others_wait:
            taken = [str(run.run_id) for run in claimed] + [
                name for name in answered if name.startswith(ANONYMOUS_HINT)
            ]
            announce_taken(self.signals, taken, max_delay=TAKEN_HINT_MAX_DELAY_SECONDS)
        if walking or (wanted < free and not drained):
            return WALK_PAUSE
        return math.inf if due is None else due.after + 0.001 + self._timing.delay(str(due.run_id), due.graph_id)

    def _start(self, worker_id: UUID, run: ClaimedRun) -> None:
        writer = self.journal.open_writer(run.run_id, run.thread_id, run.fence, run.next_seq)
        self._unexecuted.claimed(run.run_id)
        writer.trace = trace_attempt(run, self._looked_at)
        attempt = Attempt(run, writer, writer.trace)
        if run.suspect:
            # From then on this worker may take another suspect.
            writer.on_progress = self._wake.set
            asyncio.get_running_loop().call_later(SUSPECT_SECONDS, self._wake.set)
        self._attempts[run.run_id] = attempt
        if worker_id != self._worker_id:
            attempt.stop(LeaseLost("the worker was declared lost while it claimed"))
        count_claim(self.database.metrics, run)
        task = asyncio.create_task(self._execute(attempt), name=f"attempt {run.run_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, attempt: Attempt) -> None:
        # Once for the whole attempt, its task being its own: on all lines of ours and of the graph's code.
        with logging_run(**attempt.run.log_fields()):
            await self._attempt(attempt)

    async def _attempt(self, attempt: Attempt) -> None:
        run = attempt.run
        log.info("run.claimed", waited=round(run.waited, 3))
        started = time.monotonic()
        outcome: Outcome | None = None
        try:
            outcome = await self.executor.execute(attempt)
        except ESCAPING as error:
            log.exception("run.crashed")
            # Counted, so that it comes to an end.
            outcome = await finish_crashed(attempt, error, self._settings)
            if outcome is None and not isinstance(attempt.writer.failure, LeaseLost):
                self._unexecuted.disown_soon(run.run_id)
        finally:
            if self._attempts.get(run.run_id) is attempt:
                del self._attempts[run.run_id]
            self.finished += 1
            # A tenant at its limit may have one more now, and the worker another suspect. Without hints, any moment is
            # as good as another.
            if run.tenant_id:
                self._freed.add(run.tenant_id)
            if run.tenant_id or run.suspect or self.signals.degraded or self._more:
                self._wake.set()
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
            if attempt is not None and order["action"] in CANCEL_ACTIONS:
                attempt.stop(Cancelled(order["action"]))

    def _renewed(self, worker_id: UUID, renewal: Renewal) -> None:
        self._timing.set_workers(worker_id, renewal.peers)
        for order in renewal.cancels:
            attempt = self._attempts.get(order.run_id)
            if attempt is not None and attempt.run.fence == order.fence:
                attempt.stop(Cancelled(order.action))
        if renewal.status == "draining" and not self._draining:
            log.info("worker.drain_requested", worker_id=str(worker_id))
            self.stop()

    async def _unanswered(self) -> None:
        """The server did not answer a renewal. Other connections may lead to a server that hangs, too."""
        self.journal.session.shut_down()
        await self.database.replace_connections()

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

    # --- what keeps it from working ---------------------------------------------------------------

    def _held(self) -> set[Attempted]:
        return {(str(attempt.run.run_id), attempt.run.attempt) for attempt in list(self._attempts.values())}

    def _replace(self) -> None:
        """Leave in good order, and let another process be started, unless the worker is leaving already."""
        if self._stopping.is_set():
            return
        self.replaced = True
        self.stop()

    # --- what probes ask, from their own thread ---------------------------------------------------

    def live(self) -> Verdict:
        problem = self.condition.problem()
        return Verdict(False, problem.reason) if problem is not None and problem.lasting else Verdict(True)

    def ready(self) -> Verdict:
        if self._draining or self._stopping.is_set():
            return Verdict(False, "draining")
        if self._worker_id is None or time.monotonic() >= self._heartbeat.deadline:
            return Verdict(False, "the database does not know this worker: no lease")
        reason = self.condition.reason()
        return Verdict(True) if reason is None else Verdict(False, reason)

    def metrics(self) -> WorkerFigures:
        return WorkerFigures(
            database=self.database,
            signals=self.signals,
            leading=self._upkeep is not None and self._upkeep.leading,
            active=len(self._attempts),
            ready=self.ready().well,
            blocked=self.condition.blocked,
            deadline=self._heartbeat.deadline,
        )

    # --- what we tell others ----------------------------------------------------------------------

    def _announce(self, visible: list[Flush], ready: list[ReadyRun], *, max_delay: float = 0.0) -> None:
        for flush in visible:
            for hint in flush_hints(flush, self.signals.max_payload):
                self.signals.publish("events", hint, thread_id=flush.thread_id, max_delay=max_delay)
        if ready:
            announce_ready(self.signals, ready)
            self._wake.set()

    def _writer_failed(self, writer: RunWriter) -> None:
        attempt = self._attempts.get(writer.run_id)
        if attempt is not None and attempt.writer is writer:
            assert isinstance(writer.failure, RunSignal)
            attempt.stop(writer.failure)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._settings.stats_interval)
            running, capacity, commits = len(self._attempts), self._settings.jobs, self.journal.commits
            log.info("worker.stats", running=running, capacity=capacity, finished=self.finished, commits=commits)
