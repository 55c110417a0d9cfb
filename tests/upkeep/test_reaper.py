"""How often lost workers are looked for, and that one of them delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import psycopg
import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.db.session_database import SessionDatabase
from holdfast.signals.choose import signals_for
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.reaper import BUSY_SHARE, Reaper
from tests.engine.scene import claim_runs, create, online_worker
from tests.support.records import query, run_row
from tests.support.waiting import until


@pytest.mark.parametrize("pgbouncer", [False, True], ids=["with sessions", "behind PgBouncer"])
async def test_lost_workers_are_looked_for_more_often_while_runs_are_executed(
    database: Database, pgbouncer: bool
) -> None:
    database.settings = database.settings.model_copy(update={"pgbouncer": pgbouncer})
    reaper = Reaper(database, signals_for(database), Metrics())
    worker_id = await online_worker(database)
    await create(database, uuid4())
    assert await reaper.run(database) is None
    await claim_runs(database, worker_id)
    # Behind PgBouncer only leases decide, and every process looks.
    busy = None if pgbouncer else database.settings.reaper_interval * BUSY_SHARE
    assert await reaper.run(database) == busy


# A heartbeat's session that is not there any more, of a worker that renewed with this server.
SESSION_GONE = "backend_pid = 0, server_start = pg_postmaster_start_time(), session_gone_at = {}"
EXPIRED = "lease_until = now() - interval '1 s'"


async def busy_worker(database: Database, state: str) -> tuple[UUID, UUID]:
    """A worker with a run."""
    worker_id = await online_worker(database)
    run_id: UUID = (await create(database, uuid4())).run["run_id"]
    assert len(await claim_runs(database, worker_id)) == 1
    await query(database, f"UPDATE worker SET {state} WHERE worker_id = %s RETURNING 1", worker_id)
    return worker_id, run_id


@pytest.mark.parametrize(
    "state",
    [EXPIRED, SESSION_GONE.format("now() - interval '1 hour'"), SESSION_GONE.format("NULL"), "session_gone_at = now()"],
    ids=["its lease expired", "its session is gone", "its session has just gone", "its session is back"],
)
async def test_a_worker_whose_row_is_locked_delays_no_other(database: Database, state: str) -> None:
    locked, waiting = await busy_worker(database, state)
    _, run_id = await busy_worker(database, EXPIRED)
    # It is looked at first.
    first, second = UUID(int=1), UUID(int=2)
    await query(database, "UPDATE run SET worker_id = %s WHERE run_id = %s RETURNING 1", first, waiting)
    await query(database, "UPDATE run SET worker_id = %s WHERE run_id = %s RETURNING 1", second, run_id)
    await query(
        database,
        "UPDATE worker SET worker_id = CASE worker_id WHEN %s THEN %s::uuid ELSE %s::uuid END RETURNING 1",
        locked,
        first,
        second,
    )
    reaper = Reaper(database, signals_for(database), Metrics())
    async with database.transaction() as connection, asyncio.timeout(30):
        await connection.execute("SELECT 1 FROM worker WHERE worker_id = %s FOR UPDATE", (first,))
        await reaper.run(database)
        assert (await run_row(database, run_id))["status"] == "pending"
        assert (await run_row(database, waiting))["status"] == "running"
    await reaper.run(database)
    lost = "now() - interval" in state
    assert (await run_row(database, waiting))["status"] == ("pending" if lost else "running")


async def test_a_worker_that_cannot_be_declared_lost_delays_no_other(database: Database) -> None:
    bad, waiting = await busy_worker(database, EXPIRED)
    _, run_id = await busy_worker(database, EXPIRED)
    async with database.transaction() as connection:
        await connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'this row is bad'; END $$"
        )
        trigger = f"CREATE TRIGGER refuse BEFORE UPDATE ON worker FOR EACH ROW WHEN (OLD.worker_id = '{bad}')"
        await connection.execute(f"{trigger} EXECUTE FUNCTION refuse()".encode())
    with pytest.raises(psycopg.errors.RaiseException, match="this row is bad"):
        await Reaper(database, signals_for(database), Metrics()).run(database)
    assert (await run_row(database, run_id))["status"] == "pending"
    assert (await run_row(database, waiting))["status"] == "running"


async def test_a_worker_of_an_unknown_server_is_not_written_at_every_look(database: Database) -> None:
    """As one that registered behind PgBouncer and has a session since."""
    worker_id, _ = await busy_worker(database, "backend_pid = 0, backend_start = NULL, server_start = NULL")
    version = "SELECT xmin::text FROM worker WHERE worker_id = %s"
    before = await query(database, version, worker_id)
    await Reaper(database, signals_for(database), Metrics()).run(database)
    assert await query(database, version, worker_id) == before


# Found before the real one: `pg_catalog` is searched last.
JUMPING_CLOCK = """
CREATE SCHEMA jumping;
CREATE TABLE jumping.jump (length interval NOT NULL);
INSERT INTO jumping.jump VALUES ('0');
CREATE FUNCTION jumping.now() RETURNS timestamptz LANGUAGE sql STABLE
AS 'SELECT pg_catalog.now() + length FROM jumping.jump';
"""


@pytest.fixture
async def jumping(database: Database) -> AsyncIterator[Database]:
    """A leader's session with a server whose clock can be made to jump."""
    # Leases are distrusted for as long as a renewal and the grace take: longer than a busy machine stands still.
    settings = database.settings.model_copy(update={"lease": 30.0, "heartbeat": 4.0, "session_grace": 0.5})
    async with database.connection() as connection:
        await connection.execute(JUMPING_CLOCK)
    async with await database.session("upkeep") as session:
        await session.execute("SELECT set_config('search_path', 'jumping, holdfast, pg_catalog', false)")
        leader = SessionDatabase(database, session)
        leader.settings = settings
        yield leader


async def jump(database: Database) -> None:
    await query(database, "UPDATE jumping.jump SET length = length + interval '1 day' RETURNING 1")


async def test_jump_of_the_servers_clock_costs_no_worker_its_runs(database: Database, jumping: Database) -> None:
    """As after a laptop was asleep: all leases have expired, and the next renewals are still to come."""
    reaper = Reaper(jumping, signals_for(database), Metrics())
    _, run_id = await busy_worker(database, "lease_until = now() + interval '30 s'")
    await reaper.run(jumping)
    await jump(database)
    with capture_logs() as logs:
        await reaper.run(jumping)
        await reaper.run(jumping)
    assert [entry["event"] for entry in logs] == ["upkeep.clock_jumped"]
    assert (await run_row(database, run_id))["status"] == "running"

    async def taken_over() -> bool:
        await reaper.run(jumping)
        return bool((await run_row(database, run_id))["status"] == "pending")

    await until(taken_over, "a worker that does not renew after that is lost")


async def test_lease_that_expired_in_an_outage_costs_no_worker_its_runs_at_once(
    database: Database, jumping: Database
) -> None:
    """Behind PgBouncer, where no session tells that the leader itself was cut off."""
    reaper = Reaper(jumping, signals_for(database), Metrics())
    _, run_id = await busy_worker(database, EXPIRED)
    async with await database.session("upkeep") as closed:
        pass
    with pytest.raises(psycopg.OperationalError):
        await reaper.run(SessionDatabase(database, closed))
    await reaper.run(jumping)
    assert (await run_row(database, run_id))["status"] == "running"
