"""Runs that do not get on, and workers that are gone, put into the database as they would be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from holdfast.db.connect import Database, open_session
from holdfast.db.migrate import migrate
from holdfast.engine.reap import release_orphans
from holdfast.insight.doctor.connections import check_connections
from holdfast.insight.doctor.findings import Verdict
from holdfast.insight.doctor.installation import Installation
from holdfast.insight.doctor.work import check_leases, check_poison_runs, check_stuck_runs, check_workers
from holdfast.upkeep.leader import TRY_LOCK
from tests.engine.scene import claim_runs, create, declare_lost, online_worker

Execute = Callable[[str], None]


async def claimed(database: Database) -> tuple[UUID, UUID]:
    """A worker and the run it holds."""
    worker_id = await online_worker(database)
    await create(database, uuid4())
    [run] = await claim_runs(database, worker_id)
    return worker_id, run.run_id


async def test_doctor_reports_that_no_worker_is_online(
    installation: Installation, database: Database, execute: Execute
) -> None:
    unstarted = await check_workers(installation)
    assert unstarted.verdict is Verdict.WARN
    assert "no worker is online, and no web process" in unstarted.found
    async with await open_session(installation.settings, "web"):
        serving = await check_workers(installation)
        assert serving.verdict is Verdict.FAIL
        assert "a web process accepts runs: they wait" in serving.found
        assert "`holdfast worker`" in serving.fix
        worker_id = await online_worker(database)
        assert (await check_workers(installation)).verdict is Verdict.PASS
        execute("UPDATE worker SET lease_until = now() - interval '1 second'")
        assert (await check_workers(installation)).verdict is Verdict.FAIL
        await declare_lost(database, worker_id)
        assert (await check_workers(installation)).verdict is Verdict.FAIL


async def test_more_workers_than_cores_are_a_warning(
    installation: Installation, database: Database, execute: Execute
) -> None:
    for _ in range(3):
        await online_worker(database)
    assert (await check_workers(installation)).verdict is Verdict.PASS, "older versions do not say"
    execute("UPDATE worker SET host = 'here', cores = 3, cpus = 'all'")
    assert (await check_workers(installation)).verdict is Verdict.PASS
    execute("UPDATE worker SET cores = 2")
    crowded = await check_workers(installation)
    assert crowded.verdict is Verdict.WARN
    assert crowded.found == "3 online; more than a host has cores: here (3 on 2 cores)"
    assert "N_JOBS_PER_WORKER" in crowded.fix


@pytest.mark.parametrize("own", ["cpus", "host"])
async def test_workers_that_share_no_cores_are_as_many_as_they_like(
    installation: Installation, database: Database, execute: Execute, own: str
) -> None:
    for _ in range(3):
        await online_worker(database)
    execute("UPDATE worker SET host = 'here', cores = 1, cpus = '1'")
    execute(f"UPDATE worker SET {own} = worker_id::text")
    assert (await check_workers(installation)).verdict is Verdict.PASS
    execute(f"UPDATE worker SET {own} = 'shared'")
    assert (await check_workers(installation)).verdict is Verdict.WARN
    one = "(SELECT worker_id FROM worker LIMIT 1)"
    execute(f"UPDATE worker SET lease_until = now() - interval '1 second' WHERE worker_id <> {one}")
    assert (await check_workers(installation)).verdict is Verdict.PASS, "the others are gone"


@pytest.mark.parametrize("schema", ["elsewhere", "e" * 63])
async def test_processes_of_another_schema_are_not_counted(installation: Installation, schema: str) -> None:
    second = replace(installation, settings=installation.settings.model_copy(update={"db_schema": schema}))
    migrate(second.settings)
    for mine, other in ((installation, second), (second, installation)):
        async with (
            await open_session(other.settings, "web"),
            await open_session(other.settings, "upkeep"),
            await open_session(other.settings, "upkeep"),
        ):
            assert "no web process" in (await check_workers(mine)).found
            assert "a web process accepts runs" in (await check_workers(other)).found
            assert "1 worker and 1 web process may open" in (await check_connections(mine)).found
            assert "1 worker and 2 web processes may open" in (await check_connections(other)).found


async def test_doctor_passes_healthy_workers_and_runs(installation: Installation, database: Database) -> None:
    for check in (check_stuck_runs, check_poison_runs, check_leases):
        finding = await check(installation)
        assert finding.verdict is Verdict.PASS, finding


async def test_ready_runs_and_no_worker(installation: Installation, database: Database) -> None:
    await create(database, uuid4())
    finding = await check_stuck_runs(installation)
    assert finding.verdict is Verdict.FAIL
    assert "1 ready run, and no worker is online" in finding.found


async def test_ready_runs_of_a_graph_that_nobody_has(installation: Installation, database: Database) -> None:
    await online_worker(database)
    await create(database, uuid4())
    finding = await check_stuck_runs(installation)
    assert finding.verdict is Verdict.FAIL
    assert "graph (1)" in finding.found


@pytest.mark.parametrize(("capacity", "verdict"), [(5, Verdict.FAIL), (0, Verdict.WARN)])
async def test_runs_that_are_ready_for_long(
    installation: Installation, database: Database, execute: Execute, capacity: int, verdict: Verdict
) -> None:
    await online_worker(database)
    await create(database, uuid4())
    execute(f"UPDATE worker SET graphs = '{{graph}}', capacity = {capacity}")
    assert (await check_stuck_runs(installation)).verdict is Verdict.PASS
    execute("UPDATE run SET ready_at = now() - interval '10 minutes'")
    finding = await check_stuck_runs(installation)
    assert finding.verdict is verdict
    assert "10.0 min" in finding.found


async def test_room_on_a_worker_without_the_graph_is_none(
    installation: Installation, database: Database, execute: Execute
) -> None:
    full = await online_worker(database)
    execute("UPDATE worker SET graphs = '{graph}', capacity = 1")
    for _ in range(2):
        await create(database, uuid4())
    assert len(await claim_runs(database, full, 1)) == 1
    await online_worker(database)
    execute("UPDATE worker SET graphs = '{other}', capacity = 10 WHERE graphs = '{}'")
    execute("UPDATE run SET ready_at = now() - interval '10 minutes' WHERE status = 'pending'")
    assert (await check_stuck_runs(installation)).verdict is Verdict.WARN


async def test_a_thread_without_a_head(installation: Installation, database: Database, execute: Execute) -> None:
    thread_id = uuid4()
    await create(database, thread_id)
    execute("UPDATE run SET ready_at = NULL")
    finding = await check_stuck_runs(installation)
    assert finding.verdict is Verdict.FAIL
    assert str(thread_id) in finding.found


async def test_a_running_run_that_says_nothing(
    installation: Installation, database: Database, execute: Execute
) -> None:
    _, run_id = await claimed(database)
    execute("UPDATE run SET updated_at = now() - interval '2 hours', started_at = now() - interval '2 hours'")
    execute("UPDATE event SET created_at = now() - interval '2 hours'")
    finding = await check_stuck_runs(installation)
    assert finding.verdict is Verdict.WARN
    assert f"1 run ({run_id}) without an event for 2.0 h" in finding.found
    execute("INSERT INTO event (thread_id, seq, run_id, kind, data) SELECT thread_id, 2, run_id, 'custom', '' FROM run")
    assert (await check_stuck_runs(installation)).verdict is Verdict.PASS


async def test_a_run_on_its_way_to_the_dead_letters(installation: Installation, database: Database) -> None:
    for crash in (1, 2, 3):
        worker_id = await online_worker(database)
        if crash == 1:
            await create(database, uuid4())
        [run] = await claim_runs(database, worker_id)
        await declare_lost(database, worker_id)
        await release_orphans(database, max_crashes=3)
        finding = await check_poison_runs(installation)
        assert finding.verdict is Verdict.WARN
        expected = f"{crash} times of 3" if crash < 3 else "1 dead letter since yesterday (poison)"
        assert expected in finding.found
        assert str(run.run_id) in finding.found


async def test_a_lease_that_has_expired(installation: Installation, database: Database, execute: Execute) -> None:
    await claimed(database)
    execute("UPDATE worker SET lease_until = now() - interval '2 seconds'")
    alone = await check_leases(installation)
    assert alone.verdict is Verdict.FAIL
    assert "(test, process 0)" in alone.found
    assert "Nobody does the upkeep" in alone.fix
    async with await open_session(installation.settings, "upkeep") as session:
        await session.execute(TRY_LOCK, {"schema": installation.settings.db_schema})
        led = await check_leases(installation)
        assert led.verdict is Verdict.WARN, "somebody leads, and will take over in a moment"
        execute("UPDATE worker SET lease_until = now() - interval '2 minutes'")
        assert (await check_leases(installation)).verdict is Verdict.FAIL, "but does not"


async def test_doctor_fails_without_a_leader(installation: Installation, database: Database) -> None:
    await online_worker(database)
    finding = await check_leases(installation)
    assert finding.verdict is Verdict.FAIL
    assert "no process leads the upkeep" in finding.found


async def test_runs_of_a_worker_that_is_gone(installation: Installation, database: Database, execute: Execute) -> None:
    worker_id, run_id = await claimed(database)
    await declare_lost(database, worker_id)
    execute("UPDATE worker SET stopped_at = now()")
    recent = await check_leases(installation)
    assert recent.verdict is Verdict.WARN
    assert "1 worker lost within the last hour" in recent.found
    execute("UPDATE worker SET stopped_at = now() - interval '2 hours'")
    finding = await check_leases(installation)
    assert finding.verdict is Verdict.FAIL
    assert str(run_id) in finding.found
