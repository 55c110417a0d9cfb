"""What has outlived its use goes; what somebody may still need stays."""

from __future__ import annotations

from uuid import UUID, uuid4

from holdfast.db.connect import Database
from holdfast.settings import Settings, load_settings
from holdfast.streams.log import read_after
from holdfast.upkeep.sweeper import Sweeper
from tests.support.smoke import ended, post, working


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
        await Sweeper(database).run()
        async with database.connection() as connection:
            left = await read_after(connection, thread_id, 0)
        assert {event.run_id for event in left} == {recent["run_id"]}
        await age(database, recent["run_id"])
        await Sweeper(database).run()
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
    await Sweeper(database).run()
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
        await Sweeper(database).run()
        assert await count(database, "SELECT count(*) FROM thread") == 2
        async with database.transaction() as connection:
            await connection.execute("UPDATE thread SET hidden_at = hidden_at - interval '2 minutes'")
        await Sweeper(database).run()
        for table in ("thread", "run"):
            assert await count(database, f"SELECT count(*) FROM {table}") == 1
        for table in ("event", "checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            distinct = f"SELECT count(DISTINCT thread_id::text) FROM {table}"
            assert await count(database, distinct) == 1
        async with database.connection() as connection:
            assert await read_after(connection, kept["thread_id"], 0)
    finally:
        await database.close()
