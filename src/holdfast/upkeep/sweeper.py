"""The duty that removes what has outlived its use, in small portions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from holdfast.db.connect import Database
from holdfast.errors import RequestError
from holdfast.graphs.checkpointer import CheckpointerSection
from holdfast.resources.history import count_old, prune_next
from holdfast.resources.pruning import keep_latest
from holdfast.upkeep.items import COUNT_ITEMS, SWEEP_ITEMS
from holdfast.upkeep.portions import MOMENT, Portion
from holdfast.upkeep.sweeps import (
    COUNT_EXPIRED,
    EXPIRED_HISTORIES,
    OFTEN,
    POSTPONE_ACTIVE,
    POSTPONE_PRUNED,
    SWEEP_EXPIRED,
    SWEEPS,
    Sweep,
)

log = structlog.get_logger(__name__)

# Seconds that all sweeps may take before the other duties have their turn.
BUDGET = 1.0
PRUNED_AT_ONCE = 50
# Seconds between two portions when somebody wants to be done with all of them.
BREATH = 0.01

CHECKPOINTS = "checkpoints"
EXPIRED_THREADS = "threads with a time to live"
PRUNED_THREADS = "threads' past states"
ITEMS = "store items"


@dataclass
class Chore:
    """One of the sweeps. `portion` does a little, notes what it removed, and says whether there may be more."""

    what: str
    portion: Callable[[], Awaitable[bool]]
    interval: float = OFTEN
    due: float = field(default=0.0)


class Sweeper:
    """Does each sweep once a minute, or every ten, and goes on with those that have more whenever it is called. Threads
    with a time to live of their own have an interval of their own.

    Safe to run in any number of processes, and to be killed at any time: each portion is a transaction, and whatever
    somebody else holds is passed over.
    """

    def __init__(self, database: Database, threads: CheckpointerSection | None = None, budget: float = BUDGET) -> None:
        self._database = database
        self._settings = database.settings
        self._threads = threads or CheckpointerSection()
        self._budget = budget
        self.removed: Counter[str] = Counter()
        """How many of what are gone."""
        self._chores = [
            *(Chore(sweep.what, self._sweeping(sweep), sweep.interval) for sweep in SWEEPS),
            Chore(EXPIRED_THREADS, self._expired_threads(), self._threads.sweep_interval),
            Chore(CHECKPOINTS, self._checkpoints),
        ]

    async def run(self) -> None:
        """A portion of everything that is due. What is not reached in time comes first when this is called again."""
        started = time.monotonic()
        before = self.removed.copy()
        due = [chore for chore in sorted(self._chores, key=lambda chore: chore.due) if chore.due <= started]
        for chore in due:
            more = await chore.portion()
            chore.due = time.monotonic() + (0.0 if more else chore.interval)
            if time.monotonic() - started >= self._budget:
                break
        if swept := self.removed - before:
            log.debug("upkeep.swept", **{what.replace(" ", "_"): number for what, number in swept.items()})

    async def finish(self) -> Counter[str]:
        """Do everything that is due, to the end, and say how much that was."""
        for chore in [*self._chores, Chore(ITEMS, self._items())]:
            await self._finish(chore)
        return self.removed

    async def _finish(self, chore: Chore) -> None:
        more = True
        while more:
            more = await chore.portion()
            await asyncio.sleep(BREATH if more else 0)

    async def count(self) -> Counter[str]:
        """How much `finish` would remove now."""
        counted: Counter[str] = Counter()
        async with self._database.connection() as connection:

            async def number(statement: str, parameters: dict[str, object]) -> int:
                row = await (await connection.execute(statement.encode(), parameters)).fetchone()
                return 0 if row is None else int(row["count"])

            for sweep in SWEEPS:
                if (parameters := sweep.parameters(self._settings)) is not None:
                    counted[sweep.what] = await number(sweep.due, parameters)
            counted[EXPIRED_THREADS] = await number(COUNT_EXPIRED, {"strategy": "delete"})
            counted[PRUNED_THREADS] = await number(COUNT_EXPIRED, {"strategy": "keep_latest"})
            counted[ITEMS] = await number(COUNT_ITEMS, {})
        if self._settings.checkpoint_ttl is not None:
            counted[CHECKPOINTS] = await count_old(self._database, self._settings.checkpoint_ttl)
        return counted

    def _sweeping(self, sweep: Sweep) -> Callable[[], Awaitable[bool]]:
        portion = Portion()

        async def sweeping() -> bool:
            parameters = sweep.parameters(self._settings)
            if parameters is None:
                return False
            started = time.monotonic()
            async with self._database.connection() as connection:
                cursor = await connection.execute(sweep.statement.encode(), {**parameters, "batch": portion.size})
                row = await cursor.fetchone() if sweep.counted else None
            swept = cursor.rowcount if row is None else int(row["count"])
            self.removed[sweep.what] += swept
            return portion.took(swept, time.monotonic() - started)

        return sweeping

    def _items(self) -> Callable[[], Awaitable[bool]]:
        portion = Portion()

        async def items() -> bool:
            started = time.monotonic()
            async with self._database.connection() as connection:
                swept = (await connection.execute(SWEEP_ITEMS, {"batch": portion.size})).rowcount
            self.removed[ITEMS] += swept
            return portion.took(swept, time.monotonic() - started)

        return items

    def _expired_threads(self) -> Callable[[], Awaitable[bool]]:
        limit = self._threads.sweep_limit
        active, expired = Portion(), Portion()

        async def expired_threads() -> bool:
            started = time.monotonic()
            async with self._database.connection() as connection:
                postponed = (await connection.execute(POSTPONE_ACTIVE, {"batch": active.size})).rowcount
                looked = time.monotonic()
                batch = expired.size if limit is None else min(limit, expired.size)
                deleted = (await connection.execute(SWEEP_EXPIRED, {"batch": batch})).rowcount
            self.removed[EXPIRED_THREADS] += deleted
            more = active.took(postponed, looked - started)
            more_expired = expired.took(deleted, time.monotonic() - looked)
            pruned = await self._prune(limit or PRUNED_AT_ONCE)
            # With a limit of their own they are done: it says how much one look may do.
            return more or (limit is None and (more_expired or pruned >= PRUNED_AT_ONCE))

        return expired_threads

    async def _prune(self, limit: int) -> int:
        """Threads whose history has expired, but not their state. Returns how many there were."""
        async with self._database.connection() as connection:
            cursor = await connection.execute(EXPIRED_HISTORIES, {"batch": limit})
            due = [row["thread_id"] for row in await cursor.fetchall()]
        for thread_id in due:
            try:
                self.removed[PRUNED_THREADS] += await keep_latest(self._database, thread_id)
            except RequestError as error:
                log.info("upkeep.not_pruned", thread_id=str(thread_id), reason=str(error))
            async with self._database.connection() as connection:
                await connection.execute(POSTPONE_PRUNED, {"thread_id": thread_id})
        return len(due)

    async def _checkpoints(self) -> bool:
        """The histories of as many threads as can be pruned in a moment: each is a transaction."""
        ttl = self._settings.checkpoint_ttl
        if ttl is None:
            return False
        started = time.monotonic()
        while time.monotonic() - started < MOMENT:
            pruned = await prune_next(self._database, ttl)
            if pruned is None:
                return False
            self.removed[CHECKPOINTS] += pruned.checkpoints
        return True
