"""A row that is locked, or takes too long, delays no other: it is set aside and tried again later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside, process_rows
from holdfast.db.time_limit import TooSlow
from holdfast.engine.children.families import cancel_abandoned
from holdfast.engine.dead_letters.graph_gone import end_graphless_runs
from holdfast.engine.reap import release_orphans
from holdfast.settings import Settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.items import ItemSweeper
from holdfast.upkeep.leader import Upkeep
from holdfast.upkeep.sweeper import Sweeper
from tests.engine.scene import create, declare_lost, online_worker
from tests.support.postgres_proxy import PostgresProxy
from tests.support.records import query, run_row
from tests.upkeep.test_bad_rows import QUESTION

pytestmark = pytest.mark.expects_errors("upkeep.row_set_aside")

# A quarter of it is what a row may take.
DATABASE_TIMEOUT = 12.0
# Longer than anything here takes, and shorter than a test that waits for ever.
PATIENCE = 60.0

SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_sleep(TG_ARGV[0]::float8); RETURN coalesce(NEW, OLD); END $$
"""


@asynccontextmanager
async def impatient(settings: Settings, **changes: object) -> AsyncIterator[Database]:
    """The database of a process with a short DATABASE_TIMEOUT."""
    database = Database(settings.model_copy(update={"database_timeout": DATABASE_TIMEOUT, **changes}), "test")
    # Not by its own `open`, and not with its own timeout: a busy machine may take longer to connect.
    database.pool.timeout = PATIENCE
    await database.pool.open(wait=True, timeout=PATIENCE)
    try:
        async with asyncio.timeout(PATIENCE):
            yield database
    finally:
        await database.close()


@asynccontextmanager
async def locked(database: Database, thread_id: UUID) -> AsyncIterator[None]:
    async with database.transaction() as connection:
        await connection.execute("SELECT 1 FROM thread WHERE thread_id = %s FOR UPDATE", (thread_id,))
        yield


async def orphan(database: Database, crashes: int = 0) -> UUID:
    """A run whose worker is lost, and whose end somebody is to be told of."""
    worker_id = await online_worker(database)
    run_id: UUID = (await create(database, uuid4())).run["run_id"]
    await query(
        database,
        "UPDATE run SET status = 'running', worker_id = %s, fence = 1, attempt = 1, started_at = now(), "
        "crashes = %s, crashes_in_a_row = %s, webhook = 'https://example.com/' WHERE run_id = %s RETURNING 1",
        worker_id,
        crashes,
        crashes,
        run_id,
    )
    await declare_lost(database, worker_id)
    return run_id


@pytest.mark.parametrize("crashes", [0, 9], ids=["retried", "poison"])
async def test_take_over_goes_round_a_thread_that_is_locked(
    settings: Settings, database: Database, crashes: int
) -> None:
    runs = [await orphan(database, crashes) for _ in range(3)]
    bad = await run_row(database, runs[0])
    async with impatient(settings) as upkeep, locked(database, bad["thread_id"]):
        aside = RowsSetAside("takeover", "run_id", Metrics())
        released = await release_orphans(upkeep, max_crashes=3, aside=aside)
        assert {row["run_id"] for row in released} == set(runs[1:])
        assert aside.ids() == [bad["run_id"]]


async def test_poison_runs_that_end_too_slowly_together_end_one_by_one(settings: Settings, database: Database) -> None:
    async with database.transaction() as connection:
        await connection.execute(SLOW)
        await connection.execute(
            "CREATE TRIGGER slow BEFORE INSERT ON webhook_delivery FOR EACH ROW EXECUTE FUNCTION slow('0.25')"
        )
    # Together they take longer than a quarter of the timeout; each alone a tenth of that, on a busy machine more.
    runs = {await orphan(database, 9) for _ in range(12)}
    async with impatient(settings, database_timeout=10.0) as upkeep:
        aside = RowsSetAside("takeover", "run_id", Metrics())
        ended: set[UUID] = set()
        while ended < runs:
            # Some of them each time.
            released = await release_orphans(upkeep, max_crashes=3, aside=aside)
            assert released
            ended |= {row["run_id"] for row in released}
    assert {row["dead_letter"] for row in await query(database, "SELECT dead_letter FROM run")} == {"poison"}


