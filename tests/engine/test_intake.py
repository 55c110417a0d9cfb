"""Runs and threads that come in together: committed together, and nothing to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.create import LOCK_OPEN_THREADS, create_thread
from holdfast.engine.intake import Intake
from holdfast.engine.new_run import CreatedRun, NewRun, NewThread
from holdfast.engine.submit import AssistantChanged
from holdfast.errors import Conflict, NotFound
from tests.engine.scene import BROKEN_QUEUES, GRAPH, create
from tests.support.records import query

ASSISTANT = UUID(int=1)


class Counted(Database):
    """A pool that counts the groups that were committed."""

    def __init__(self, database: Database) -> None:
        self.settings = database.settings
        self._pool = database.pool
        self._scope = None
        self.groups = 0

    @asynccontextmanager
    async def pipelined_transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        self.groups += 1
        async with super().pipelined_transaction() as connection:
            yield connection


@pytest.fixture
def counted(database: Database) -> Counted:
    return Counted(database)


@pytest.fixture
def intake(counted: Counted) -> Intake:
    return Intake(counted)


def new_run(thread_id: UUID | None = None, **options: Any) -> NewRun:
    made = {"kwargs": {"input": {}}, "create_thread": True, **options}
    return NewRun(thread_id=thread_id or uuid4(), assistant_id=ASSISTANT, graph_id=GRAPH, **made)


async def test_what_comes_in_together_is_committed_together(
    database: Database, counted: Counted, intake: Intake
) -> None:
    runs = [new_run(metadata={"number": number}) for number in range(40)]
    threads = [NewThread(uuid4(), {"number": number}) for number in range(40)]
    created = await asyncio.gather(*(intake.create_run(new) for new in runs))
    opened = await asyncio.gather(*(intake.create_thread(new) for new in threads))
    # The first, and what had come when it was done.
    assert counted.groups <= 4
    assert [(one.run["run_id"], one.run["metadata"]["number"], one.ready) for one in created] == [
        (new.run_id, number, True) for number, new in enumerate(runs)
    ]
    assert [(row["thread_id"], row["metadata"]) for row in opened if row] == [
        (new.thread_id, new.metadata) for new in threads
    ]
    (stored,) = await query(database, "SELECT count(*) AS runs FROM run WHERE status = 'pending'")
    assert stored["runs"] == 40
    assert await intake.create_thread(threads[0]) is None, "it exists already"


async def test_large_runs_are_committed_in_small_groups(database: Database, counted: Counted, intake: Intake) -> None:
    thread_id = uuid4()
    large: dict[str, Any] = {"kwargs": {"input": {"text": "x" * 1_500_000}}}
    runs = [new_run(**large) for _ in range(7)] + [new_run(thread_id, **large), new_run(thread_id)]
    created = await asyncio.gather(*(intake.create_run(new) for new in runs))
    assert counted.groups >= 4, "at most two of them have less than four million characters together"
    assert [one.ready for one in created] == [True] * 8 + [False], "the order of a thread's runs is kept"
    await intake.create_run(new_run(kwargs={"input": {"text": "x" * 5_000_000}}))


async def test_of_two_runs_of_a_thread_the_second_sees_the_first(database: Database, intake: Intake) -> None:
    thread_id = uuid4()
    created = await asyncio.gather(*(intake.create_run(new_run(thread_id)) for _ in range(10)))
    assert sorted(one.ready for one in created) == [False] * 9 + [True]
    assert await query(database, BROKEN_QUEUES) == []
    with pytest.raises(Conflict, match="'reject'"):
        await intake.create_run(new_run(thread_id, multitask_strategy="reject"))


async def test_what_cannot_be_created_is_nothing_to_the_others(database: Database, intake: Intake) -> None:
    busy, missing = uuid4(), uuid4()
    await create(database, busy)
    asked = [
        new_run(),
        new_run(metadata={"nul": "\0"}),
        new_run(busy, multitask_strategy="reject"),
        new_run(missing, create_thread=False),
        new_run(assistant_updated_at=datetime(2020, 1, 1, tzinfo=UTC)),
        new_run(),
    ]
    first, nul, reject, lost, changed, last = await asyncio.gather(
        *(intake.create_run(new) for new in asked), return_exceptions=True
    )
    assert isinstance(first, CreatedRun)
    assert isinstance(last, CreatedRun)
    assert isinstance(reject, Conflict)
    assert isinstance(lost, NotFound)
    assert isinstance(changed, AssistantChanged)
    assert isinstance(nul, Exception)
    assert "\\u0000" in str(nul)
    found = await query(database, "SELECT run_id FROM run WHERE thread_id <> %s ORDER BY run_id", busy)
    assert [row["run_id"] for row in found] == sorted([asked[0].run_id, asked[-1].run_id])
    threads = await query(database, "SELECT thread_id FROM thread ORDER BY thread_id")
    assert [row["thread_id"] for row in threads] == sorted([busy, asked[0].thread_id, asked[-1].thread_id])


async def test_nobody_waits_for_a_thread_that_is_not_theirs(database: Database, intake: Intake) -> None:
    held, free = uuid4(), uuid4()
    await intake.create_thread(NewThread(held, {}))
    async with database.transaction() as holding:
        await holding.execute(LOCK_OPEN_THREADS, {"thread_ids": [held]})
        waiting = asyncio.create_task(intake.create_run(new_run(held)))
        created = await intake.create_run(new_run(free))
        assert created.ready
        more = await asyncio.gather(*(intake.create_run(new_run()) for _ in range(5)))
        assert len(more) == 5
        assert not waiting.done()
    assert (await waiting).ready


async def test_nor_for_a_thread_that_is_being_created_elsewhere(database: Database, intake: Intake) -> None:
    contested = NewThread(uuid4(), {})
    async with database.transaction() as creating:
        assert await create_thread(creating, contested) is not None
        waiting = asyncio.create_task(intake.create_thread(contested))
        assert await intake.create_thread(NewThread(uuid4(), {})) is not None
        assert not waiting.done()
    assert await waiting is None


async def test_who_has_left_gets_nothing(database: Database, intake: Intake) -> None:
    first = asyncio.create_task(intake.create_run(new_run()))
    await asyncio.sleep(0)
    left = asyncio.create_task(intake.create_run(new_run()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    left.cancel()
    await first
    assert (await intake.create_run(new_run())).ready
    (stored,) = await query(database, "SELECT count(*) AS runs FROM run")
    assert stored["runs"] == 2
