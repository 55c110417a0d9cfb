"""A thread's event numbers never go back, however a run ended and whatever has expired since."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID, uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.outcome import Released, RolledBack
from holdfast.engine.reap import release_orphans
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import Settings
from holdfast.upkeep.sweeps import SWEEP_EVENTS
from tests.engine.scene import SUCCESS, claim_runs, create, declare_lost, online_worker, open_journal, writer_of
from tests.support.records import query

# Each ends a running run that was announced and has written two events.
Ending = Callable[[Database, RunWriter, UUID], Awaitable[None]]


async def finished(database: Database, writer: RunWriter, worker_id: UUID) -> None:
    await writer.finish(SUCCESS)


async def rolled_back_by_its_owner(database: Database, writer: RunWriter, worker_id: UUID) -> None:
    await cancel_runs(database, writer.thread_id, None, "rollback")
    await writer.finish(RolledBack())


async def rolled_back_in_the_queue(database: Database, writer: RunWriter, worker_id: UUID) -> None:
    await writer.finish(Released())
    await cancel_runs(database, writer.thread_id, None, "rollback")


async def interrupted_in_the_queue(database: Database, writer: RunWriter, worker_id: UUID) -> None:
    await writer.finish(Released())
    await cancel_runs(database, writer.thread_id, None, "interrupt")


async def poisoned(database: Database, writer: RunWriter, worker_id: UUID) -> None:
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
            writer = writer_of(journal, run)
            writer.add_event("values", b"{}")
            writer.add_event("values", b"{}")
            await writer.flush()
            await (finished if number == 0 else ending)(database, writer, worker_id)
    [highest] = await query(database, "SELECT max(seq) AS seq FROM event WHERE thread_id = %s", thread_id)
    async with database.connection() as connection:
        await connection.execute(SWEEP_EVENTS, {"ttl": 0.0, "batch": 100, "aside": []})
    assert not await query(database, "SELECT 1 FROM event")
    await create(database, thread_id)
    [run] = await claim_runs(database, await online_worker(database))
    assert (run.announced_seq, run.next_seq) == (highest["seq"] + 1, highest["seq"] + 2)