async def test_families_go_round_a_child_whose_thread_is_locked(settings: Settings, database: Database) -> None:
    parents, children = [uuid4(), uuid4()], []
    # Two children of the first parent: the one behind the locked thread is cancelled, too.
    threads = sorted(uuid4() for _ in range(3))
    for parent, thread_id in zip([parents[0], parents[0], parents[1]], threads, strict=True):
        children.append((await create(database, thread_id)).run["run_id"])
        await query(database, "UPDATE run SET parent_run_id = %s WHERE run_id = %s RETURNING 1", parent, children[-1])
    await query(database, "INSERT INTO abandoned (run_id) SELECT unnest(%s::uuid[]) RETURNING 1", parents)
    async with impatient(settings) as upkeep:
        aside = RowsSetAside("families", "run_id", Metrics())
        async with locked(database, threads[0]):
            stopped, _ = await cancel_abandoned(upkeep, PostgresSignals(upkeep), 10, aside)
            assert stopped == 1
            assert [(await run_row(database, run_id))["status"] for run_id in children] == [
                "pending",
                "interrupted",
                "interrupted",
            ]
            assert aside.ids() == parents[:1]
        again = RowsSetAside("families", "run_id", Metrics())
        assert await cancel_abandoned(upkeep, PostgresSignals(upkeep), 10, again) == (1, 1)


async def test_letters_go_round_a_thread_that_is_locked(settings: Settings, database: Database) -> None:
    runs = [(await create(database, uuid4())).run for _ in range(3)]
    await query(database, "UPDATE run SET ready_at = now() - interval '2 days' RETURNING 1")
    async with impatient(settings) as upkeep, locked(database, runs[0]["thread_id"]):
        aside = RowsSetAside("letters", "run_id", Metrics())
        ended = await end_graphless_runs(upkeep, ["graph"], after=60, batch=10, aside=aside)
        assert {row["run_id"] for row in ended} == {run["run_id"] for run in runs[1:]}
        assert aside.ids() == [runs[0]["run_id"]]


async def test_no_row_is_blamed_for_a_server_that_does_not_answer(
    settings: Settings, database: Database, database_url: str
) -> None:
    runs = [await orphan(database) for _ in range(2)]
    rows = [await run_row(database, run_id) for run_id in runs]
    async with PostgresProxy(database_url) as proxy:
        changes = {"database_url": proxy.url, "database_timeout": 1.0}
        async with impatient(settings, **changes) as upkeep:
            aside = RowsSetAside("takeover", "run_id", Metrics())

            async def ask(_: object) -> list[int]:
                proxy.fall_silent()
                async with upkeep.connection() as connection:
                    await connection.execute("SELECT 1")
                return [1]

            with capture_logs() as logs, pytest.raises(Exception) as failure:
                await process_rows(upkeep, rows, ask, aside)
            assert is_outage(failure.value)
            assert aside.ids() == []
            assert [line for line in logs if line["event"] == "upkeep.row_set_aside"] == []
            proxy.restore()


async def test_no_row_is_blamed_for_the_wait_for_a_connection(settings: Settings, database: Database) -> None:
    rows = [await run_row(database, await orphan(database))]
    async with impatient(settings, pool_max=1) as upkeep:
        aside = RowsSetAside("takeover", "run_id", Metrics())

        async def ask(_: object) -> list[int]:
            async with upkeep.connection() as connection:
                await connection.execute("SELECT 1")
            return [1]

        seconds = 2.0
        async with upkeep.connection():
            asking = asyncio.create_task(process_rows(upkeep, rows, ask, aside, seconds=seconds))
            # Longer than the row has.
            await asyncio.sleep(2 * seconds)
            assert upkeep.pool.get_stats()["requests_waiting"] == 1
        assert await asking == [1]
        assert aside.ids() == []


# --- sweeps -----------------------------------------------------------------------------------------------------------


async def slow_deletes(database: Database, table: str, seconds: float, condition: str = "true") -> None:
    async with database.transaction() as connection:
        await connection.execute(SLOW)
        trigger = f"CREATE TRIGGER slow BEFORE DELETE ON {table} FOR EACH ROW WHEN ({condition})"
        await connection.execute(f"{trigger} EXECUTE FUNCTION slow('{seconds}')".encode())


