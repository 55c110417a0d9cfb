"""Who is blamed for a dead worker: of its runs only those that made no progress, and never one for another's fault."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import pytest

from holdfast.db.connect import Database, open_blocking_session
from holdfast.db.row_by_row import RowsSetAside
from holdfast.engine.blame import blame, hand_over
from holdfast.engine.claim import SUSPECT_SECONDS
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.lease import drain
from holdfast.engine.reap import mark_lost, release_orphans, watch_workers
from holdfast.settings import Settings
from holdfast.telemetry.metrics import Metrics
from tests.engine.scene import (
    SUCCESS,
    claim_runs,
    create,
    declare_lost,
    online_worker,
    open_journal,
    put_checkpoint,
    writer_of,
)
from tests.support.records import query, run_row


async def crashes(database: Database, runs: Sequence[ClaimedRun]) -> list[tuple[str, int]]:
    rows = [await run_row(database, run.run_id) for run in runs]
    return [(row["status"], row["crashes"]) for row in rows]


async def reap(database: Database) -> None:
    """One pass of the reaper."""
    async with database.connection() as connection:
        for worker in (await watch_workers(connection, grace=2.0)).missing:
            assert await mark_lost(connection, worker["worker_id"], grace=2.0)
    await release_orphans(database, max_crashes=3)


async def several(database: Database, worker_id: UUID, count: int) -> list[ClaimedRun]:
    for _ in range(count):
        await create(database, uuid4())
    return await claim_runs(database, worker_id)


async def test_worker_that_hands_over_blames_one_run(database: Database, settings: Settings) -> None:
    worker_id = await online_worker(database)
    runs = await several(database, worker_id, 3)
    with open_blocking_session(settings, "test") as session:
        blame(session, worker_id, [runs[1].run_id])
        assert hand_over(session, worker_id)
    await reap(database)
    assert await crashes(database, runs) == [("pending", 0), ("pending", 1), ("pending", 0)]
    with open_blocking_session(settings, "test") as session:
        assert not hand_over(session, worker_id), "it was lost already"


async def test_worker_that_dies_while_it_drains_blames_no_run(database: Database, settings: Settings) -> None:
    """An operator, or an orchestrator at the end of its grace, may have killed it."""
    for _ in range(settings.max_crashes):
        worker_id = await online_worker(database)
        runs = await several(database, worker_id, 1)
        with open_blocking_session(settings, "test") as session:
            drain(session, worker_id)
        await query(
            database,
            "UPDATE worker SET lease_until = now() - interval '1 s' WHERE worker_id = %s RETURNING 1",
            worker_id,
        )
        await reap(database)
        assert await crashes(database, runs) == [("pending", 0)] * len(runs)


async def test_worker_that_hands_over_may_blame_nobody(database: Database, settings: Settings) -> None:
    worker_id = await online_worker(database)
    runs = await several(database, worker_id, 2)
    with open_blocking_session(settings, "test") as session:
        blame(session, worker_id, [])
        assert hand_over(session, worker_id)
    await reap(database)
    assert await crashes(database, runs) == [("pending", 0), ("pending", 0)]


async def test_run_that_is_blamed_by_name_is_poison_whatever_ran_beside_it(
    database: Database, settings: Settings
) -> None:
    worker_id = await online_worker(database)
    [guilty, beside] = await several(database, worker_id, 2)
    await query(
        database,
        "UPDATE run SET crashes_in_a_row = 2, crashes = 2 WHERE run_id = %s RETURNING run_id",
        guilty.run_id,
    )
    with open_blocking_session(settings, "test") as session:
        blame(session, worker_id, [guilty.run_id])
        assert hand_over(session, worker_id)
    await reap(database)
    assert await crashes(database, [guilty, beside]) == [("error", 3), ("pending", 0)]


async def die(database: Database, worker_id: UUID) -> None:
    await declare_lost(database, worker_id)
    await release_orphans(database, max_crashes=3)


async def progress(settings: Settings, run: ClaimedRun) -> None:
    """The run does a step, and is not a suspect any more."""
    async with open_journal(settings) as journal:
        writer = writer_of(journal, run)
        reported: list[bool] = []
        writer.on_progress = lambda: reported.append(True)
        put_checkpoint(writer)
        writer.add_progress()
        await writer.flush()
    assert reported == [True]


async def end(settings: Settings, run: ClaimedRun) -> None:
    async with open_journal(settings) as journal:
        await writer_of(journal, run).finish(SUCCESS)


@pytest.mark.parametrize("tenant_id", ["", "acme"], ids=["without tenants", "with tenants"])
async def test_suspects_are_claimed_one_at_a_time(database: Database, settings: Settings, tenant_id: str) -> None:
    first, second, third = [await online_worker(database) for _ in range(3)]
    for _ in range(4):
        await create(database, uuid4(), tenant_id=tenant_id)
    assert len(await claim_runs(database, first)) == 4
    await die(database, first)

    [suspect] = await claim_runs(database, second)
    assert suspect.suspect
    assert await claim_runs(database, second) == [], "it has one"
    [other] = await claim_runs(database, third)
    await create(database, uuid4(), tenant_id=tenant_id)
    [fresh] = await claim_runs(database, second)
    assert not fresh.suspect, "suspects in front do not keep others from running"

    await progress(settings, suspect)
    [another] = await claim_runs(database, second)
    assert another.suspect, "the first one has made progress"
    assert await claim_runs(database, second) == []
    await end(settings, other)
    [last] = await claim_runs(database, third)
    assert len({run.run_id for run in (suspect, other, another, last)}) == 4


async def test_suspect_is_not_overtaken_for_ever(database: Database) -> None:
    """The last free slot is kept for one, however much else is queued."""
    first, second = [await online_worker(database) for _ in range(2)]
    [run] = await several(database, first, 1)
    await die(database, first)
    for _ in range(3):
        await create(database, uuid4(), priority=10)
    [claimed] = await claim_runs(database, second, slots=1)
    assert claimed.run_id == run.run_id
    assert len(await claim_runs(database, second, slots=1)) == 1


async def test_suspect_with_a_long_step_does_not_keep_the_others_waiting(database: Database) -> None:
    first, second = [await online_worker(database) for _ in range(2)]
    await several(database, first, 2)
    await die(database, first)
    [suspect] = await claim_runs(database, second)
    assert await claim_runs(database, second) == []
    await query(
        database,
        f"UPDATE run SET updated_at = now() - interval '{SUSPECT_SECONDS} s' WHERE run_id = %s RETURNING run_id",
        suspect.run_id,
    )
    assert len(await claim_runs(database, second)) == 1


async def test_run_that_kills_slowly_makes_no_other_suspect_poison(database: Database) -> None:
    """It takes its workers down when they have had time to take another suspect, whose first step is as long."""
    runs = await several(database, await online_worker(database), 2)
    killer, innocent = (run.run_id for run in runs)
    await die(database, runs[0].worker_id)
    for _ in range(10):
        worker_id = await online_worker(database)
        claimed = await claim_runs(database, worker_id)
        await query(database, f"UPDATE run SET updated_at = now() - interval '{SUSPECT_SECONDS} s' RETURNING run_id")
        claimed += await claim_runs(database, worker_id)
        if killer not in {run.run_id for run in claimed}:
            # The innocent run has this worker for itself. The next one has the killer.
            worker_id = await online_worker(database)
            [claimed_last] = await claim_runs(database, worker_id)
            assert claimed_last.run_id == killer
        await die(database, worker_id)
        if (await run_row(database, killer))["status"] == "error":
            break
    row = await run_row(database, innocent)
    assert (await run_row(database, killer))["dead_letter"] == "poison"
    assert row["dead_letter"] is None
    assert row["crashes_in_a_row"] <= 2


@pytest.mark.parametrize("tenant_id", ["acme"])
async def test_suspects_of_a_tenant_at_its_limit_wait(database: Database, tenant_id: str) -> None:
    first, second, third = [await online_worker(database) for _ in range(3)]
    for _ in range(2):
        await create(database, uuid4(), tenant_id=tenant_id)
    assert len(await claim_runs(database, first)) == 2
    await die(database, first)
    await query(database, "INSERT INTO tenant (tenant_id, max_running) VALUES (%s, 1) RETURNING tenant_id", tenant_id)
    elsewhere = await create(database, uuid4())
    claimed = await claim_runs(database, second, slots=2)
    assert sorted(row.tenant_id for row in claimed) == ["", "acme"]
    assert elsewhere.run["run_id"] in {row.run_id for row in claimed}
    assert await claim_runs(database, third) == []
    await create(database, uuid4())
    assert len(await claim_runs(database, third, slots=1)) == 1, "the slot kept for a suspect is not lost"


async def test_only_the_run_that_kills_becomes_poison(database: Database, settings: Settings) -> None:
    """One of ten takes every worker down that has it. The others make progress once they are apart from it."""
    runs = await several(database, await online_worker(database), 10)
    killer = runs[4].run_id
    await die(database, (await run_row(database, killer))["worker_id"])
    open_runs = {run.run_id for run in runs}
    deaths = 1
    while open_runs:
        worker_id = await online_worker(database)
        [suspect] = await claim_runs(database, worker_id)
        # It is not alone on its worker.
        await create(database, uuid4())
        [beside] = await claim_runs(database, worker_id)
        await progress(settings, beside)
        if suspect.run_id == killer:
            await die(database, worker_id)
            deaths += 1
            if (await run_row(database, killer))["status"] == "error":
                open_runs.discard(killer)
            await query(database, "DELETE FROM run WHERE run_id = %s RETURNING run_id", beside.run_id)
        else:
            await progress(settings, suspect)
            await end(settings, suspect)
            open_runs.discard(suspect.run_id)
    rows = [await run_row(database, run.run_id) for run in runs]
    assert [row["dead_letter"] for row in rows] == [None] * 4 + ["poison"] + [None] * 5
    assert deaths == 4, "one more than three, for it was never alone"
    assert "4 workers died" in rows[4]["error"]["message"]


async def test_new_killer_beside_an_innocent_suspect(database: Database, settings: Settings) -> None:
    """The suspect has had bad luck twice. That a new run beside it kills the worker is not its end."""
    worker_id = await online_worker(database)
    [innocent] = await several(database, worker_id, 1)
    await query(database, "UPDATE run SET crashes = 2, crashes_in_a_row = 2 RETURNING run_id")
    [killer] = await several(database, worker_id, 1)
    # LangGraph stores the input before the first node begins.
    async with open_journal(settings) as journal:
        writer = writer_of(journal, killer)
        put_checkpoint(writer)
        await writer.flush()
    await die(database, worker_id)
    row = await run_row(database, innocent.run_id)
    assert (row["status"], row["crashes_in_a_row"]) == ("pending", 3)

    worker_id = await online_worker(database)
    await query(database, "DELETE FROM run WHERE run_id <> %s RETURNING run_id", innocent.run_id)
    [claimed] = await claim_runs(database, worker_id)
    assert claimed.suspect
    await die(database, worker_id)
    assert await crashes(database, [innocent]) == [("error", 4)]


@pytest.mark.expects_errors("upkeep.row_set_aside")
async def test_suspect_that_is_released_late_has_the_company_that_it_had(database: Database) -> None:
    """Somebody has locked its thread. The run that died with it has been released when the suspect can be."""
    worker_id = await online_worker(database)
    [innocent] = await several(database, worker_id, 1)
    await query(database, "UPDATE run SET crashes = 2, crashes_in_a_row = 2 RETURNING run_id")
    [killer] = await several(database, worker_id, 1)
    aside = RowsSetAside("takeover", "run_id", Metrics(), first_delay=0.0, max_delay=0.0)
    shared_worker: set[UUID] = set()
    await declare_lost(database, worker_id)
    async with database.transaction() as connection:
        await connection.execute("SELECT 1 FROM thread WHERE thread_id = %s FOR UPDATE", (innocent.thread_id,))
        await release_orphans(database, max_crashes=3, aside=aside, shared_worker=shared_worker)
        assert (await run_row(database, killer.run_id))["status"] == "pending"
    await release_orphans(database, max_crashes=3, aside=aside, shared_worker=shared_worker)
    assert await crashes(database, [innocent]) == [("pending", 3)]
    assert shared_worker == set()


async def test_run_that_makes_progress_outlives_any_number_of_workers(database: Database, settings: Settings) -> None:
    [run] = await several(database, await online_worker(database), 1)
    for crash in range(1, 6):
        if crash > 1:
            await progress(settings, run)
        await die(database, run.worker_id)
        row = await run_row(database, run.run_id)
        assert (row["status"], row["crashes"], row["crashes_in_a_row"]) == ("pending", crash, 1)
        [run] = await claim_runs(database, await online_worker(database))
