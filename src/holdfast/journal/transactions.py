"""The transactions of the journal. Each method of `Transactions` is one, and raises what made it fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.buffered_pipeline import buffered_pipeline
from holdfast.db.generic_plans import PlanRefresh
from holdfast.db.session_options import BEGIN, transaction_options
from holdfast.engine.outcome import Ended, RolledBack
from holdfast.engine.queue import LOCK_THREADS
from holdfast.engine.ready import ReadyRun
from holdfast.engine.usage import SharedUsage
from holdfast.errors import Cancelled, LeaseLost, RunSignal
from holdfast.journal.batch import RunState, last_event_number, lock_and_read, write_portions
from holdfast.journal.entries import Portion
from holdfast.journal.run_writer import Group, RunWriter
from holdfast.journal.session import JournalSession
from holdfast.settings import Settings

# How long the write of one run may wait for a lock. The other runs wait for that long, too.
SET_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '100ms'"


class CommitResult(NamedTuple):
    """What a commit has changed for others."""

    # The waiting runs that became ready.
    promoted: Sequence[ReadyRun] = ()
    # The time of the events. None if an earlier try may have written them.
    written_at: datetime | None = None
    # For runs that share budgets: what the other runs have used of each.
    shared_usage: Mapping[UUID, list[SharedUsage]] = {}


class Check(Enum):
    """What is to be done about one run of a batch."""

    HELD = "held"
    """Write it."""
    WRITTEN = "written"
    """An earlier try has written it."""


class Transactions:
    """Writes on the session of the journal. A transaction takes no longer than a lease."""

    def __init__(self, settings: Settings, session: JournalSession) -> None:
        self.began = 0.0
        """When the last one began, by `time.monotonic`."""
        self._settings = settings
        self._session = session
        self._plans = PlanRefresh()

    async def write(self, portions: list[Portion], *, repeat: bool, lock_limit: bool = False) -> CommitResult:
        """Write what runs handed in, in a pipeline: one round trip. Raises DivisionByZero if a run is not held under
        its fence. `repeat`: an earlier try may have been committed."""
        connection = await self._session.connection()
        async with asyncio.timeout(self._settings.lease):
            async with buffered_pipeline(connection):
                await self._begin(connection, lock_limit=lock_limit)
                written = await write_portions(connection, portions, verify=True, repeat=repeat)
                await connection.execute("COMMIT")
        return CommitResult(await written.ready(), await written.written_at(), await written.shared_usage())

    async def write_held(
        self, group: Group, *, repeat: bool, lock_limit: bool = False
    ) -> tuple[dict[RunWriter, RunSignal | Check], CommitResult]:
        """Check each run of a group, and write those that are held. Returns the result of each check."""
        connection = await self._session.connection()
        threads = sorted({item.portion.thread_id for item in group.values() if item.portion.touches_thread})
        result = CommitResult()
        async with asyncio.timeout(self._settings.lease):
            await self._begin(connection, lock_limit=lock_limit)
            if threads:
                await connection.execute(LOCK_THREADS, {"thread_ids": threads})
            parents = [item.portion.parent_to_wake for item in group.values()]
            locked = [writer.run_id for writer in group] + [parent for parent in parents if parent is not None]
            states = await lock_and_read(connection, locked)
            checks = {
                writer: check(item.portion, states.get(writer.run_id), repeat=repeat) for writer, item in group.items()
            }
            held = [group[writer].portion for writer, found in checks.items() if found is Check.HELD]
            if held:
                written = await write_portions(connection, held, verify=False, repeat=repeat)
                result = CommitResult(await written.ready(), None, await written.shared_usage())
            await connection.execute("COMMIT")
        return checks, result

    async def was_written(self, portion: Portion) -> RunSignal | bool:
        """Whether a commit that was not answered has happened, or the signal for its run. If it has not happened, it
        never will: `session.py` has ended the session that was to do it, unless that has the run's row locked, and
        then this waits and fails."""
        connection = await self._session.connection()
        async with asyncio.timeout(self._settings.lease):
            await self._begin(connection, lock_limit=True)
            states = await lock_and_read(connection, [portion.run_id])
            # A statement of its own: it sees what was committed while the one before waited for the lock.
            last = await last_event_number(connection, portion.thread_id)
            await connection.execute("COMMIT")
        found = check(portion, states.get(portion.run_id), repeat=True)
        if found is Check.HELD:
            return portion.first_seq <= portion.last_seq <= last
        return True if found is Check.WRITTEN else found

    async def _begin(self, connection: AsyncConnection[DictRow], *, lock_limit: bool) -> None:
        self.began = time.monotonic()
        behind_bouncer = self._settings.session_url is None
        await connection.execute(BEGIN if behind_bouncer else "BEGIN")
        await self._plans.before_transaction(connection)
        if behind_bouncer:
            await connection.execute(transaction_options(self._settings))
        if lock_limit:
            await connection.execute(SET_LOCK_TIMEOUT)


def check(portion: Portion, state: RunState | None, *, repeat: bool) -> RunSignal | Check:
    """Whether a run may write its portion, by the row of the run (None: it was deleted), or why not."""
    lost = LeaseLost(f"run {portion.run_id} is no longer held")
    if state is None:
        # Only the worker that holds a started run deletes it, with a rollback. That may be our own earlier try.
        return Check.WRITTEN if repeat and isinstance(portion.outcome, RolledBack) else lost
    if state.fence != portion.fence:
        return lost
    if state.status != "running":
        # The fence is ours, so our own earlier try has changed the status.
        return Check.WRITTEN if repeat and portion.outcome is not None else lost
    if isinstance(portion.outcome, Ended) and state.cancel_action == "rollback":
        return Cancelled("rollback")
    return Check.HELD