async def old_threads(database: Database, number: int) -> list[UUID]:
    """Threads of finished stateless runs, in the order in which they are swept."""
    threads: list[UUID] = []
    for place in range(number):
        threads.append((await create(database, uuid4())).run["thread_id"])
        await query(
            database,
            "UPDATE thread SET temporary = true, hidden_at = now() - interval '9 days' + make_interval(secs => %s) "
            "WHERE thread_id = %s RETURNING 1",
            place,
            threads[-1],
        )
    await query(database, "DELETE FROM run RETURNING 1")
    return threads


async def sweep(sweeper: Sweeper) -> None:
    """Sweep without a pause since the last time."""
    for chore in sweeper._chores:
        chore.due = 0.0
    await sweeper.run()


async def sweep_until_left(sweeper: Sweeper, database: Database, left: set[UUID]) -> None:
    while {row["thread_id"] for row in await query(database, "SELECT thread_id FROM thread")} != left:
        await sweep(sweeper)


async def test_deadlines_go_round_threads_that_are_locked(settings: Settings, database: Database) -> None:
    """Within one turn of the duty, however many of them come first."""
    threads = [uuid4() for _ in range(4)]
    for number, thread_id in enumerate(threads):
        run_id = (await create(database, thread_id)).run["run_id"]
        await query(database, QUESTION, f"locked{number}", "60 s", run_id)
    good = (await create(database, uuid4())).run["run_id"]
    await query(database, QUESTION, "good", "1 s", good)
    async with impatient(settings, database_timeout=8.0) as upkeep:
        [duty] = [
            duty for duty in Upkeep(upkeep, PostgresSignals(upkeep), Metrics()).duties if duty.name == "deadlines"
        ]
        async with database.transaction() as connection:
            await connection.execute("SELECT 1 FROM thread WHERE thread_id = ANY(%s) FOR UPDATE", (threads,))
            with capture_logs() as logs:
                async with asyncio.timeout(duty.timeout):
                    await duty.work()
    left = await query(database, "SELECT interrupt_id FROM interrupt WHERE answered_by IS NULL")
    assert {row["interrupt_id"] for row in left} == {f"locked{number}" for number in range(4)}
    reported = [line["interrupt_id"] for line in logs if line["event"] == "upkeep.row_set_aside"]
    assert sorted(reported) == [f"locked{number}" for number in range(4)]


async def test_a_sweep_that_takes_too_long_takes_less(settings: Settings, database: Database) -> None:
    await slow_deletes(database, "thread", 0.1)
    await old_threads(database, 20)
    async with impatient(settings, database_timeout=0.4) as upkeep:
        await sweep_until_left(Sweeper(upkeep, Metrics()), database, set())


async def test_a_thread_that_cannot_be_swept_in_time_delays_no_other(settings: Settings, database: Database) -> None:
    bad, *_ = await old_threads(database, 4)
    await slow_deletes(database, "thread", PATIENCE, f"OLD.thread_id = '{bad}'")
    async with impatient(settings, database_timeout=0.4) as upkeep:
        with capture_logs() as logs:
            await sweep_until_left(Sweeper(upkeep, Metrics()), database, {bad})
    reported = [(line["duty"], line["thread_id"]) for line in logs if line["event"] == "upkeep.row_set_aside"]
    assert ("sweep of temporary threads", str(bad)) in reported


async def test_what_cannot_be_swept_at_all_delays_no_other(database: Database) -> None:
    _, bad, *_ = await old_threads(database, 4)
    async with database.transaction() as connection:
        await connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'this row is bad'; END $$"
        )
        trigger = f"CREATE TRIGGER refuse BEFORE DELETE ON thread FOR EACH ROW WHEN (OLD.thread_id = '{bad}')"
        await connection.execute(f"{trigger} EXECUTE FUNCTION refuse()".encode())
    # `holdfast sweep` goes on, too.
    removed = await Sweeper(database, Metrics()).finish()
    assert removed["temporary threads"] == 3
    assert [row["thread_id"] for row in await query(database, "SELECT thread_id FROM thread")] == [bad]


