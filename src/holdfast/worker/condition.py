"""Whether a worker can work: one answer for claiming, for probes, for `holdfast top` and for replacing the process.

A worker that cannot work must not claim: it would take runs from those that can, and keep them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from holdfast.db.connect import Database
from holdfast.journal.journal import Journal
from holdfast.lifecycle.service import TaskService
from holdfast.settings import Settings
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.threads import Attempted, NodeThreads
from holdfast.worker.watchdog import LoopWatchdog

log = structlog.get_logger(__name__)

# Seconds between two checks.
CHECK_SECONDS = 0.5
# Seconds that a plain node may wait for a thread before the worker claims nothing more.
THREAD_WAIT_SECONDS = 5.0
# The part of DATABASE_TIMEOUT that a task may wait for a connection of the pool before the worker claims nothing more.
POOL_WAIT_SHARE = 0.5
# Seconds that plain nodes may go on after their run has ended before they count as code that hangs.
ENDED_CALL_SECONDS = 30.0
# The part of the lease that must be left for the heartbeat to count as connected. It renews when two thirds are left.
RENEWED_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a worker cannot work. `lasting`: the process cannot recover and must be replaced."""

    reason: str
    lasting: bool = False


class Condition(TaskService):
    """Reports changes while it is started. `problem` may be called from any thread.

    `held`: the attempts that the worker executes. `recovered` is called when the worker can work again, and `replace`
    when it never will.
    """

    name = "condition"

    def __init__(
        self,
        settings: Settings,
        database: Database,
        heartbeat: Heartbeat,
        journal: Journal,
        watchdog: LoopWatchdog,
        threads: NodeThreads | None,
        held: Callable[[], Collection[Attempted]],
        recovered: Callable[[], None],
        replace: Callable[[], None],
    ) -> None:
        super().__init__()
        self._settings = settings
        self._database = database
        self._heartbeat = heartbeat
        self._journal = journal
        self._threads = threads
        self._held = held
        self._recovered = recovered
        self._replace = replace
        self._watchdog = watchdog
        # Since when the journal has had no session while the heartbeat has one and the worker holds runs.
        self._cut_off_since: float | None = None

    @property
    def blocked_too_long(self) -> bool:
        """Whether the event loop has been blocked for longer than the limit."""
        limit = self._settings.blocked_loop_limit
        return 0 < limit <= self._watchdog.blocked_for

    @property
    def journal_cut_off(self) -> bool:
        """Whether the journal has failed to connect for longer than a lease while the heartbeat renewed the lease. The
        worker's runs cannot be written then, and no other worker takes them over. Another process may get a session.

        It is false while the heartbeat cannot reach Postgres either: then the lease ends, and the worker waits. It is
        also false while the server refuses to write on the journal's session: a new process would be refused, too."""
        since = self._cut_off_since
        return since is not None and time.monotonic() - since > self._settings.lease

    def _check_journal(self) -> None:
        lease_left = self._heartbeat.deadline - time.monotonic()
        renewed = lease_left > RENEWED_SHARE * self._settings.lease
        if not (renewed and self._journal.session.unavailable and self._held()):
            self._cut_off_since = None
        elif self._cut_off_since is None:
            self._cut_off_since = time.monotonic()

    @property
    def blocked(self) -> tuple[int, float]:
        """How often the event loop has been blocked, and for how many seconds in all."""
        return self._watchdog.blocked_total, self._watchdog.blocked_seconds_total

    def holds(self, run_id: str | None) -> bool:
        """Whether the worker holds a run."""
        return any(run_id == held for held, _ in self._held())

    def problem(self) -> Problem | None:
        """The worst problem, or None: the worker can work."""
        return self._lasting() or self._passing()

    def reason(self) -> str | None:
        """The problem in words."""
        found = self.problem()
        return None if found is None else found.reason

    def _lasting(self) -> Problem | None:
        if self._heartbeat.ended:
            return Problem("the heartbeat has ended", lasting=True)
        if self._journal.failure is not None:
            return Problem("the journal has ended", lasting=True)
        if self.journal_cut_off:
            return Problem("the journal cannot connect", lasting=True)
        if self._watchdog.ended:
            return Problem("the watchdog of the event loop has ended", lasting=True)
        if self.blocked_too_long:
            return Problem("graph code has blocked the event loop for too long", lasting=True)
        if self._short_of_threads(ENDED_CALL_SECONDS):
            return Problem("code that hangs occupies the threads of plain nodes", lasting=True)
        return None

    def _short_of_threads(self, seconds: float = 0.0) -> bool:
        """Whether nodes whose runs ended `seconds` ago or earlier leave fewer threads than the worker has slots: each
        run may need a thread."""
        if self._threads is None:
            return False
        return self._threads.abandoned(self._held(), seconds) > self._threads.places - self._settings.jobs

    def _passing(self) -> Problem | None:
        if self._watchdog.blocked_for:
            return Problem("graph code blocks the event loop")
        if self._journal.session.unavailable or (self._journal.backoff.failing and self._journal.in_flight):
            return Problem("the journal cannot write")
        if self._short_of_threads():
            return Problem("nodes of runs that have ended occupy the threads of plain nodes")
        if self._threads is not None and self._threads.longest_wait() > THREAD_WAIT_SECONDS:
            return Problem("all threads of plain nodes are busy")
        if self._database.longest_wait() > POOL_WAIT_SHARE * self._settings.database_timeout:
            return Problem("all connections of its pool are in use")
        return None

    async def _run(self) -> None:
        known: Problem | None = None
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._check_journal()
            found = self.problem()
            if found == known:
                continue
            known = found
            if found is None:
                log.info("worker.able")
                self._recovered()
            else:
                log.warning("worker.unable", reason=found.reason, replaced=found.lasting)
                if found.lasting:
                    self._replace()
