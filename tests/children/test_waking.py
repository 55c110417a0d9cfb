"""Going to wait and being woken, one transaction at a time: every way in which a child can end, and every order in
which its end and the wait can meet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.children.families import HAS_FAMILY_WORK, OVERDUE, release_overdue
from holdfast.engine.children.spawn import ChildRequest, Parent, spawn_child
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.outcome import Ended, Outcome, RolledBack, Waiting
from holdfast.engine.reap import release_orphans
from holdfast.engine.states import RunStatus
from holdfast.engine.threads import delete_thread
from holdfast.engine.upcoming import next_due
from holdfast.errors import Cancelled, LeaseLost
from holdfast.insight.fleet import queue_figures, waits_for
from holdfast.journal.batch import write_portions
from holdfast.journal.entries import EndEffects, Portion
from holdfast.settings import Settings, load_settings
from tests.children.family import adopt, child, children_of, is_ready
from tests.engine.scene import (
    GRAPH,
    INTERRUPTED,
    SUCCESS,
    claim_runs,
    commit_held_up,
    create,
    declare_lost,
    online_worker,
    portion_of,
    somebody_waits,
)
from tests.support.catalogs import catalog_of
from tests.support.records import query, run_row, thread_row

FAILED = Ended(status=RunStatus.ERROR, thread_status="error", error={"error": "ValueError", "message": "no"})
PAUSED = Ended(
    status=RunStatus.SUCCESS, thread_status="interrupted", values=b"{}", interrupts={"t": [{"value": "well?"}]}
)


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, pool_max=8)


class Family:
    """A parent that runs, and children that run or can be claimed."""

    def __init__(self, database: Database, worker_id: UUID, parent: ClaimedRun) -> None:
        self.database = database
        self.worker_id = worker_id
        self.parent = parent

    @property
    def run_id(self) -> UUID:
        run_id: UUID = self.parent.run_id
        return run_id

    async def queued_child(self, key: str) -> DictRow:
        return (await adopt(self.database, self.run_id, key)).run

    async def child(self, key: str) -> ClaimedRun:
        await self.queued_child(key)
        [run] = await claim_runs(self.database, self.worker_id)
        return run

    async def wait(self, **awaited: bool) -> list[UUID]:
        return await self.write(self.parent, Waiting(awaited=awaited))

    async def write(self, run: ClaimedRun, outcome: Outcome) -> list[UUID]:
        """As the journal does. Returns the runs of which it would tell the workers."""
        async with self.database.transaction() as connection:
            written = await write_portions(connection, [portion(run, outcome)], verify=True, repeat=False)
            return [ready.run_id for ready in await written.ready()]

    async def status(self, key: str) -> Any:
        return {row["key"]: row["status"] for row in await children_of(self.database, self.run_id)}[key]


def portion(run: ClaimedRun, outcome: Outcome) -> Portion:
    return replace(portion_of(run, outcome), effects=EndEffects(parent=run.parent_run_id))


@pytest.fixture
async def family(database: Database) -> Family:
    worker_id = await online_worker(database)
    await create(database, uuid4())
    [parent] = await claim_runs(database, worker_id)
    return Family(database, worker_id, parent)


# --- the ways to end ----------------------------------------------------------------------------------


def writes(outcome: Outcome) -> Callable[[Family], Awaitable[str]]:
    async def end(family: Family) -> str:
        run = await family.child("a")
        await family.wait(a=False)
        await family.write(run, outcome)
        return "rolled_back" if isinstance(outcome, RolledBack) else str(getattr(outcome, "status", ""))

    return end


async def poisons(family: Family) -> str:
    await family.child("a")
    await family.wait(a=False)
    await declare_lost(family.database, family.worker_id)
    await release_orphans(family.database, max_crashes=1)
    return "error"


async def cancels(family: Family) -> str:
    run = await family.queued_child("a")
    await family.wait(a=False)
    cancelled = await cancel_runs(family.database, run["thread_id"], None, "interrupt")
    assert [row["run_id"] for row in cancelled.promoted] == [family.run_id]
    return "interrupted"


async def cancels_between_attempts(family: Family) -> str:
    run = await family.child("a")
    await family.wait(a=False)
    await declare_lost(family.database, family.worker_id)
    await release_orphans(family.database, max_crashes=9)
    await cancel_runs(family.database, run.thread_id, None, "interrupt")
    return "interrupted"


async def erases(family: Family) -> str:
    run = await family.queued_child("a")
    await family.wait(a=False)
    cancelled = await cancel_runs(family.database, run["thread_id"], None, "rollback")
    assert [row["run_id"] for row in cancelled.promoted] == [family.run_id]
    return "rolled_back"


async def deletes(family: Family) -> str:
    run = await family.child("a")
    await family.wait(a=False)
    await delete_thread(family.database, run.thread_id, EVERYTHING)
    return "deleted"


async def deletes_paused(family: Family) -> str:
    run = await family.child("a")
    await family.write(run, PAUSED)
    await family.wait(a=False)
    await query(family.database, "DELETE FROM thread WHERE thread_id = %s RETURNING 1", run.thread_id)
    return "deleted"


WAYS: dict[str, Callable[[Family], Awaitable[str]]] = {
    "success": writes(SUCCESS),
    "error": writes(FAILED),
    "interrupted": writes(INTERRUPTED),
    "rolled back": writes(RolledBack()),
    "poisoned": poisons,
    "cancelled before its start": cancels,
    "cancelled between attempts": cancels_between_attempts,
    "erased": erases,
    "deleted": deletes,
    "deleted while it was paused": deletes_paused,
}


@pytest.mark.parametrize("way", WAYS)
async def test_however_a_child_ends_its_parent_is_woken(family: Family, way: str) -> None:
    expected = await WAYS[way](family)
    assert await family.status("a") == expected
    assert await is_ready(family.database, family.run_id)
    row = await run_row(family.database, family.run_id)
    assert (row["status"], row["retries"], row["crashes"]) == ("pending", 0, 0)


async def test_a_child_that_pauses_has_not_ended(family: Family) -> None:
    run = await family.child("a")
    await family.wait(a=True)
    await family.write(run, PAUSED)
    assert await family.status("a") is None
    # Nor when somebody thought better of answering.
    answer = await create(family.database, run.thread_id)
    await cancel_runs(family.database, run.thread_id, [answer.run["run_id"]], "interrupt")
    assert (await thread_row(family.database, run.thread_id))["status"] == "interrupted"
    assert await family.status("a") is None
    assert not await is_ready(family.database, family.run_id)
    await create(family.database, run.thread_id)
    [answering] = await claim_runs(family.database, family.worker_id)
    await family.write(answering, SUCCESS)
    assert await family.status("a") == "success"
    assert await is_ready(family.database, family.run_id)


async def test_child_that_is_not_awaited_does_not_wake_its_parent(family: Family) -> None:
    first, second = await family.child("a"), await family.child("b")
    await family.child("c")
    await family.wait(a=False, c=False)
    await family.write(second, FAILED)
    assert not await is_ready(family.database, family.run_id)
    await family.write(first, FAILED)
    assert not await is_ready(family.database, family.run_id)


async def test_a_failure_is_enough_where_that_was_asked_for(family: Family) -> None:
    first = await family.child("a")
    await family.child("b")
    await family.wait(a=True, b=True)
    await family.write(first, FAILED)
    assert await is_ready(family.database, family.run_id)


async def test_end_of_a_child_returns_the_parents_it_wakes(family: Family) -> None:
    first, second = await family.child("a"), await family.child("b")
    assert await family.write(first, SUCCESS) == []
    assert await family.wait(a=False, b=False) == []
    assert await family.write(second, SUCCESS) == [family.run_id]
    [family.parent] = await claim_runs(family.database, family.worker_id)
    # There is nothing left to wait for.
    assert await family.wait(a=False, b=False) == [family.run_id]


async def test_child_of_an_earlier_wait_does_not_wake_its_parent(family: Family) -> None:
    first, second = await family.child("a"), await family.child("b")
    await family.child("c")
    await family.wait(a=True, c=True)
    await family.write(first, FAILED)
    [family.parent] = await claim_runs(family.database, family.worker_id)
    await family.wait(b=False)
    assert not await is_ready(family.database, family.run_id)
    await family.write(second, SUCCESS)
    assert await is_ready(family.database, family.run_id)


# --- the wait and the end meet ------------------------------------------------------------------------


async def test_an_end_that_comes_while_the_parent_goes_to_wait(family: Family) -> None:
    run = await family.child("a")
    async with commit_held_up(family.database, [portion(family.parent, Waiting(awaited={"a": False}))]):
        ending = asyncio.create_task(family.write(run, SUCCESS))
        await somebody_waits(family.database)
    await ending
    assert await is_ready(family.database, family.run_id)


async def test_a_wait_that_comes_while_the_child_ends(family: Family) -> None:
    run = await family.child("a")
    async with commit_held_up(family.database, [portion(run, SUCCESS)]):
        waiting = asyncio.create_task(family.wait(a=False))
        await somebody_waits(family.database)
    await waiting
    assert await is_ready(family.database, family.run_id)


@pytest.mark.parametrize("version", ["this", "older"])
async def test_parent_wakes_if_its_last_two_children_end_together(family: Family, version: str) -> None:
    first, second = await family.child("a"), await family.child("b")
    if version == "older":
        # A worker that knows nothing of parents.
        first, second = replace(first, parent_run_id=None), replace(second, parent_run_id=None)
    await family.wait(a=False, b=False)
    async with commit_held_up(family.database, [portion(first, SUCCESS)]):
        ending = asyncio.create_task(family.write(second, SUCCESS))
        await somebody_waits(family.database)
        assert not await is_ready(family.database, family.run_id)
    await ending
    assert await is_ready(family.database, family.run_id)


async def test_a_parent_cancelled_on_its_way_does_not_wait(family: Family) -> None:
    await family.child("a")
    cancelled = await cancel_runs(family.database, family.parent.thread_id, None, "interrupt")
    assert (len(cancelled.requested), cancelled.parents) == (1, [family.run_id])
    await family.wait(a=False)
    assert await is_ready(family.database, family.run_id)


# --- what others see of a wait ------------------------------------------------------------------------


async def test_a_wait_is_not_something_scheduled(family: Family) -> None:
    await family.child("a")
    await family.wait(a=False)
    async with family.database.connection() as connection:
        assert await next_due(connection) is None
        figures = await queue_figures(connection)
        assert (figures["ready"], figures["scheduled"], figures["waiting"]) == (0, 0, 1)
        assert await waits_for(connection, family.run_id, GRAPH) == "its children"
    assert await claim_runs(family.database, family.worker_id) == []


async def test_a_run_behind_a_waiting_one_goes_on_waiting(family: Family) -> None:
    await family.child("a")
    await family.wait(a=False)
    behind = await create(family.database, family.parent.thread_id)
    other = await create(family.database, family.parent.thread_id)
    await cancel_runs(family.database, family.parent.thread_id, [other.run["run_id"]], "interrupt")
    assert not behind.ready
    assert await claim_runs(family.database, family.worker_id) == []
    await cancel_runs(family.database, family.parent.thread_id, [family.run_id], "interrupt")
    assert [row.run_id for row in await claim_runs(family.database, family.worker_id)] == [behind.run["run_id"]]


@pytest.mark.parametrize("statement", [HAS_FAMILY_WORK, OVERDUE], ids=["look", "overdue"])
async def test_upkeep_reads_what_waits_and_not_the_queue(family: Family, statement: str) -> None:
    async with family.database.transaction() as connection:
        await connection.execute("SET LOCAL enable_seqscan = off")
        cursor = await connection.execute(f"EXPLAIN {statement}".encode(), {"timeout": 1.0, "aside": []})
        plan = "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())
    assert "run_waiting" in plan
    assert "run_ready" not in plan


@pytest.mark.parametrize("overdue", [True, False])
async def test_a_wait_ends_with_the_time_of_the_run(family: Family, overdue: bool) -> None:
    await family.child("a")
    await family.wait(a=False)
    released = await release_overdue(family.database, 0.0 if overdue else 3600.0)
    assert [run.run_id for run in released] == ([family.run_id] if overdue else [])
    assert await is_ready(family.database, family.run_id) is overdue


# --- who may spawn ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "signal"),
    [
        ("fence = fence + 1", LeaseLost),
        ("status = 'pending', worker_id = NULL", LeaseLost),
        ("cancel_action = 'interrupt'", Cancelled),
    ],
    ids=["taken over", "not running", "cancelled"],
)
async def test_worker_with_stale_fence_spawns_no_child(family: Family, change: str, signal: type[Exception]) -> None:
    catalog = catalog_of(child=child())
    await query(family.database, f"UPDATE run SET {change} WHERE run_id = %s RETURNING 1", family.run_id)
    request = ChildRequest(assistant="child", key="a", kwargs={"input": None, "config": {}, "context": None})
    with pytest.raises(signal):
        await spawn_child(family.database, catalog, Parent(run_id=family.run_id, fence=1), request)
    assert await query(family.database, "SELECT 1 FROM child") == []
    assert len(await query(family.database, "SELECT 1 FROM thread")) == 1
    assert len(await query(family.database, "SELECT 1 FROM run")) == 1
