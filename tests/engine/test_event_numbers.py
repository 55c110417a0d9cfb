"""A thread's event numbers never go back, however a run ended and whatever has expired since."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID, uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.outcome import Released, RolledBack
from holdfast.engine.reap import release_orphans
from holdfast.journal.journal import Lane
from holdfast.settings import Settings
from holdfast.upkeep.sweeps import SWEEP_EVENTS
from tests.engine.scene import SUCCESS, claim_runs, create, declare_lost, lane_of, online_worker, open_journal
from tests.support.records import query

# Each ends a running run that was announced and has written two events.
Ending = Callable[[Database, Lane, UUID], Awaitable[None]]


async def finished(database: Database, lane: Lane, worker_id: UUID) -> None:
    await lane.finish(SUCCESS)


async def rolled_back_by_its_owner(database: Database, lane: Lane, worker_id: UUID) -> None:
    await cancel_runs(database, lane.thread_id, None, "rollback")
    await lane.finish(RolledBack())


async def rolled_back_in_the_queue(database: Database, lane: Lane, worker_id: UUID) -> None:
    await lane.finish(Released())
    await cancel_runs(database, lane.thread_id, None, "rollback")


async def interrupted_in_the_queue(database: Database, lane: Lane, worker_id: UUID) -> None:
    await lane.finish(Released())
    await cancel_runs(database, lane.thread_id, None, "interrupt")


async def poisoned(database: Database, lane: Lane, worker_id: UUID) -> None:
    await declare_lost(database, worker_id)
    await release_orphans(database, max_crashes=1)


@pytest.mark.parametrize(
    "ending",
    [finished, rolled_back_by_its_owner, rolled_back_in_the_queue, interrupted_in_the_queue, poisoned],
    ids=lambda ending: ending.__name__,
)
async def test_numbers_go_on_after_everything_has_expired(
    database: Database, settings: Settings, ending: Ending
) -> None:
    thread_id = uuid4()
    async with open_journal(settings) as journal:
        # The second run ends in the way in question. Events of a run that is gone expire with those of another.
        for number in range(2):
            await create(database, thread_id)
            worker_id = await online_worker(database)
            [run] = await claim_runs(database, worker_id)
            lane = lane_of(journal, run)
            lane.event("values", b"{}")
            lane.event("values", b"{}")
            await lane.flush()
            await (finished if number == 0 else ending)(database, lane, worker_id)
    [highest] = await query(database, "SELECT max(seq) AS seq FROM event WHERE thread_id = %s", thread_id)
    async with database.connection() as connection:
        await connection.execute(SWEEP_EVENTS, {"ttl": 0.0, "batch": 100, "aside": []})
    assert not await query(database, "SELECT 1 FROM event")
    await create(database, thread_id)
    [run] = await claim_runs(database, await online_worker(database))
    assert (run["announced_seq"], run["next_seq"]) == (highest["seq"] + 1, highest["seq"] + 2)
