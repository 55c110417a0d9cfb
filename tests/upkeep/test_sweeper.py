"""What has outlived its use goes; what somebody may still need stays."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from uuid import UUID, uuid4

from holdfast.db.connect import Database
from holdfast.engine.create import create_thread
from holdfast.graphs.checkpointer import CheckpointerSection
from holdfast.resources.threads import TtlStrategy, change_thread, get_thread, get_ttl
from holdfast.settings import Settings, load_settings
from holdfast.streams.log import read_after
from holdfast.upkeep.sweeper import Sweeper
from holdfast.upkeep.sweeps import SWEEP_EXPIRED
from tests.support.smoke import ended, post, working
from tests.support.waiting import until


async def count(database: Database, statement: str) -> int:
    async with database.connection() as connection:
        row = await (await connection.execute(statement)).fetchone()
    assert row is not None
    number: int = row["count"]
    return number


async def age(database: Database, run_id: UUID) -> None:
    """Make a run and all that it said two days old."""
    async with database.transaction() as connection:
        await connection.execute(
            "UPDATE run SET finished_at = finished_at - interval '2 days' WHERE run_id = %s", (run_id,)
        )
        await connection.execute(
            "UPDATE event SET created_at = created_at - interval '2 days' WHERE run_id = %s", (run_id,)
        )


async def test_old_events_expire_and_the_numbering_goes_on(settings: Settings, database: Database) -> None:
    async with working(settings):
        thread_id = uuid4()
        old = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
        await age(database, old["run_id"])
        recent = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
        await Sweeper(database).finish()
        async with database.connection() as connection:
            left = await read_after(connection, thread_id, 0)
        assert {event.run_id for event in left} == {recent["run_id"]}
        await age(database, recent["run_id"])
        await Sweeper(database).finish()
        assert await count(database, "SELECT count(*) FROM event") == 0
        again = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
    assert again["first_seq"] == left[-1].seq + 1


async def test_the_events_of_an_unfinished_run_stay_however_old(settings: Settings, database: Database) -> None:
    async with working(settings):
        thread_id = uuid4()
        done = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
        await age(database, done["run_id"])
    run_id = await post(database, "steps", {"seconds": 0}, thread_id)
    async with database.transaction() as connection:
        await connection.execute(
            "INSERT INTO event (thread_id, seq, run_id, kind, data, created_at) "
            "VALUES (%s, 1000, %s, 'values', '{}', now() - interval '2 days')",
            (thread_id, run_id),
        )
    await Sweeper(database).finish()
    async with database.connection() as connection:
        assert [event.seq for event in await read_after(connection, thread_id, 0)] == [1000]


async def test_the_thread_of_a_stateless_run_is_swept_with_everything(database_url: str) -> None:
    settings = load_settings({"HOLDFAST_TEMPORARY_THREAD_TTL_SECONDS": "60"}, database_url=database_url)
    database = Database(settings, "test")
    await database.open()
    try:
        async with working(settings):
            await ended(database, await post(database, "steps", {"seconds": 0}, temporary=True))
            kept = await ended(database, await post(database, "steps", {"seconds": 0}))
        await Sweeper(database).finish()
        assert await count(database, "SELECT count(*) FROM thread") == 2
        async with database.transaction() as connection:
            await connection.execute("UPDATE thread SET hidden_at = hidden_at - interval '2 minutes'")
        await Sweeper(database).finish()
        for table in ("thread", "run"):
            assert await count(database, f"SELECT count(*) FROM {table}") == 1
        for table in ("event", "checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            distinct = f"SELECT count(DISTINCT thread_id::text) FROM {table}"
            assert await count(database, distinct) == 1
        async with database.connection() as connection:
            assert await read_after(connection, kept["thread_id"], 0)
    finally:
        await database.close()


async def thread_with_ttl(database: Database, minutes: float, strategy: TtlStrategy) -> UUID:
    """A thread with some history, whose time to live began now."""
    run = await ended(database, await post(database, "steps", {"seconds": 0}))
    thread_id: UUID = run["thread_id"]
    async with database.connection() as connection:
        await change_thread(connection, thread_id, {}, (minutes, strategy))
    return thread_id


async def rest(database: Database, thread_id: UUID, minutes: float, *, since_activity: float | None = None) -> None:
    """Let time pass for a thread: since its time to live was set, and since something happened in it."""
    async with database.transaction() as connection:
        await connection.execute(
            "UPDATE thread SET expires_at = expires_at - %s * interval '1 minute', "
            "updated_at = now() - %s * interval '1 minute' WHERE thread_id = %s",
            (minutes, minutes if since_activity is None else since_activity, thread_id),
        )


async def test_a_thread_is_deleted_when_its_time_to_live_has_passed(settings: Settings, database: Database) -> None:
    async with working(settings):
        doomed = await thread_with_ttl(database, 10, "delete")
        young = await thread_with_ttl(database, 30, "delete")
        kept = (await ended(database, await post(database, "steps", {"seconds": 0})))["thread_id"]
    for thread_id in (doomed, young, kept):
        await rest(database, thread_id, 11)
    await Sweeper(database).finish()
    for table in ("thread", "run", "event", "checkpoints", "checkpoint_blobs", "checkpoint_writes"):
        async with database.connection() as connection:
            cursor = await connection.execute(f"SELECT DISTINCT thread_id::text FROM {table}".encode())
            left = {UUID(row["thread_id"]) for row in await cursor.fetchall()}
        assert left == {young, kept}, table


async def test_activity_puts_a_threads_end_off(settings: Settings, database: Database) -> None:
    async with working(settings):
        thread_id = await thread_with_ttl(database, 10, "delete")
    await rest(database, thread_id, 11, since_activity=4)
    await Sweeper(database).finish()
    async with database.connection() as connection:
        ttl = await get_ttl(connection, thread_id)
        cursor = await connection.execute(
            "SELECT expires_at = updated_at + interval '10 minutes' AS count FROM thread WHERE thread_id = %s",
            (thread_id,),
        )
        row = await cursor.fetchone()
    assert ttl is not None
    assert row == {"count": True}
    await rest(database, thread_id, 7, since_activity=11)
    await Sweeper(database).finish()
    assert await count(database, "SELECT count(*) FROM thread") == 0


async def test_a_thread_does_not_end_under_an_unfinished_run(settings: Settings, database: Database) -> None:
    async with working(settings):
        thread_id = await thread_with_ttl(database, 10, "delete")
    await post(database, "steps", {"seconds": 0}, thread_id)
    await rest(database, thread_id, 11)
    await Sweeper(database).finish()
    assert await count(database, "SELECT count(*) FROM thread") == 1


async def test_a_run_created_while_the_sweeper_looks_keeps_its_thread(settings: Settings, database: Database) -> None:
    """The sweeper finds the thread expired, waits for its row, and must look again."""
    async with working(settings):
        thread_id = await thread_with_ttl(database, 10, "delete")
    await rest(database, thread_id, 11)
    waiting = SWEEP_EXPIRED.replace("SKIP LOCKED", "")
    async with database.transaction() as creating:
        await creating.execute(
            "UPDATE thread SET status = 'busy', updated_at = now() WHERE thread_id = %s", (thread_id,)
        )

        async def sweep() -> int:
            async with database.connection() as connection:
                return (await connection.execute(waiting.encode(), {"batch": 10})).rowcount

        async def waits() -> bool:
            statement = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%doomed%'"
            return await count(database, statement) > 0

        sweeping = asyncio.create_task(sweep())
        await until(waits, "the sweeper waits for the thread")
    assert await sweeping == 0


async def test_only_the_latest_state_is_kept_if_that_was_asked_for(settings: Settings, database: Database) -> None:
    async with working(settings):
        thread_id = await thread_with_ttl(database, 10, "keep_latest")
        assert await count(database, "SELECT count(*) FROM checkpoints") > 1
        await rest(database, thread_id, 11)
        await Sweeper(database).finish()
        assert await count(database, "SELECT count(*) FROM checkpoints") == 1
        again = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
    assert again["status"] == "success"
    async with database.connection() as connection:
        thread = await get_thread(connection, thread_id)
        ttl = await get_ttl(connection, thread_id)
    assert len(thread["values"]["done"]) == 10
    assert ttl is not None
    assert ttl["expires_at"] > datetime.now(UTC)


async def test_a_project_says_how_often_and_how_many_threads_expire(database: Database) -> None:
    async with database.transaction() as connection:
        for _ in range(3):
            await create_thread(connection, uuid4(), {}, ttl=(10, "delete"))
        await connection.execute(
            "UPDATE thread SET expires_at = now() - interval '1 hour', updated_at = now() - interval '1 day'"
        )
    threads = "SELECT count(*) FROM thread"
    sweeper = Sweeper(database, CheckpointerSection(sweep_interval=3600, sweep_limit=2), budget=60)
    await sweeper.run()
    assert await count(database, threads) == 1
    await sweeper.run()
    assert await count(database, threads) == 1, "its interval has not passed"
    await Sweeper(database).finish()
    assert await count(database, threads) == 0
