"""Take-over meets claims, renewals and commits: whoever comes first, nothing is lost and nothing done twice."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING
from holdfast.engine.lease import RENEW
from holdfast.engine.outcome import Released, RolledBack
from holdfast.engine.queue import LOCK_THREADS
from holdfast.engine.reap import MARK_LOST, RELEASE, mark_lost, release_orphans, watch_workers
from holdfast.engine.threads import delete_thread
from holdfast.engine.unexecuted import return_unexecuted
from holdfast.errors import LeaseLost
from holdfast.settings import Settings
from tests.engine.scene import (
    INTERRUPTED,
    SUCCESS,
    claim_runs,
    commit_held_up,
    create,
    declare_lost,
    online_worker,
    open_journal,
    portion_of,
    put_checkpoint,
    somebody_waits,
    writer_of,
)
from tests.support.records import query, run_row, thread_events


async def test_a_worker_that_is_not_online_claims_nothing(database: Database) -> None:
    await create(database, uuid4())
    for status in ("lost", "offline", "draining"):
        worker_id = await online_worker(database)
        await query(
            database, "UPDATE worker SET status = %s WHERE worker_id = %s RETURNING worker_id", status, worker_id
        )
        assert await claim_runs(database, worker_id) == []
    assert await claim_runs(database, uuid4()) == []
    assert len(await claim_runs(database, await online_worker(database))) == 1


@pytest.mark.parametrize("tenant_id", ["", "acme"], ids=["without tenants", "with tenants"])
async def test_worker_with_an_expired_lease_claims_nothing(database: Database, tenant_id: str) -> None:
    worker_id = await online_worker(database)
    await create(database, uuid4(), tenant_id=tenant_id)
    await query(database, "UPDATE worker SET lease_until = now() - interval '1 s' RETURNING worker_id")
    assert await claim_runs(database, worker_id) == []
    assert len(await claim_runs(database, await online_worker(database))) == 1


async def test_a_claim_in_the_moment_of_being_declared_lost_is_found(database: Database) -> None:
    worker_id = await online_worker(database)
    created = await create(database, uuid4())
    async with database.transaction() as marking:
        # Not committed: the claim still sees a lease.
        await marking.execute("UPDATE worker SET lease_until = now() - interval '1 s'")
        await marking.execute(MARK_LOST, {"worker_id": worker_id, "grace": 1.0})
        assert await release_orphans(database, max_crashes=3) == []
        claimed = await claim_runs(database, worker_id)
        assert len(claimed) == 1
    released = await release_orphans(database, max_crashes=3)
    assert [row["run_id"] for row in released] == [created.run["run_id"]]
    row = await run_row(database, created.run["run_id"])
    assert (row["status"], row["fence"]) == ("pending", claimed[0].fence + 1)


async def test_a_renewal_that_gets_in_first_keeps_the_worker(database: Database) -> None:
    worker_id = await online_worker(database)
    await query(database, "UPDATE worker SET lease_until = now() - interval '1 s' RETURNING worker_id")
    async with database.connection() as connection:
        [found] = (await watch_workers(connection, grace=1.0)).missing
        assert found["lost"]
        async with database.transaction() as renewing:
            await renewing.execute(
                RENEW,
                {
                    "worker_id": worker_id,
                    "lease": 30.0,
                    "session": False,
                    "reconnected": False,
                    "claims": 0,
                    "problem": None,
                },
            )
            assert not await mark_lost(connection, worker_id, grace=1.0), "while the renewal has the row locked"
        assert not await mark_lost(connection, worker_id, grace=1.0), "when the lease is renewed"
    [row] = await query(database, "SELECT status FROM worker")
    assert row["status"] == "online"


async def test_a_commit_under_way_when_its_worker_is_taken_over_counts(database: Database, settings: Settings) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    await declare_lost(database, worker_id)
    async with commit_held_up(database, [portion_of(run)]):
        releasing = asyncio.create_task(release_orphans(database, max_crashes=3))
        await somebody_waits(database)
    assert [row["run_id"] for row in await releasing] == [run.run_id]
    assert len(await thread_events(database, thread_id)) == 2
    [again] = await claim_runs(database, await online_worker(database))
    assert (again.fence, again.announced_seq) == (run.fence + 2, 3)
    async with open_journal(settings) as journal:
        zombie = writer_of(journal, run)
        zombie.add_event("values", b"{}")
        with pytest.raises(LeaseLost):
            await zombie.flush()
    assert len(await thread_events(database, thread_id)) == 3


async def test_an_end_under_way_when_its_worker_is_taken_over_counts(database: Database) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    await declare_lost(database, worker_id)
    async with commit_held_up(database, [portion_of(run, SUCCESS)]):
        releasing = asyncio.create_task(release_orphans(database, max_crashes=3))
        await somebody_waits(database)
    assert await releasing == []
    row = await run_row(database, run.run_id)
    assert (row["status"], row["fence"], row["crashes"]) == ("success", run.fence, 0)


async def test_a_run_that_has_found_a_new_owner_is_not_taken_from_it(database: Database) -> None:
    """The reaper looks for orphans first and locks their threads then. Much can happen in between."""
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    await declare_lost(database, worker_id)
    async with database.transaction() as gate:
        await gate.execute(LOCK_THREADS, {"thread_ids": [thread_id]})
        releasing = asyncio.create_task(release_orphans(database, max_crashes=3))
        await somebody_waits(database)
        async with database.connection() as connection:
            assert await return_unexecuted(connection, worker_id, [run.run_id]) == [run.run_id]
        [again] = await claim_runs(database, await online_worker(database))
    assert await releasing == []
    row = await run_row(database, run.run_id)
    assert (row["status"], row["fence"], row["crashes"]) == ("running", again.fence, 0)


@pytest.mark.parametrize("outcome", [None, SUCCESS, Released(), RolledBack()], ids=str)
async def test_a_commit_that_comes_during_the_takeover_writes_nothing(
    database: Database, settings: Settings, outcome: object
) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    await declare_lost(database, worker_id)
    async with open_journal(settings) as journal:
        writer = writer_of(journal, run)
        async with database.transaction() as releasing:
            await releasing.execute(LOCK_THREADS, {"thread_ids": [thread_id]})
            await releasing.execute(
                RELEASE, {"run_ids": [run.run_id], "max_crashes": 3, "shared_worker": [], "poison": False}
            )
            writer.add_event("values", b"{}")
            put_checkpoint(writer)
            writing = asyncio.create_task(writer.flush() if outcome is None else writer.finish(outcome))  # type: ignore[arg-type]
            await somebody_waits(database)
        with pytest.raises(LeaseLost):
            await writing
    row = await run_row(database, run.run_id)
    assert (row["status"], row["fence"], row["progress"]) == ("pending", run.fence + 1, 0)
    assert [event.kind for event in await thread_events(database, thread_id)] == ["metadata"]
    assert not await query(database, "SELECT 1 FROM checkpoints")


async def test_neighbours_of_a_lost_run_are_written_every_time(database: Database, settings: Settings) -> None:
    """A refused batch is written again without the run that was lost. What it left half prepared on the connection
    must not hurt whoever writes next."""
    worker_id = await online_worker(database)
    async with open_journal(settings) as journal:
        for outcome in (None, Released(), SUCCESS, INTERRUPTED, None, RolledBack(), SUCCESS, Released(after=60.0)):
            mine, lost = uuid4(), uuid4()
            await create(database, mine)
            await create(database, lost)
            writers = {row.thread_id: writer_of(journal, row) for row in await claim_runs(database, worker_id)}
            held = writers[mine]
            stale = journal.open_writer(writers[lost].run_id, lost, 99, 1)
            for writer in (stale, held):
                writer.add_event("values", b"{}")
                put_checkpoint(writer)
            answers = await asyncio.gather(
                stale.flush(), held.flush() if outcome is None else held.finish(outcome), return_exceptions=True
            )
            assert isinstance(answers[0], LeaseLost)
            assert answers[1] is None
            await query(database, "UPDATE run SET priority = -1 WHERE status = 'pending' RETURNING run_id")
            await delete_thread(database, mine, EVERYTHING)
            await delete_thread(database, lost, EVERYTHING)
