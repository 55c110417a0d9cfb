"""The claim loop of a worker: claims runs when a hint, a timer or the slow poll says so, and starts them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol
from uuid import UUID

import psycopg
import structlog

from holdfast.claiming.announcement import announcement_of
from holdfast.claiming.claim_rate import ClaimRate
from holdfast.claiming.claim_size import ClaimSize
from holdfast.claiming.claim_timing import ClaimTiming, run_ids_of
from holdfast.claiming.refused_runs import RefusedRuns
from holdfast.claiming.unexecuted_runs import UnexecutedRuns
from holdfast.db.connect import Database
from holdfast.db.kept_connection import KeptConnection
from holdfast.engine.claim import NO_TURN, SUSPECT_SECONDS, Claims, claim
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.ready import ANONYMOUS_HINT, ReadyRun, announce_taken
from holdfast.engine.upcoming import next_due
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.service import TaskService
from holdfast.signals import Signals
from holdfast.streams.hints import flush_hints
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

# Seconds that the hint "this run is taken" may wait, to be sent together with the hints about the run's first events.
TAKEN_HINT_MAX_DELAY_SECONDS = 0.01
# The longest time that the hint about the event of the claim may wait for other hints.
CLAIM_EVENT_HINT_MAX_DELAY_SECONDS = 0.005
# Seconds between two claims while more runs are ready than one claim takes, or while tenants were not visited yet.
NEXT_CLAIM_DELAY_SECONDS = 0.01
# Seconds between two checks whether the worker can claim again, while it has free slots.
UNABLE_POLL_SECONDS = 0.5
# Added to the timer of a run that is due later, so that it is due when the claim is executed.
DUE_MARGIN_SECONDS = 0.001


class WorkerLease(Protocol):
    """The worker's lease, as claims need it."""

    @property
    def worker_id(self) -> UUID | None:
        """None: there is no lease."""
        ...

    @property
    def held(self) -> bool: ...

    async def acquire(self) -> UUID:
        """Wait until the worker is registered."""
        ...


class Slots(Protocol):
    """The runs that the worker executes."""

    def executing(self) -> Collection[UUID]: ...

    def start_attempt(self, worker_id: UUID, run: ClaimedRun, claim_began_ns: int) -> None: ...


