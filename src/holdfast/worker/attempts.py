"""The attempts that a worker executes at this moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import assert_never
from uuid import UUID

import orjson
import structlog

from holdfast.claiming.claim_loop import ClaimLoop
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.lease import CancelOrder
from holdfast.engine.outbox import announce_webhooks, has_webhook
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import CANCEL_ACTIONS
from holdfast.errors import Cancelled, Drained, LeaseLost, RunSignal
from holdfast.execution.attempt import Attempt
from holdfast.execution.executor import Executor
from holdfast.execution.finishing import finish_crashed
from holdfast.execution.traces import trace_attempt
from holdfast.journal.journal import Journal
from holdfast.journal.run_writer import RunWriter
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.lifecycle.service import Service
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.run_context import logging_run
from holdfast.worker.figures import count_claim, count_end
from holdfast.worker.lease import Lease
from holdfast.worker.threads import Attempted

log = structlog.get_logger(__name__)

# Seconds for attempts to end once they are stopped, and then for giving up the runs of those that do not.
ATTEMPTS_END_TIMEOUT_SECONDS = 5.0
GIVE_UP_TIMEOUT_SECONDS = 5.0
# Seconds between two tries to give up runs.
GIVE_UP_PAUSE_SECONDS = 0.1


class RunningAttempts(Service):
    """Executes the runs that the worker has claimed. `stop` drains: it waits the grace, then stops what is left and
    hands it back. `fail` makes it drop everything instead.

    `claims` is the claim loop, and `grace` returns how many seconds a drain may wait.
    """

    name = "attempts"

    def __init__(
        self,
        settings: Settings,
        executor: Executor,
        journal: Journal,
        signals: Signals,
        metrics: Metrics,
        lease: Lease,
        claims: Callable[[], ClaimLoop],
        grace: Callable[[], float],
    ) -> None:
        """To be made before the signals are started: it listens for cancels."""
        super().__init__()
        self._settings = settings
        self._executor = executor
        self._journal = journal
        self._signals = signals
        self._metrics = metrics
        self._lease = lease
        self._claims = claims
        self._grace = grace
        self._attempts: dict[UUID, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failing = False
        self.finished = 0
        """How many attempts have ended."""
        self.stop_timeout_seconds = (
            settings.drain_timeout + ATTEMPTS_END_TIMEOUT_SECONDS + GIVE_UP_TIMEOUT_SECONDS + 1.0
        )
        signals.listen("cancel", self._on_cancel_hint)

    def executing(self) -> Collection[UUID]:
        return self._attempts.keys()

    def held(self) -> set[Attempted]:
        """May be called from any thread."""
        return {(str(attempt.run.run_id), attempt.run.attempt) for attempt in list(self._attempts.values())}

    def start_attempt(self, worker_id: UUID, run: ClaimedRun, claim_began_ns: int) -> None:
        """Execute a run that the worker has claimed under this id."""
        writer = self._journal.open_writer(run.run_id, run.thread_id, run.fence, run.next_seq)
        writer.trace = trace_attempt(run, claim_began_ns)
        attempt = Attempt(run, writer, writer.trace)
        if run.suspect:
            # Once it has made progress, this worker may take another suspect.
            writer.on_progress = self._claims().wake
        self._attempts[run.run_id] = attempt
        if worker_id != self._lease.worker_id:
            attempt.stop(LeaseLost("the worker was declared lost while it claimed"))
        count_claim(self._metrics, run)
        task = asyncio.create_task(self._execute_logged(attempt), name=f"attempt {run.run_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, orders: Sequence[CancelOrder]) -> None:
        """Obey the cancels that came with a renewal."""
        for order in orders:
            attempt = self._attempts.get(order.run_id)
            if attempt is not None and attempt.run.fence == order.fence:
                attempt.stop(Cancelled(order.action))

    def drop_all(self, reason: str) -> int:
        """Stop all attempts without another write: their runs belong to other workers. Returns how many they are."""
        attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.stop(LeaseLost(reason))
        return len(attempts)

    def writer_failed(self, writer: RunWriter) -> None:
        """The journal can write nothing more for this run."""
        attempt = self._attempts.get(writer.run_id)
        if attempt is not None and attempt.writer is writer:
            assert isinstance(writer.failure, RunSignal)
            attempt.stop(writer.failure)

    def fail(self) -> None:
        """Drop everything at the stop, and hand nothing back: a part of the worker has ended by itself, perhaps because
        of one of these runs. When its lease ends, each of them counts a crash."""
        self._failing = True

    async def _start(self) -> None:
        """There is nothing to start before something is claimed."""

    async def _stop(self) -> None:
        if self._failing:
            self.drop_all("the worker has failed")
            await cancel_all(self._tasks)
            return
        if self._tasks:
            grace = self._grace()
            log.info("worker.draining", runs=len(self._tasks), grace=grace)
            await asyncio.wait(self._tasks, timeout=grace)
        for attempt in self._attempts.values():
            attempt.stop(Drained("the worker is shutting down"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ATTEMPTS_END_TIMEOUT_SECONDS)
        # The journal cannot write, or graph code does not stop. A worker that drains blames no run for its end.
        self.drop_all("the worker has given the run back")
        self._attempts.clear()
        if self._lease.worker_id is not None:
            # The runs of these attempts, and those of a claim that was interrupted. If this fails, the upkeep does it
            # once the worker has resigned.
            with suppress(TimeoutError):
                async with asyncio.timeout(GIVE_UP_TIMEOUT_SECONDS):
                    while not await self._claims().unexecuted.give_up(self._lease.worker_id):  # noqa: ASYNC110
                        await asyncio.sleep(GIVE_UP_PAUSE_SECONDS)

    async def _execute_logged(self, attempt: Attempt) -> None:
        # The task belongs to the attempt, so that all log lines below, and those of the graph's code, have its fields.
        with logging_run(**attempt.run.log_fields()):
            await self._execute(attempt)

    async def _execute(self, attempt: Attempt) -> None:
        run = attempt.run
        log.info("run.claimed", waited=round(run.waited, 3))
        began = time.monotonic()
        outcome: Outcome | None = None
        try:
            outcome = await self._executor.execute(attempt)
        except GRAPH_CODE_EXCEPTIONS as error:
            log.exception("run.crashed")
            # A retry that counts, so that the run comes to an end.
            outcome = await finish_crashed(attempt, error, self._settings)
            if outcome is None and not isinstance(attempt.writer.failure, LeaseLost):
                self._claims().unexecuted.disown_soon(run.run_id)
        finally:
            if self._attempts.get(run.run_id) is attempt:
                del self._attempts[run.run_id]
            self.finished += 1
            self._claims().attempt_ended(run)
        seconds = time.monotonic() - began
        count_end(self._metrics, run, outcome, seconds)
        self._follow_up(run, outcome)
        if outcome is not None:
            log.info("run.finished", outcome=_in_words(outcome), seconds=round(seconds, 3))

    def _follow_up(self, run: ClaimedRun, outcome: Outcome | None) -> None:
        if isinstance(outcome, Ended) and has_webhook(run.kwargs):
            announce_webhooks(self._signals)
        elif isinstance(outcome, Released) and outcome.after is not None:
            self._claims().wake_after(outcome.after)

    def _on_cancel_hint(self, payload: str | None) -> None:
        if payload is None:
            return
        with suppress(ValueError, KeyError, TypeError):
            order = orjson.loads(payload)
            attempt = self._attempts.get(UUID(order["run_id"]))
            if attempt is not None and order["action"] in CANCEL_ACTIONS:
                attempt.stop(Cancelled(order["action"]))


def _in_words(outcome: Outcome) -> str:
    match outcome:
        case Ended(status=status):
            return str(status)
        case Released(after=None):
            return "handed back"
        case Released():
            return "retry"
        case RolledBack():
            return "rolled back"
        case Waiting():
            return "waiting for its children"
        case _:
            assert_never(outcome)
