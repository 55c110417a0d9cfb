"""Duties of the upkeep do not wait for each other, and take-over waits for none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.settings import Settings, load_settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.duty import LONGEST_PAUSE_SECONDS, OUTAGE_PAUSE_SECONDS, Duty
from holdfast.upkeep.leader import Upkeep
from tests.engine.scene import create, online_worker, somebody_waits
from tests.support.records import query, run_row
from tests.support.waiting import until, until_true

# What take-over needs.
NEEDED = ("run", "thread", "worker")
OTHERS = """
SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = current_schema() AND relkind = 'r' AND relname <> ALL(%s) ORDER BY relname
"""
RUN_AT = """
UPDATE run SET status = 'running', worker_id = %s, fence = 1, attempt = 1, crashes = %s, crashes_in_a_row = %s,
               webhook = 'https://example.com/', started_at = now()
WHERE run_id = %s RETURNING 1
"""


@pytest.fixture
def settings(database_url: str) -> Settings:
    # No statement is given up while the test runs: what waits for a lock waits to the end.
    return load_settings(
        {"REAPER_INTERVAL_SECONDS": "0.1", "DATABASE_TIMEOUT": "300", "MAX_CRASHES": "2"}, database_url=database_url
    )


@asynccontextmanager
async def locked(database: Database, *tables: str) -> AsyncIterator[None]:
    """Keep everybody else from the tables, as a careless migration or a long transaction does."""
    async with database.transaction() as connection:
        await connection.execute(f"LOCK TABLE {', '.join(tables)}".encode())
        yield


@asynccontextmanager
async def leading(settings: Settings) -> AsyncIterator[Upkeep]:
    database = Database(settings, "test")
    await database.open()
    upkeep = Upkeep(database, PostgresSignals(database), Metrics())
    await upkeep.start()
    try:
        await until_true(lambda: upkeep.leading, "it leads")
        yield upkeep
    finally:
        await upkeep.stop()
        await database.close()


async def running(database: Database, worker_id: UUID, crashes: int = 0) -> UUID:
    run_id: UUID = (await create(database, uuid4())).run["run_id"]
    await query(database, RUN_AT, worker_id, crashes, crashes, run_id)
    return run_id


async def expire(database: Database, worker_id: UUID) -> None:
    await query(
        database,
        "UPDATE worker SET lease_until = now() - interval '1 s' WHERE worker_id = %s RETURNING 1",
        worker_id,
    )


@pytest.mark.expects_errors("upkeep.row_set_aside")
async def test_take_over_waits_for_no_table_but_its_own(settings: Settings, database: Database) -> None:
    others = [row["relname"] for row in await query(database, OTHERS, list(NEEDED))]
    assert {"webhook_delivery", "event", "cron", "interrupt", "abandoned", "graph_absence", "checkpoints"} <= {*others}
    workers = [await online_worker(database) for _ in range(2)]
    runs = [await running(database, worker_id) for worker_id in workers]
    # The end of this one is told to somebody, which has to wait for a lock. The others must not wait for that.
    poison = await running(database, workers[0], 9)
    async with locked(database, *others), leading(settings):
        await somebody_waits(database, 3)
        # Again and again, not only before the other duties began to wait.
        for worker_id, run_id in zip(workers, runs, strict=True):
            await expire(database, worker_id)

            async def released(run_id: UUID = run_id) -> bool:
                return bool((await run_row(database, run_id))["status"] == "pending")

            await until(released, "the run is released while the tables are locked")
        assert (await run_row(database, poison))["status"] == "running"


async def test_children_of_a_stopped_run_wait_for_no_other_duty(settings: Settings, database: Database) -> None:
    """With a small pool, the duties that remove things have one place together."""
    small = settings.model_copy(update={"pool_max": 5})
    async with locked(database, "store"), leading(small):
        await somebody_waits(database, 1)
        parent = uuid4()
        child = (await create(database, uuid4())).run["run_id"]
        await query(database, "UPDATE run SET parent_run_id = %s WHERE run_id = %s RETURNING 1", parent, child)
        await query(database, "INSERT INTO abandoned (run_id) VALUES (%s) RETURNING 1", parent)

        async def cancelled() -> bool:
            return bool((await run_row(database, child))["status"] == "interrupted")

        await until(cancelled, "the child is cancelled while the table is locked")


async def test_a_poison_run_that_waits_for_a_lock_ends_later(settings: Settings, database: Database) -> None:
    worker_id = await online_worker(database)
    poison = await running(database, worker_id, 9)
    async with locked(database, "webhook_delivery"):
        await expire(database, worker_id)
        with capture_logs() as logs:
            async with leading(settings) as upkeep:
                await until_true(
                    lambda: any(line["event"] == "upkeep.row_set_aside" for line in logs), "it is set aside"
                )
                assert upkeep.leading, "a lock does not cost the lead"
    async with leading(settings):

        async def ended() -> bool:
            return bool((await run_row(database, poison))["dead_letter"] == "poison")

        await until(ended, "the run is given up")


async def test_a_duty_that_fails_says_so_once_and_goes_on() -> None:
    outcomes: list[Exception | None] = [OSError("away"), OSError("away"), None, ValueError("a defect"), None]
    done = asyncio.Event()

    async def work() -> float:
        if not outcomes:
            done.set()
            return 60.0
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return 0.0

    with capture_logs() as logs:
        task = asyncio.create_task(Duty("crons", work, timeout=60.0).run())
        await done.wait()
        await cancel_all([task])
    assert [(line["event"], line["duty"]) for line in logs] == [
        ("upkeep.duty_failing", "crons"),
        ("upkeep.duty_recovered", "crons"),
        ("upkeep.duty_crashed", "crons"),
        ("upkeep.duty_failing", "crons"),
        ("upkeep.duty_recovered", "crons"),
    ]


async def test_a_duty_that_takes_too_long_begins_again() -> None:
    begun = 0

    async def work() -> float:
        nonlocal begun
        begun += 1
        await asyncio.sleep(3600)
        return 0.0

    task = asyncio.create_task(Duty("crons", work, timeout=0.01).run())
    await until_true(lambda: begun >= 3, "it has begun three times")
    await cancel_all([task])


async def test_a_duty_ends_when_the_lead_is_lost() -> None:
    async def work() -> float:
        raise OSError("the session is closed")

    with pytest.raises(OSError, match="the session is closed"):
        await Duty("takeover", work, timeout=60.0, lost=lambda: True).run()


@pytest.mark.parametrize(
    ("failure", "longest"),
    [
        (psycopg.OperationalError("the connection is closed"), OUTAGE_PAUSE_SECONDS),
        (ConnectionRefusedError(), OUTAGE_PAUSE_SECONDS),
        (TimeoutError(), LONGEST_PAUSE_SECONDS),
        (psycopg.errors.LockNotAvailable(), LONGEST_PAUSE_SECONDS),
    ],
    ids=["connection lost", "connection refused", "too slow", "locked"],
)
async def test_duty_is_tried_often_while_the_database_is_away(
    failure: Exception, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind PgBouncer the duties go on during an outage, and what is due must be done soon after it."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def work() -> float:
        if len(pauses) == 20:
            raise asyncio.CancelledError
        raise failure

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await Duty("crons", work, timeout=60.0).run()
    assert 0.5 * longest <= max(pauses) <= longest


async def test_behind_pgbouncer_every_duty_is_done(database: Database, database_url: str) -> None:
    """Without a session nobody can hold the lock; everybody does the duties."""
    settings = load_settings(
        {"REAPER_INTERVAL_SECONDS": "0.1", "HOLDFAST_PGBOUNCER": "true"}, database_url=database_url
    )
    assert settings.session_url is None
    worker_id = await online_worker(database)
    run_id = await running(database, worker_id)
    stopped = await online_worker(database)
    await query(
        database,
        "UPDATE worker SET status = 'offline', stopped_at = now() - interval '9 days' WHERE worker_id = %s RETURNING 1",
        stopped,
    )
    await expire(database, worker_id)
    async with leading(settings):

        async def done() -> bool:
            swept = not await query(database, "SELECT 1 FROM worker WHERE worker_id = %s", stopped)
            return swept and (await run_row(database, run_id))["status"] == "pending"

        await until(done, "the run is released, and the worker forgotten")


async def test_leader_asks_the_server_although_a_missing_worker_has_a_long_grace(
    settings: Settings, database: Database
) -> None:
    """The server ends the session of a leader that asks nothing for seconds."""
    patient = settings.model_copy(update={"session_grace": 60.0})
    worker_id = await online_worker(database)
    await query(
        database,
        "UPDATE worker SET backend_pid = 0, server_start = pg_postmaster_start_time() WHERE worker_id = %s RETURNING 1",
        worker_id,
    )
    looks: list[float] = []
    async with leading(patient) as upkeep:
        look = upkeep._look

        async def counted(session: Any) -> float:
            looks.append(await look(session))
            return looks[-1]

        upkeep._look = counted  # type: ignore[method-assign]
        await until_true(lambda: len(looks) > 2, "it has looked several times")
    assert max(looks) <= 2 * patient.reaper_interval
