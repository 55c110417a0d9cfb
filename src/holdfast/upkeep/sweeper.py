"""The duty that removes rows whose time to live is over, in small batches."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import UUID

import structlog

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside
from holdfast.db.time_limit import TooSlow, time_limit
from holdfast.errors import RequestError
from holdfast.graphs.checkpointer import CheckpointerSection
from holdfast.lifecycle.backoff import Backoff
from holdfast.resources.history import MAX_CHECKPOINTS_PER_TRANSACTION, count_old, prune_next
from holdfast.resources.pruning import keep_latest
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.batch_size import LIMIT_TIMES, TARGET_SECONDS, BatchSize
from holdfast.upkeep.items import EXPIRED_ITEMS
from holdfast.upkeep.sweeping import Sweeping
from holdfast.upkeep.sweeps import (
    ACTIVE_THREADS,
    COUNT_HISTORIES,
    EXPIRED_HISTORIES,
    EXPIRED_THREADS,
    OFTEN,
    POSTPONE_PRUNED,
    SWEEPS,
    Sweep,
)

log = structlog.get_logger(__name__)

# Seconds that all sweeps may take before they pause, and how long they pause while there are more rows.
BUDGET_SECONDS = 1.0
PAUSE_SECONDS = 1.0
# Seconds until a sweep that fails is tried again: longer each time, at most this.
MAX_RETRY_SECONDS = 300.0
PRUNE_BATCH_THREADS = 50
# Seconds between two batches when `finish` removes everything, and how many of them may fail in a row.
FINISH_PAUSE_SECONDS = 0.01
MAX_FAILURES_IN_A_ROW = 10

CHECKPOINTS = "checkpoints"
PRUNED_THREADS = "threads' past states"


@dataclass
class Chore:
    """One of the sweeps. `portion` does a little within the seconds that it is given, if any, notes what it removed,
    and says whether there may be more. When it fails, the next portion is smaller, or passes over what cannot be
    removed."""

    what: str
    portion: Callable[[float | None], Awaitable[bool]]
    interval: float = OFTEN
    due: float = 0.0
    backoff: Backoff = field(init=False)

    def __post_init__(self) -> None:
        about = {"duty": f"sweep of {self.what}"}
        self.backoff = Backoff(
            "upkeep.duty_failing", "upkeep.duty_recovered", base=2.5, cap=MAX_RETRY_SECONDS, about=about
        )


class Sweeper:
    """Does each sweep once a minute, or every ten, and goes on with those that have more whenever it is called. Threads
    with a time to live of their own have an interval of their own.

    It may run in any number of processes, and may be killed at any time: each batch is a transaction, and skips
    rows that are locked.
    """

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        threads: CheckpointerSection | None = None,
        budget: float = BUDGET_SECONDS,
    ) -> None:
        self._database = database
        self._metrics = metrics
        self._settings = database.settings
        self._threads = threads or CheckpointerSection()
        self._budget = budget
        self._limit = LIMIT_TIMES * database.settings.database_timeout
        self._aside = RowsSetAside("sweeps", "thread_id", metrics)
        self._checkpoints_at_once = BatchSize(
            first=MAX_CHECKPOINTS_PER_TRANSACTION, most=MAX_CHECKPOINTS_PER_TRANSACTION
        )
        self.removed: Counter[str] = Counter()
        """How many of what are gone."""
        self._chores = [
            *(Chore(sweep.what, self._sweeping(sweep), sweep.interval) for sweep in SWEEPS),
            *self._threads_with_ttl(),
            Chore(CHECKPOINTS, self._checkpoints),
        ]
        # The leader has a duty for them.
        self._items = Chore(EXPIRED_ITEMS.what, self._sweeping(EXPIRED_ITEMS))

    async def run(self) -> float:
        """A portion of everything that is due. What is not reached in time comes first when this is called again.
        Returns the seconds until then. A sweep that fails, or waits for a lock, is tried again later: it does not keep
        the others from being done."""
        started = time.monotonic()
        before = self.removed.copy()
        due = [chore for chore in sorted(self._chores, key=lambda chore: chore.due) if chore.due <= started]
        for chore in due:
            await self._do(chore)
            if time.monotonic() - started >= self._budget:
                break
        if swept := self.removed - before:
            log.debug("upkeep.swept", **{what.replace(" ", "_"): number for what, number in swept.items()})

        return max(PAUSE_SECONDS, min(chore.due for chore in self._chores) - time.monotonic())

    async def _do(self, chore: Chore) -> None:
        try:
            async with asyncio.timeout(3 * self._settings.database_timeout):
                more = await chore.portion(self._limit)
        except Exception as error:
            if is_outage(error) and not isinstance(error, TimeoutError):
                raise
            chore.due = time.monotonic() + chore.backoff.record_failure(error)
        else:
            chore.backoff.succeeded()
            chore.due = time.monotonic() + (0.0 if more else chore.interval)

    async def finish(self) -> Counter[str]:
        """Do everything that is due, to the end, and say how much that was. What cannot be removed is set aside.

        A chore that fails again and again keeps no other from being done. Raises the first error when all are done, or
        at once when the database is away.
        """
        failed: Exception | None = None
        for chore in [*self._chores, self._items]:
            try:
                await self._finish(chore)
            except Exception as error:
                if is_outage(error):
                    raise
                chore.backoff.record_failure(error)
                failed = failed or error
        if failed is not None:
            raise failed
        return self.removed

    async def _finish(self, chore: Chore) -> None:
        more, failures = True, 0
        while more:
            try:
                more, failures = await chore.portion(None), 0
            except Exception as error:
                failures += 1
                if is_outage(error) or failures > MAX_FAILURES_IN_A_ROW:
                    raise
            await asyncio.sleep(FINISH_PAUSE_SECONDS if more else 0)

    async def count(self) -> Counter[str]:
        """How much `finish` would remove now."""
        counted: Counter[str] = Counter()
        async with self._database.connection() as connection:

            async def number(statement: str, parameters: dict[str, object]) -> int:
                row = await (await connection.execute(statement.encode(), parameters)).fetchone()
                return 0 if row is None else int(row["count"])

            for sweep in (*SWEEPS, EXPIRED_THREADS, EXPIRED_ITEMS):
                if (parameters := sweep.parameters(self._settings)) is not None:
                    counted[sweep.what] = await number(sweep.due, parameters)
            counted[PRUNED_THREADS] = await number(COUNT_HISTORIES, {})
        if self._settings.checkpoint_ttl is not None:
            counted[CHECKPOINTS] = await count_old(self._database, self._settings.checkpoint_ttl)
        return counted

    def _sweeping(
        self, sweep: Sweep, *, removes: bool = True, limit: int | None = None
    ) -> Callable[[float | None], Awaitable[bool]]:
        """`removes`: whether what it takes is gone then. `limit`: how much one look may take."""
        sweeping = Sweeping(self._database, self._metrics, sweep, limit=limit)

        async def portion(seconds: float | None) -> bool:
            swept, more = await sweeping.take(seconds)
            if removes:
                self.removed[sweep.what] += swept
            return more

        return portion

    def _threads_with_ttl(self) -> list[Chore]:
        """Threads with a time to live of their own, as langgraph.json says how often and how many."""
        interval, limit = self._threads.sweep_interval, self._threads.sweep_limit
        return [
            Chore(ACTIVE_THREADS.what, self._sweeping(ACTIVE_THREADS, removes=False), interval),
            Chore(EXPIRED_THREADS.what, self._sweeping(EXPIRED_THREADS, limit=limit), interval),
            Chore(PRUNED_THREADS, self._expired_histories, interval),
        ]

    async def _expired_histories(self, seconds: float | None) -> bool:
        """Threads whose history has expired, but not their state."""
        limit = self._threads.sweep_limit
        given = {"batch": limit or PRUNE_BATCH_THREADS, "aside": self._aside.ids()}
        async with self._database.connection() as connection:
            cursor = await connection.execute(EXPIRED_HISTORIES.encode(), given)
            due = await cursor.fetchall()
        for row in due:
            try:
                async with time_limit(self._database, seconds):
                    await self._forget_history(row["thread_id"])
            except Exception as error:
                if is_outage(error):
                    raise
                self._aside.put(row, error)
        # With a limit of their own they are done: it says how much one look may do.
        return limit is None and len(due) >= PRUNE_BATCH_THREADS

    async def _forget_history(self, thread_id: UUID) -> None:
        try:
            self.removed[PRUNED_THREADS] += await keep_latest(self._database, thread_id)
        except RequestError as error:
            log.info("upkeep.not_pruned", thread_id=str(thread_id), reason=str(error))
        async with self._database.connection() as connection:
            await connection.execute(POSTPONE_PRUNED, {"thread_id": thread_id})

    async def _checkpoints(self, seconds: float | None) -> bool:
        """The histories of as many threads as can be pruned in a moment: each is a transaction."""
        ttl = self._settings.checkpoint_ttl
        if ttl is None:
            return False
        started, portion = time.monotonic(), self._checkpoints_at_once
        while time.monotonic() - started < TARGET_SECONDS:
            try:
                pruned = await prune_next(self._database, ttl, self._aside, at_once=portion.size, seconds=seconds)
            except TooSlow:
                portion.failed()
                raise
            if pruned is None:
                return False
            # Not by the time that it took: to read a long history takes as long, however little of it is deleted.
            portion.succeeded()
            self.removed[CHECKPOINTS] += pruned.checkpoints
        return True
