"""Group commit: runs and threads that are requested while a commit is under way share the next one.

Each web process has at most one group commit under way. Under load a run costs its share of a few statements; alone,
it costs one round trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncCursor
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.generic_plans import GENERIC_PLANS, PlanRefresh
from holdfast.engine.create import create_thread, create_threads, insert_groupable_runs
from holdfast.engine.new_run import CreatedRun, NewRun, NewThread
from holdfast.engine.submit import commit_run, create_run, traced
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.lifecycle.service import Service

# Runs and threads in one commit. With more, the first of them would wait long for the last.
MAX_GROUP_SIZE = 50
# Characters of JSON in one commit, unless one run alone has more. The JSON is copied several times on its way.
MAX_GROUP_CHARACTERS = 4 * 1024 * 1024
# Seconds that `stop` waits for commits that are under way.
STOP_GRACE_SECONDS = 3.0
OUTAGE_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError, OSError)
LOCK_ERRORS = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
# A group whose thread is locked for longer is committed run by run, so that only the runs of that thread wait.
GROUP_LOCK_TIMEOUT = "50ms"
SET_OPTIONS = "SELECT " + ", ".join(
    f"set_config('{name}', '{value}', true)"
    for name, value in {"lock_timeout": GROUP_LOCK_TIMEOUT, **GENERIC_PLANS}.items()
)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A run or thread that is to be created, and the future that its caller awaits."""

    new: NewRun | NewThread
    size: int
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def thread_id(self) -> UUID:
        return self.new.thread_id

    def resolve(self, result: Any) -> None:
        """Set the result, or the exception, unless the caller was cancelled."""
        if self.result.done():
            return
        if isinstance(result, BaseException):
            self.result.set_exception(result)
        else:
            self.result.set_result(result)


class GroupCommitter(Service):
    """Creates the runs and threads that one process is asked for. When a call returns, they are committed. `stop` waits
    a little for commits that are under way."""

    name = "group-commit"

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database
        self._plans = PlanRefresh()
        self._waiting: list[_Waiting] = []
        self._committing: asyncio.Task[None] | None = None
        self._committing_alone: set[asyncio.Task[None]] = set()

    async def _start(self) -> None:
        """The first request begins a task."""

    async def _stop(self) -> None:
        tasks = {*self._committing_alone, *([self._committing] if self._committing is not None else [])}
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_GRACE_SECONDS)
        await cancel_all(tasks)

    async def create_run(self, new: NewRun) -> CreatedRun:
        """As `submit.create_run`, in a group if the run is groupable."""
        if not new.groupable:
            return await create_run(self._database, new)
        with traced(new) as run:
            created: CreatedRun = await self._create(run)
            return created

    async def create_thread(self, new: NewThread) -> DictRow | None:
        """Create a thread; None when it exists already."""
        row: DictRow | None = await self._create(new)
        return row

    async def _create(self, new: NewRun | NewThread) -> Any:
        waiting = _Waiting(new, new.size)
        self._waiting.append(waiting)
        if self._committing is None:
            # In an empty context: the task also serves later requests, and must not log or trace as this one.
            self._committing = asyncio.create_task(self._commit_all(), name="group-commit", context=Context())
        return await waiting.result

    async def _commit_all(self) -> None:
        try:
            while group := self._next_group():
                try:
                    await self._commit(group)
                except BaseException as error:
                    for waiting in group:
                        waiting.resolve(error)
                    if not isinstance(error, Exception):
                        raise
        finally:
            self._committing = None
            for waiting in self._waiting:
                waiting.result.cancel()

    def _next_group(self) -> list[_Waiting]:
        """Those that have waited longest, one of each thread: the second run of a thread must see the first."""
        group: dict[UUID, _Waiting] = {}
        later: list[_Waiting] = []
        later_threads: set[UUID] = set()
        size = 0
        for waiting in self._waiting:
            if waiting.result.done():
                continue  # The caller was cancelled.
            fits = len(group) < MAX_GROUP_SIZE and (not group or size + waiting.size <= MAX_GROUP_CHARACTERS)
            # Not before an earlier run of its thread that did not fit.
            if fits and waiting.thread_id not in group and waiting.thread_id not in later_threads:
                group[waiting.thread_id] = waiting
                size += waiting.size
            else:
                later.append(waiting)
                later_threads.add(waiting.thread_id)
        self._waiting = later
        return list(group.values())

    async def _commit(self, group: Sequence[_Waiting]) -> None:
        try:
            results = await self._commit_group(group)
        except Exception as error:
            if isinstance(error, OUTAGE_ERRORS) and not isinstance(error, LOCK_ERRORS):
                raise
            # The database refuses one of them, or its thread is locked. The others, and the next group, must neither
            # fail nor wait for that.
            for waiting in group:
                task = asyncio.create_task(self._commit_alone(waiting))
                self._committing_alone.add(task)
                task.add_done_callback(self._committing_alone.discard)
        else:
            for waiting, result in zip(group, results, strict=True):
                waiting.resolve(result)

    async def _commit_group(self, group: Sequence[_Waiting]) -> list[Any]:
        """Commit a group in one pipelined transaction, which costs one round trip. Returns a result for each."""
        runs = [waiting.new for waiting in group if isinstance(waiting.new, NewRun)]
        threads = [waiting.new for waiting in group if isinstance(waiting.new, NewThread)]
        created_threads: AsyncCursor[DictRow] | None = None
        async with self._database.pipelined_transaction() as connection:
            await connection.execute(SET_OPTIONS)
            await self._plans.before_transaction(connection)
            if threads:
                created_threads = await create_threads(connection, threads)
            inserted = await insert_groupable_runs(connection, runs) if runs else None
        rows = {} if created_threads is None else {row["thread_id"]: row for row in await created_threads.fetchall()}
        results: list[Any] = []
        for waiting in group:
            if inserted is None or not isinstance(waiting.new, NewRun):
                results.append(rows.get(waiting.thread_id))
                continue
            try:
                results.append(await inserted.created(waiting.new))
            except Exception as refusal:
                results.append(refusal)
        return results

    async def _commit_alone(self, waiting: _Waiting) -> None:
        try:
            if isinstance(waiting.new, NewRun):
                waiting.resolve(await commit_run(self._database, waiting.new))
            else:
                async with self._database.connection() as connection:
                    waiting.resolve(await create_thread(connection, waiting.new))
        except Exception as error:
            waiting.resolve(error)
