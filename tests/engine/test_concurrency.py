"""Operations that meet: whoever comes first, the queue stays true and nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import random
from uuid import UUID, uuid4

import pytest
from uuid_utils.compat import uuid7

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.claim import claim
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.create import LOCK_LATER_HEADS, LOCK_OPEN_THREADS
from holdfast.engine.outcome import RolledBack
from holdfast.engine.states import CancelAction
from holdfast.engine.threads import delete_thread
from holdfast.errors import Cancelled, NotFound, RunSignal
from holdfast.journal.journal import Journal
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import Settings
from tests.engine.scene import (
    BROKEN_QUEUES,
    GRAPH,
    SUCCESS,
    claim_runs,
    commit_held_up,
    create,
    exists,
    online_worker,
    open_journal,
    portion_of,
    put_checkpoint,
    somebody_waits,
    unfinished,
    writer_of,
)
from tests.support.records import query, run_row, thread_events, thread_row


async def test_runs_created_at_once_form_one_queue(database: Database) -> None:
    thread_id = uuid4()
    await create(database, thread_id)
    await cancel_runs(database, thread_id, None, "rollback")
    created = await asyncio.gather(*(create(database, thread_id) for _ in range(14)))
    rows = await unfinished(database, thread_id)
    assert [row["ready_at"] is not None for row in rows] == [True] + [False] * 13
    assert [one.run["run_id"] for one in created if one.ready] == [rows[0]["run_id"]]


@pytest.mark.parametrize("strategy", ["interrupt", "rollback"])
async def test_of_runs_that_replace_each_other_one_is_left(database: Database, strategy: str) -> None:
    thread_id = uuid4()
    created = await asyncio.gather(*(create(database, thread_id, multitask_strategy=strategy) for _ in range(14)))
    left = await unfinished(database, thread_id)
    assert len(left) == 1
    assert left[0]["ready_at"] is not None
    replaced = {run_id for one in created for run_id in one.cancelled.ended}
    assert replaced == {one.run["run_id"] for one in created} - {left[0]["run_id"]}


async def test_of_runs_that_reject_each_other_one_is_accepted(database: Database) -> None:
    thread_id = uuid4()
    results = await asyncio.gather(
        *(create(database, thread_id, multitask_strategy="reject") for _ in range(14)), return_exceptions=True
    )
    assert len([result for result in results if not isinstance(result, BaseException)]) == 1
    assert len(await unfinished(database, thread_id)) == 1


async def test_no_run_is_claimed_twice_and_no_thread_has_two(database: Database) -> None:
    threads = [uuid4() for _ in range(40)]
    await asyncio.gather(*(create(database, thread_id) for thread_id in threads for _ in range(3)))
    workers = [await online_worker(database) for _ in range(12)]

    async def take_all(worker_id: UUID) -> list[UUID]:
        taken = []
        while rows := await claim_runs(database, worker_id, random.randint(1, 3)):
            taken += [row.thread_id for row in rows]
        return taken

    taken = [thread_id for found in await asyncio.gather(*map(take_all, workers)) for thread_id in found]
    assert sorted(taken) == sorted(threads)
    assert not await query(database, BROKEN_QUEUES)


async def test_several_workers_execute_every_run_once_and_in_order(database: Database, settings: Settings) -> None:
    threads = [uuid4() for _ in range(25)]
    await asyncio.gather(*(create(database, thread_id) for thread_id in threads for _ in range(4)))
    left = 100

    async def work(journal: Journal, worker_id: UUID) -> None:
        nonlocal left

        async def execute(run: ClaimedRun) -> None:
            nonlocal left
            writer = writer_of(journal, run)
            writer.add_event("values", b"{}")
            await writer.flush()
            await writer.finish(SUCCESS)
            left -= 1

        while left:
            await asyncio.gather(*map(execute, await claim_runs(database, worker_id, 4)))

    async with open_journal(settings) as first, open_journal(settings) as second, open_journal(settings) as third:
        await asyncio.gather(*[work(journal, await online_worker(database)) for journal in (first, second, third)])
    rows = await query(database, "SELECT * FROM run ORDER BY thread_id, created_at, run_id")
    assert {(row["status"], row["fence"], row["attempt"]) for row in rows} == {("success", 1, 1)}
    for thread_id in threads:
        started = [row["first_seq"] for row in rows if row["thread_id"] == thread_id]
        assert started == [1, 4, 7, 10], "in order, and each after the end of the one before"
        assert len(await thread_events(database, thread_id)) == 12
        assert (await thread_row(database, thread_id))["status"] == "idle"


# --- a head that is scheduled for later ---------------------------------------------------------------


async def scheduled_head_that_is_claimable(database: Database, thread_id: UUID) -> UUID:
    """A head scheduled for later, at the very moment when it becomes due: before it for a creation that has just read
    the clock, after it for the claim that comes next."""
    head = await create(database, thread_id, after_seconds=3600)
    await query(
        database,
        "UPDATE run SET ready_at = now() - interval '1 second' WHERE run_id = %s RETURNING run_id",
        head.run["run_id"],
    )
    return head.run["run_id"]  # type: ignore[no-any-return]


async def test_a_scheduled_head_that_is_being_claimed_stays_the_head(database: Database) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    head = await scheduled_head_that_is_claimable(database, thread_id)
    async with database.transaction() as claiming:
        assert [row.run_id for row in await claim(claiming, worker_id, 10, [GRAPH])] == [head]
        creating = asyncio.create_task(create(database, thread_id))
        await somebody_waits(database)
    assert not (await creating).ready
    heads = [row["run_id"] for row in await unfinished(database, thread_id) if row["ready_at"] is not None]
    assert heads == [head]


async def test_a_scheduled_head_that_is_stepping_back_cannot_be_claimed(database: Database) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await scheduled_head_that_is_claimable(database, thread_id)
    async with database.transaction() as creating:
        parameters = {"thread_ids": [thread_id], "afters": [0.0]}
        await creating.execute(LOCK_OPEN_THREADS, parameters)
        await creating.execute(LOCK_LATER_HEADS, parameters)
        assert await claim_runs(database, worker_id) == []


async def test_a_run_created_in_the_moment_another_becomes_due(database: Database) -> None:
    """However the two fall, the thread has one head, and it is the earlier run."""
    for _ in range(150):
        thread_id = uuid4()
        await create(database, thread_id, after_seconds=random.uniform(0.0, 0.008))
        await create(database, thread_id)
    assert await query(database, BROKEN_QUEUES) == []


async def test_an_earlier_run_goes_first(database: Database) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    tomorrow = await create(database, thread_id, after_seconds=86_400)
    assert tomorrow.ready
    soon = await create(database, thread_id, after_seconds=3600)
    now = await create(database, thread_id)
    assert soon.ready
    assert now.ready
    order = [row["run_id"] for row in await unfinished(database, thread_id)]
    assert order == [now.run["run_id"], soon.run["run_id"], tomorrow.run["run_id"]]
    assert not await query(database, BROKEN_QUEUES)
    assert [row.run_id for row in await claim_runs(database, worker_id)] == [now.run["run_id"]]


# --- cancelling and finishing -------------------------------------------------------------------------


async def test_a_cancel_that_comes_during_the_end_is_too_late(database: Database) -> None:
    thread_id = uuid4()
    await create(database, thread_id)
    [run] = await claim_runs(database, await online_worker(database))
    async with commit_held_up(database, [portion_of(run, SUCCESS)]):
        cancelling = asyncio.create_task(cancel_runs(database, thread_id, None, "rollback"))
        await somebody_waits(database)
    cancelled = await cancelling
    assert (cancelled.ended, cancelled.requested) == ([], [])
    row = await run_row(database, run.run_id)
    assert (row["status"], row["cancel_action"]) == ("success", None)


@pytest.mark.parametrize("action", ["interrupt", "rollback"])
async def test_cancelling_the_head_while_a_run_is_queued_behind_it(database: Database, action: CancelAction) -> None:
    """Whoever comes first, the new run does not wait for one that is gone."""
    for _ in range(40):
        thread_id = uuid4()
        head = await create(database, thread_id)
        await asyncio.gather(
            create(database, thread_id), cancel_runs(database, thread_id, [head.run["run_id"]], action)
        )
    assert not await query(database, BROKEN_QUEUES)
    assert not await query(database, "SELECT 1 FROM thread WHERE status <> 'busy'")


async def test_a_cancel_and_a_claim_of_the_same_run(database: Database) -> None:
    """The cancel waits for a claim under way, and leaves the end to the owner."""
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    async with database.transaction() as claiming:
        [run] = await claim(claiming, worker_id, 10, [GRAPH])
        cancelling = asyncio.create_task(cancel_runs(database, thread_id, None, "interrupt"))
        await somebody_waits(database)
    cancelled = await cancelling
    assert cancelled.ended == []
    assert [(row["run_id"], row["worker_id"]) for row in cancelled.requested] == [(run.run_id, worker_id)]
    row = await run_row(database, run.run_id)
    assert (row["status"], row["cancel_action"]) == ("running", "interrupt")


async def finish_soon(writer: RunWriter) -> RunSignal | None:
    await asyncio.sleep(random.uniform(0.0, 0.003))
    try:
        await writer.finish(SUCCESS)
    except RunSignal as signal:
        return signal
    return None


@pytest.mark.parametrize("action", ["interrupt", "rollback"])
async def test_cancels_race_ends(database: Database, settings: Settings, action: CancelAction) -> None:
    """Whoever wins: a rollback that was promised happens, and one that was refused does not."""
    worker_id = await online_worker(database)
    promised = 0
    async with open_journal(settings) as journal:
        for _ in range(30):
            thread_id = uuid4()
            await create(database, thread_id)
            [run] = await claim_runs(database, worker_id)
            writer = writer_of(journal, run)
            put_checkpoint(writer)
            await writer.flush()

            signal, cancelled = await asyncio.gather(
                finish_soon(writer),
                cancel_runs(database, thread_id, None, action),
            )
            if action == "interrupt" or not cancelled.requested:
                assert signal is None
                assert (await run_row(database, run.run_id))["status"] == "success"
                continue
            promised += 1
            assert isinstance(signal, Cancelled)
            assert signal.action == "rollback"
            assert (await run_row(database, run.run_id))["status"] == "running"
            writer.discard()
            await writer.finish(RolledBack())
            assert not await exists(database, run.run_id)
            assert (await thread_row(database, thread_id))["status"] == "idle"
    assert action == "interrupt" or promised > 0


async def test_creating_on_a_thread_that_is_being_deleted(database: Database) -> None:
    """A run that was accepted is there, or was deleted with its thread; one that was refused is not."""
    for _ in range(30):
        thread_id, run_id = uuid4(), uuid7()
        await create(database, thread_id)
        created, deleted = await asyncio.gather(
            create(database, thread_id, run_id=run_id),
            delete_thread(database, thread_id, EVERYTHING),
            return_exceptions=True,
        )
        assert isinstance(deleted, list)
        assert not isinstance(created, BaseException) or isinstance(created, NotFound)
        gone = isinstance(created, NotFound) or run_id in {row["run_id"] for row in deleted}
        assert await exists(database, run_id) == (not gone)
    assert not await query(database, BROKEN_QUEUES)
    assert not await query(
        database,
        "SELECT 1 FROM thread WHERE (status = 'busy') <> "
        "EXISTS (SELECT 1 FROM run WHERE run.thread_id = thread.thread_id)",
    )