class ClaimLoop(TaskService):
    """Claims runs while it is started. `can_work`: whether the worker could execute what it claims."""

    name = "claim"

    def __init__(
        self,
        database: Database,
        signals: Signals,
        graph_ids: Collection[str],
        metrics: Metrics,
        lease: WorkerLease,
        slots: Slots,
        can_work: Callable[[], bool],
    ) -> None:
        """Create it before the signals start, because it listens for ready runs."""
        super().__init__()
        self._database = database
        self._settings = database.settings
        self._signals = signals
        self._graph_ids = list(graph_ids)
        self._lease = lease
        self._slots = slots
        self._can_work = can_work
        # The pool must have two more connections: one for everything else, and the one that sends hints.
        self._connection = KeptConnection(database, others=2, generic_plans=True)
        self._wake = asyncio.Event()
        self.timing = ClaimTiming(graph_ids, self.wake, self._ask_schedule_next)
        self.rate = ClaimRate()
        self.unexecuted = UnexecutedRuns(database, signals, slots.executing, self.wake, metrics)
        self._size = ClaimSize(self._settings.jobs)
        self._refused = RefusedRuns(metrics)
        # Whether more runs may be ready than the last claim had slots for. A run that becomes ready after a claim that
        # emptied the queue comes with a hint.
        self._more_ready = True
        # Whether the next claim asks the database what is due later. Hints may have been lost.
        self._ask_schedule = True
        # Which tenant was served last, and whether its turn is over.
        self._turn = NO_TURN
        # Tenants of which a run has ended here since the last claim: they may be below their limit again.
        self._freed_tenants: set[str] = set()
        signals.listen("work", self.timing.on_hint)

    def wake(self) -> None:
        """Claim soon."""
        self._wake.set()

    def wake_after(self, seconds: float) -> None:
        """Claim when a run is due that this worker has put back."""
        asyncio.get_running_loop().call_later(seconds + DUE_MARGIN_SECONDS, self.wake)

    def attempt_ended(self, run: ClaimedRun) -> None:
        """A slot is free. Claim if a run may wait for it. While hints are degraded claim always: nothing else wakes the
        loop."""
        if run.tenant_id:
            self._freed_tenants.add(run.tenant_id)
        if run.tenant_id or run.suspect or self._signals.degraded or self._more_ready:
            self.wake()

    async def _stop(self) -> None:
        await super()._stop()
        await self._connection.release()

    async def _run(self) -> None:
        backoff = Backoff("claim.outage", "claim.recovered")
        while True:
            worker_id = await self._lease.acquire()
            self._wake.clear()
            # Claim again if a slot becomes free during the claim, because the claim did not ask for that slot.
            self._more_ready = True
            free = self._settings.jobs - len(self._slots.executing())
            pause = self._settings.degraded_poll if self._signals.degraded else self._settings.poll_interval
            if self.unexecuted.is_due():
                await self.unexecuted.give_up(worker_id)
                if worker_id != self._lease.worker_id:
                    # The lease was lost while this waited for a connection.
                    continue
            if free > 0 and self._lease.held and self._can_work():
                try:
                    pause = min(pause, await self._claim(worker_id, free))
                except (psycopg.Error, OSError) as error:
                    # The claim may have been committed.
                    self.unexecuted.check_soon()
                    self._size.failed(error)
                    if not self._refused.failed(error):
                        await backoff.failed(error)
                    continue
                self._size.succeeded()
                self._refused.claimed()
                backoff.succeeded()
            else:
                pause = min(pause, UNABLE_POLL_SECONDS) if free > 0 else pause
                self.timing.skip_turns()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _claim(self, worker_id: UUID, free: int) -> float:
        """Claim ready runs and start them. Returns the seconds until the next claim, as far as that is known."""
        hints = self.timing.claim_started()
        began_ns = time.time_ns()
        wanted = self._size.of(free)
        runs, due = await self._take(worker_id, wanted, hints)
        tenants_left = self._turn.walking_since is not None
        emptied = len(runs) < wanted and not tenants_left
        self._more_ready = not emptied
        answered = self.timing.claim_finished(hints, emptied=emptied)
        self.rate.add(len(runs))
        for run in runs:
            self._publish_claim_event(run)
            self.unexecuted.claimed(run.run_id)
            if run.suspect:
                # After that, this worker may take another suspect.
                asyncio.get_running_loop().call_later(SUSPECT_SECONDS, self.wake)
            self._slots.start_attempt(worker_id, run, began_ns)
        if self.timing.others_wait:
            taken = [str(run.run_id) for run in runs]
            taken += [name for name in answered if name.startswith(ANONYMOUS_HINT)]
            announce_taken(self._signals, taken, max_delay=TAKEN_HINT_MAX_DELAY_SECONDS)
        if tenants_left or (wanted < free and not emptied):
            return NEXT_CLAIM_DELAY_SECONDS
        if due is None:
            return math.inf
        return due.after + DUE_MARGIN_SECONDS + self.timing.delay(str(due.run_id), due.graph_id)

    async def _take(self, worker_id: UUID, wanted: int, hints: list[str]) -> tuple[Claims, ReadyRun | None]:
        """Claim, and ask for what is due next if that is not known. Sets the turn."""
        due = None
        # A connection of the pool waits for an answer longer than the one that is kept.
        connect = self._database.connection if self._size.limited else self._connection.connection
        async with self._database.transaction() if self._refused.one_by_one else connect() as connection:
            # Tenants whose runs end during the claim are for the next one.
            freed, self._freed_tenants = self._freed_tenants, set()
            try:
                runs = await claim(
                    connection,
                    worker_id,
                    wanted,
                    self._graph_ids,
                    turn=self._turn,
                    max_running=self._settings.tenant_max_running,
                    tenants=list(freed),
                    hinted=run_ids_of(hints),
                    aside=self._refused.ids(),
                    look=self._refused.look,
                )
            except BaseException:
                self._freed_tenants |= freed
                raise
            self._turn = runs.turn
            if len(runs) < wanted and self._turn.walking_since is None and self._ask_schedule:
                due = await next_due(connection)
                # If nothing is scheduled now, a hint announces what is scheduled later, or the slow poll finds it.
                self._ask_schedule = due is not None or self._settings.session_url is None
        return runs, due

    def _publish_claim_event(self, run: ClaimedRun) -> None:
        """Publish the event that the claim has written to the thread's log."""
        flush = announcement_of(run)
        for hint in flush_hints(flush, self._signals.max_payload):
            delay = CLAIM_EVENT_HINT_MAX_DELAY_SECONDS
            self._signals.publish("events", hint, thread_id=flush.thread_id, max_delay=delay)

    def _ask_schedule_next(self) -> None:
        self._ask_schedule = True