AGE_HISTORY = """
UPDATE thread SET status = 'idle', has_state = true, created_at = now() - interval '2 days',
                  state_updated_at = now() - interval '1 day' WHERE thread_id = %s RETURNING 1
"""
INSERT_CHECKPOINT = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata)
VALUES (%s, '', %s, '{}', '{}') RETURNING 1
"""


async def with_history(database: Database, checkpoints: int) -> UUID:
    thread_id: UUID = (await create(database, uuid4())).run["thread_id"]
    await query(database, "DELETE FROM run RETURNING 1")
    await query(database, AGE_HISTORY, thread_id)
    for number in range(checkpoints):
        checkpoint_id = f"1e000000-0000-6{number:03d}-8000-000000000000"
        await query(database, INSERT_CHECKPOINT, str(thread_id), checkpoint_id)
    return thread_id


async def test_a_history_that_takes_too_long_goes_in_smaller_parts(settings: Settings, database: Database) -> None:
    await slow_deletes(database, "checkpoints", 0.2)
    await with_history(database, 13)
    async with impatient(settings, database_timeout=0.4, checkpoint_ttl=60.0) as upkeep:
        sweeper = Sweeper(upkeep, Metrics())
        while len(await query(database, "SELECT 1 FROM checkpoints")) > 1:
            await sweep(sweeper)


async def test_a_history_that_cannot_be_pruned_in_time_delays_no_other(settings: Settings, database: Database) -> None:
    bad, good = await with_history(database, 2), await with_history(database, 2)
    await query(
        database,
        "UPDATE thread SET created_at = now() - interval '3 days' WHERE thread_id = %s RETURNING 1",
        bad,
    )
    await slow_deletes(database, "checkpoints", PATIENCE, f"OLD.thread_id = '{bad}'")
    async with impatient(settings, database_timeout=0.4, checkpoint_ttl=60.0) as upkeep:
        sweeper = Sweeper(upkeep, Metrics())
        left = "SELECT 1 FROM checkpoints WHERE thread_id = %s"
        with capture_logs() as logs:
            while len(await query(database, left, str(good))) > 1:
                await sweep(sweeper)
    assert len(await query(database, left, str(bad))) == 2
    assert str(bad) in [line["thread_id"] for line in logs if line["event"] == "upkeep.row_set_aside"]


EXPIRE_HISTORY = """
UPDATE thread SET ttl_minutes = 1, ttl_strategy = 'keep_latest', expires_at = now() - interval '1 hour',
                  updated_at = now() - interval '1 day' WHERE thread_id = %s RETURNING 1
"""


async def test_an_expired_history_that_cannot_be_pruned_in_time_delays_no_other(
    settings: Settings, database: Database
) -> None:
    bad, held, good = [await with_history(database, 2) for _ in range(3)]
    for thread_id in (bad, held, good):
        await query(database, EXPIRE_HISTORY, thread_id)
    await slow_deletes(database, "checkpoints", PATIENCE, f"OLD.thread_id = '{bad}'")
    left = "SELECT count(*) FROM checkpoints GROUP BY thread_id HAVING thread_id = %s"
    async with impatient(settings, database_timeout=0.4) as upkeep, locked(database, held):
        sweeper = Sweeper(upkeep, Metrics())
        while (await query(database, left, str(good)))[0]["count"] > 1:
            await sweep(sweeper)
    assert [(await query(database, left, str(one)))[0]["count"] for one in (bad, held)] == [2, 2]


async def test_items_that_take_too_long_together_go_one_by_one(settings: Settings, database: Database) -> None:
    await slow_deletes(database, "store", 0.1)
    await query(
        database,
        "INSERT INTO store (prefix, key, value, expires_at) "
        "SELECT 'a', n::text, '{}', now() - interval '1 hour' FROM generate_series(1, 15) n RETURNING 1",
    )
    async with impatient(settings, database_timeout=0.4) as upkeep:
        sweeper = ItemSweeper(upkeep, Metrics(), 3600)
        while await query(database, "SELECT 1 FROM store"):
            # TimeoutError: on a busy machine the server is not asked in time whether it answers.
            with contextlib.suppress(TooSlow, TimeoutError):
                await sweeper.run()
