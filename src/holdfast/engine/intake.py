"""What comes in at one process: threads and runs, committed in groups.

While one commit is under way, what arrives gathers, and is committed together by the next: at any load a process waits
for one commit at a time, and a run costs its share of a handful of statements. Alone, it costs one round trip.
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

# In one commit. More would keep the first of them waiting for the last.
MOST = 50
# Characters of JSON in one commit, unless one alone has more: each is copied several times on its way.
MOST_CHARACTERS = 4 * 1024 * 1024
OUTAGE = (psycopg.OperationalError, psycopg.InterfaceError, OSError)
CONTENTION = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
# A thread that somebody holds for longer must not keep those waiting who have nothing to do with it.
PATIENCE = "50ms"
TERMS = "SELECT " + ", ".join(
    f"set_config('{name}', '{value}', true)" for name, value in {"lock_timeout": PATIENCE, **GENERIC_PLANS}.items()
)


@dataclass(eq=False, slots=True)
class _Arrival:
    new: NewRun | NewThread
    size: int
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def thread_id(self) -> UUID:
        return self.new.thread_id

    def settle(self, answer: Any) -> None:
        """Give the answer to whoever waits, if they still do."""
        if self.answer.done():
            return
        if isinstance(answer, BaseException):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class Intake:
    """Creates what one process is asked to create. When a call returns, what it asked for is committed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._plans = PlanRefresh()
        self._arrived: list[_Arrival] = []
        self._working: asyncio.Task[None] | None = None
        self._alone: set[asyncio.Task[None]] = set()

    async def create_run(self, new: NewRun) -> CreatedRun:
        """As `submit.create_run`, together with others if it is groupable."""
        if not new.groupable:
            return await create_run(self._database, new)
        with traced(new) as run:
            created: CreatedRun = await self._arrive(run)
            return created

    async def create_thread(self, new: NewThread) -> DictRow | None:
        """Create a thread; None when it exists already."""
        row: DictRow | None = await self._arrive(new)
        return row

    async def _arrive(self, new: NewRun | NewThread) -> Any:
        arrival = _Arrival(new, new.size)
        self._arrived.append(arrival)
        if self._working is None:
            # In nobody's name: it goes on for others.
            self._working = asyncio.create_task(self._work(), name="intake", context=Context())
        return await arrival.answer

    async def _work(self) -> None:
        try:
            while group := self._next_group():
                try:
                    await self._commit(group)
                except BaseException as error:
                    for arrival in group:
                        arrival.settle(error)
                    if not isinstance(error, Exception):
                        raise
        finally:
            self._working = None
            for arrival in self._arrived:
                arrival.answer.cancel()

    def _next_group(self) -> list[_Arrival]:
        """Those who came first, one for each thread: of two runs of a thread, the second has to see the first."""
        group: dict[UUID, _Arrival] = {}
        later: list[_Arrival] = []
        waiting: set[UUID] = set()
        size = 0
        for arrival in self._arrived:
            if arrival.answer.done():
                continue  # Who asked has left.
            fits = len(group) < MOST and (not group or size + arrival.size <= MOST_CHARACTERS)
            # Not before an earlier one of its thread, which did not fit.
            if fits and arrival.thread_id not in group and arrival.thread_id not in waiting:
                group[arrival.thread_id] = arrival
                size += arrival.size
            else:
                later.append(arrival)
                waiting.add(arrival.thread_id)
        self._arrived = later
        return list(group.values())

    async def _commit(self, group: Sequence[_Arrival]) -> None:
        try:
            answers = await self._together(group)
        except Exception as error:
            if isinstance(error, OUTAGE) and not isinstance(error, CONTENTION):
                raise
            # One of them is at fault, or has to wait for somebody. That is nothing to the others and the next.
            for arrival in group:
                task = asyncio.create_task(self._create_alone(arrival))
                self._alone.add(task)
                task.add_done_callback(self._alone.discard)
        else:
            for arrival, answer in zip(group, answers, strict=True):
                arrival.settle(answer)

    async def _together(self, group: Sequence[_Arrival]) -> list[Any]:
        """One pipelined transaction: one round trip, whatever the number."""
        runs = [arrival.new for arrival in group if isinstance(arrival.new, NewRun)]
        threads = [arrival.new for arrival in group if isinstance(arrival.new, NewThread)]
        opened: AsyncCursor[DictRow] | None = None
        async with self._database.pipelined_transaction() as connection:
            await connection.execute(TERMS)
            await self._plans.use(connection)
            if threads:
                opened = await create_threads(connection, threads)
            written = await insert_groupable_runs(connection, runs) if runs else None
        rows = {} if opened is None else {row["thread_id"]: row for row in await opened.fetchall()}
        answers: list[Any] = []
        for arrival in group:
            if written is None or not isinstance(arrival.new, NewRun):
                answers.append(rows.get(arrival.thread_id))
                continue
            try:
                answers.append(await written.created(arrival.new))
            except Exception as refusal:
                answers.append(refusal)
        return answers

    async def _create_alone(self, arrival: _Arrival) -> None:
        """In a transaction of its own."""
        try:
            if isinstance(arrival.new, NewRun):
                arrival.settle(await commit_run(self._database, arrival.new))
            else:
                async with self._database.connection() as connection:
                    arrival.settle(await create_thread(connection, arrival.new))
        except Exception as error:
            arrival.settle(error)
