"""Group commit: runs and threads that are requested together share a commit, and fail each by itself."""

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
from holdfast.engine.group_commit import GroupCommitter
from holdfast.engine.new_run import CreatedRun, NewRun, NewThread
from holdfast.engine.submit import AssistantChanged
from holdfast.errors import Conflict, NotFound
from tests.engine.scene import BROKEN_QUEUES, GRAPH, create
from tests.support.records import query

ASSISTANT = UUID(int=1)


class Counted(Database):
    """A pool that counts the group commits."""

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
def committer(counted: Counted) -> GroupCommitter:
    return GroupCommitter(counted)


def new_run(thread_id: UUID | None = None, **options: Any) -> NewRun:
    made = {"kwargs": {"input": {}}, "create_thread": True, **options}
    return NewRun(thread_id=thread_id or uuid4(), assistant_id=ASSISTANT, graph_id=GRAPH, **made)


async def test_concurrent_requests_share_commits(
    database: Database, counted: Counted, committer: GroupCommitter
) -> None:
    runs = [new_run(metadata={"number": number}) for number in range(40)]
    threads = [NewThread(uuid4(), {"number": number}) for number in range(40)]
    created = await asyncio.gather(*(committer.create_run(new) for new in runs))
    opened = await asyncio.gather(*(committer.create_thread(new) for new in threads))
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
    assert await committer.create_thread(threads[0]) is None, "it exists already"


async def test_large_runs_are_committed_in_small_groups(
    database: Database, counted: Counted, committer: GroupCommitter
) -> None:
    thread_id = uuid4()
    large: dict[str, Any] = {"kwargs": {"input": {"text": "x" * 1_500_000}}}
    runs = [new_run(**large) for _ in range(7)] + [new_run(thread_id, **large), new_run(thread_id)]
    created = await asyncio.gather(*(committer.create_run(new) for new in runs))
    assert counted.groups >= 4, "at most two of them have less than four million characters together"
    assert [one.ready for one in created] == [True] * 8 + [False], "the order of a thread's runs is kept"
    await committer.create_run(new_run(kwargs={"input": {"text": "x" * 5_000_000}}))


async def test_runs_of_one_thread_keep_their_order(database: Database, committer: GroupCommitter) -> None:
    thread_id = uuid4()
    created = await asyncio.gather(*(committer.create_run(new_run(thread_id)) for _ in range(10)))
    assert sorted(one.ready for one in created) == [False] * 9 + [True]
    assert await query(database, BROKEN_QUEUES) == []
    with pytest.raises(Conflict, match="'reject'"):
        await committer.create_run(new_run(thread_id, multitask_strategy="reject"))


async def test_refused_run_does_not_fail_its_group(database: Database, committer: GroupCommitter) -> None:
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
        *(committer.create_run(new) for new in asked), return_exceptions=True
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


async def test_locked_thread_delays_only_its_own_runs(database: Database, committer: GroupCommitter) -> None:
    held, free = uuid4(), uuid4()
    await committer.create_thread(NewThread(held, {}))
    async with database.transaction() as holding:
        await holding.execute(LOCK_OPEN_THREADS, {"thread_ids": [held]})
        waiting = asyncio.create_task(committer.create_run(new_run(held)))
        created = await committer.create_run(new_run(free))
        assert created.ready
        more = await asyncio.gather(*(committer.create_run(new_run()) for _ in range(5)))
        assert len(more) == 5
        assert not waiting.done()
    assert (await waiting).ready


async def test_thread_created_elsewhere_delays_only_itself(database: Database, committer: GroupCommitter) -> None:
    contested = NewThread(uuid4(), {})
    async with database.transaction() as creating:
        assert await create_thread(creating, contested) is not None
        waiting = asyncio.create_task(committer.create_thread(contested))
        assert await committer.create_thread(NewThread(uuid4(), {})) is not None
        assert not waiting.done()
    assert await waiting is None


async def test_cancelled_request_creates_nothing(database: Database, committer: GroupCommitter) -> None:
    first = asyncio.create_task(committer.create_run(new_run()))
    await asyncio.sleep(0)
    left = asyncio.create_task(committer.create_run(new_run()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    left.cancel()
    await first
    assert (await committer.create_run(new_run())).ready
    (stored,) = await query(database, "SELECT count(*) AS runs FROM run")
    assert stored["runs"] == 2
