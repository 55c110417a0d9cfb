"""What has outlived its use goes; what somebody may still need stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.db.pages import PageLimits
from holdfast.engine.create import create_thread
from holdfast.engine.new_run import NewThread
from holdfast.engine.runs import delete_run, get_run, list_runs
from holdfast.engine.threads import TtlStrategy, change_thread, get_thread, get_ttl
from holdfast.errors import NotFound
from holdfast.graphs.checkpointer import CheckpointerSection
from holdfast.settings import Settings, load_settings
from holdfast.streams.log import read_after
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.batch_size import BatchSize
from holdfast.upkeep.sweeper import Sweeper
from holdfast.upkeep.sweeps import SWEEP_EXPIRED, SWEEP_RESTING
from tests.support.ageing import age_thread
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
        await Sweeper(database, Metrics()).finish()
        async with database.connection() as connection:
            left = (await read_after(connection, thread_id, 0)).events
        assert {event.run_id for event in left} == {recent["run_id"]}
        await age(database, recent["run_id"])
        await Sweeper(database, Metrics()).finish()
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
    await Sweeper(database, Metrics()).finish()
    async with database.connection() as connection:
        assert [event.seq for event in (await read_after(connection, thread_id, 0)).events] == [1000]


async def test_the_thread_of_a_stateless_run_is_swept_with_everything(database_url: str) -> None:
    settings = load_settings({"HOLDFAST_TEMPORARY_THREAD_TTL_SECONDS": "60"}, database_url=database_url)
    database = Database(settings, "test")
    await database.open()
    try:
        async with working(settings):
            await ended(database, await post(database, "steps", {"seconds": 0}, temporary=True))
            kept = await ended(database, await post(database, "steps", {"seconds": 0}))
        await Sweeper(database, Metrics()).finish()
        assert await count(database, "SELECT count(*) FROM thread") == 2
        async with database.transaction() as connection:
            await connection.execute("UPDATE thread SET hidden_at = hidden_at - interval '2 minutes'")
        await Sweeper(database, Metrics()).finish()
        for table in ("thread", "run"):
            assert await count(database, f"SELECT count(*) FROM {table}") == 1
        for table in ("event", "checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            distinct = f"SELECT count(DISTINCT thread_id::text) FROM {table}"
            assert await count(database, distinct) == 1
        async with database.connection() as connection:
            assert (await read_after(connection, kept["thread_id"], 0)).events
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
    await Sweeper(database, Metrics()).finish()
    for table in ("thread", "run", "event", "checkpoints", "checkpoint_blobs", "checkpoint_writes"):
        async with database.connection() as connection:
            cursor = await connection.execute(f"SELECT DISTINCT thread_id::text FROM {table}".encode())
            left = {UUID(row["thread_id"]) for row in await cursor.fetchall()}
        assert left == {young, kept}, table


async def test_activity_puts_a_threads_end_off(settings: Settings, database: Database) -> None:
    async with working(settings):
        thread_id = await thread_with_ttl(database, 10, "delete")
    await rest(database, thread_id, 11, since_activity=4)
    await Sweeper(database, Metrics()).finish()
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
    await Sweeper(database, Metrics()).finish()
    assert await count(database, "SELECT count(*) FROM thread") == 0


async def test_a_thread_does_not_end_under_an_unfinished_run(settings: Settings, database: Database) -> None:
    async with working(settings):
        thread_id = await thread_with_ttl(database, 10, "delete")
    await post(database, "steps", {"seconds": 0}, thread_id)
    await rest(database, thread_id, 11)
    await Sweeper(database, Metrics()).finish()
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
                return (await connection.execute(waiting.encode(), {"batch": 10, "aside": []})).rowcount

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
        await Sweeper(database, Metrics()).finish()
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
            await create_thread(connection, NewThread(uuid4(), {}, (10, "delete")))
        await connection.execute(
            "UPDATE thread SET expires_at = now() - interval '1 hour', updated_at = now() - interval '1 day'"
        )
    threads = "SELECT count(*) FROM thread"
    sweeper = Sweeper(database, Metrics(), CheckpointerSection(sweep_interval=3600, sweep_limit=2), budget=60)
    await sweeper.run()
    assert await count(database, threads) == 1
    await sweeper.run()
    assert await count(database, threads) == 1, "its interval has not passed"
    await Sweeper(database, Metrics()).finish()
    assert await count(database, threads) == 0


# --- what has a time to live by the settings --------------------------------------------------------------------------


@asynccontextmanager
async def kept_for(database_url: str, **seconds: str) -> AsyncIterator[Database]:
    database = Database(load_settings(seconds, database_url=database_url), "test")
    await database.open()
    try:
        yield database
    finally:
        await database.close()


async def test_a_finished_run_goes_after_its_events_and_leaves_its_thread(
    settings: Settings, database_url: str
) -> None:
    async with kept_for(database_url, FINISHED_RUN_TTL_SECONDS="172800") as database, working(settings):
        thread_id = uuid4()
        old = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
        dead = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
        async with database.transaction() as connection:
            await connection.execute(
                "UPDATE run SET dead_letter = 'exhausted', status = 'error' WHERE run_id = %s", (dead["run_id"],)
            )
        await age_thread(database, thread_id, days=1.5)
        swept = Sweeper(database, Metrics())
        await swept.finish()
        assert (swept.removed["runs' events"], swept.removed["finished runs"]) == (2, 0)
        await age_thread(database, thread_id, days=1)
        recent = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
        assert (await Sweeper(database, Metrics()).count())["finished runs"] == 1
        await Sweeper(database, Metrics()).finish()
        async with database.connection() as connection:
            left = (await list_runs(connection, thread_id, None, PageLimits(10, 0, 10**6))).rows
            assert [run["run_id"] for run in left] == [recent["run_id"], dead["run_id"]]
            with pytest.raises(NotFound):
                await get_run(connection, old["run_id"])
            assert len((await get_thread(connection, thread_id))["values"]["done"]) == 15
        again = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
    assert again["status"] == "success"


async def test_a_run_that_waits_for_an_answer_stays(settings: Settings, database_url: str) -> None:
    async with kept_for(database_url, FINISHED_RUN_TTL_SECONDS="172800") as database, working(settings):
        asked = await ended(database, await post(database, "ask", {"question": "go on?"}, thread_id := uuid4()))
        await age_thread(database, thread_id, days=3)
        assert (await Sweeper(database, Metrics()).count())["finished runs"] == 0
        await Sweeper(database, Metrics()).finish()
        async with database.connection() as connection:
            assert (await get_run(connection, asked["run_id"]))["status"] == "success"
            await connection.execute("UPDATE interrupt SET settled_at = now()")
        assert (await Sweeper(database, Metrics()).finish())["finished runs"] == 1


async def test_without_a_time_to_live_runs_states_and_threads_stay(settings: Settings, database: Database) -> None:
    async with working(settings):
        run = await ended(database, await post(database, "steps", {"seconds": 0}))
    await age_thread(database, run["thread_id"], days=3650)
    states = await count(database, "SELECT count(*) FROM checkpoints")
    await Sweeper(database, Metrics()).finish()
    assert await count(database, "SELECT count(*) FROM run") == 1
    assert await count(database, "SELECT count(*) FROM checkpoints") == states > 1


async def test_a_thread_at_rest_goes_unless_it_was_given_another_time(settings: Settings, database_url: str) -> None:
    async with kept_for(database_url, THREAD_TTL_SECONDS="86400") as database:
        async with working(settings):
            resting = (await ended(database, await post(database, "steps", {"seconds": 0})))["thread_id"]
            own = await thread_with_ttl(database, 60 * 24 * 30, "delete")
            busy = (await ended(database, await post(database, "steps", {"seconds": 0})))["thread_id"]
            active = (await ended(database, await post(database, "steps", {"seconds": 0})))["thread_id"]
        cron = uuid4()
        async with database.transaction() as connection:
            await create_thread(connection, NewThread(cron, {}))
            await connection.execute(
                "INSERT INTO assistant (assistant_id, graph_id, name) VALUES (%(id)s, 'steps', 'steps')", {"id": cron}
            )
            await connection.execute(
                "INSERT INTO cron (cron_id, assistant_id, thread_id, schedule, next_run_date, payload, template) "
                "VALUES (%(id)s, %(id)s, %(id)s, '0 0 1 * *', now() + interval '20 days', '{}', '{}')",
                {"id": cron},
            )
        await post(database, "steps", {"seconds": 0}, busy)
        for thread_id in (resting, own, busy, cron):
            await age_thread(database, thread_id, days=2)
        await age_thread(database, active, hours=23)
        assert (await Sweeper(database, Metrics()).count())["resting threads"] == 1
        await Sweeper(database, Metrics()).finish()
        for table in ("thread", "run", "event", "checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            async with database.connection() as connection:
                cursor = await connection.execute(f"SELECT DISTINCT thread_id::text FROM {table}".encode())
                left = {UUID(row["thread_id"]) for row in await cursor.fetchall()}
            assert left - {cron} <= {own, busy, active}, table
        assert await count(database, "SELECT count(*) FROM thread") == 4
        async with database.transaction() as connection:
            await connection.execute("UPDATE cron SET next_run_date = NULL")
        await Sweeper(database, Metrics()).finish()
        assert await count(database, "SELECT count(*) FROM thread") == 3, "a cron that is over keeps no thread"


async def test_a_run_created_while_resting_threads_are_swept_keeps_its_thread(
    settings: Settings, database: Database
) -> None:
    """The sweeper finds the thread at rest, waits for its row, and must look again."""
    thread_id = uuid4()
    async with database.transaction() as connection:
        await create_thread(connection, NewThread(thread_id, {}))
        await connection.execute("UPDATE thread SET updated_at = now() - interval '2 days'")
    waiting = SWEEP_RESTING.replace("SKIP LOCKED", "")
    async with database.transaction() as creating:
        await creating.execute("UPDATE thread SET status = 'busy' WHERE thread_id = %s", (thread_id,))

        async def sweep() -> int:
            async with database.connection() as connection:
                return (
                    await connection.execute(waiting.encode(), {"batch": 10, "ttl": 86_400.0, "aside": []})
                ).rowcount

        async def waits() -> bool:
            statement = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%doomed%'"
            return await count(database, statement) > 0

        sweeping = asyncio.create_task(sweep())
        await until(waits, "the sweeper waits for the thread")
    assert await sweeping == 0


async def test_the_events_of_undone_runs_go_where_no_other_run_is(settings: Settings, database: Database) -> None:
    async with working(settings):
        thread_id = uuid4()
        undone = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
        await delete_run(database, thread_id, undone["run_id"])
        await Sweeper(database, Metrics()).finish()
        assert await count(database, "SELECT count(*) FROM event") > 0, "whoever watches the thread may come back"
        await age_thread(database, thread_id, days=2)
        young = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
        await delete_run(database, thread_id, young["run_id"])
        await Sweeper(database, Metrics()).finish()
        async with database.connection() as connection:
            left = (await read_after(connection, thread_id, 0)).events
        assert {event.run_id for event in left} == {young["run_id"]}
        await age_thread(database, thread_id, days=2)
        await Sweeper(database, Metrics()).finish()
        assert await count(database, "SELECT count(*) FROM event") == 0
        assert await count(database, "SELECT count(*) FROM thread WHERE undone_at IS NOT NULL") == 0
        again = await ended(database, await post(database, "steps", {"seconds": 0}, thread_id))
    assert again["first_seq"] == left[-1].seq + 1


async def test_workers_that_stopped_a_day_ago_are_forgotten(database: Database) -> None:
    async with database.transaction() as connection:
        await connection.execute(
            "INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until, stopped_at) "
            "SELECT gen_random_uuid(), status, '', 0, '', 1, '{}', now(), now() - days * interval '1 day' "
            "FROM unnest(ARRAY['offline', 'lost', 'offline'], ARRAY[2, 2, 0.5]) AS stopped(status, days)"
        )
    await Sweeper(database, Metrics()).finish()
    assert await count(database, "SELECT count(*) FROM worker") == 1


async def test_a_dry_run_counts_what_goes_and_changes_nothing(settings: Settings, database_url: str) -> None:
    every = dict.fromkeys(("FINISHED_RUN_TTL_SECONDS", "CHECKPOINT_TTL_SECONDS", "THREAD_TTL_SECONDS"), "86400")
    async with kept_for(database_url, **every) as database:
        async with working(settings):
            kept = await thread_with_ttl(database, 60 * 24 * 30, "delete")
            gone = (await ended(database, await post(database, "steps", {"seconds": 0})))["thread_id"]
            await ended(database, await post(database, "steps", {"seconds": 0}, temporary=True))
        states = await count(database, "SELECT count(*) FROM checkpoints")
        for thread_id in (kept, gone):
            await age_thread(database, thread_id, days=2)
        async with database.transaction() as connection:
            await connection.execute("UPDATE thread SET hidden_at = hidden_at - interval '1 hour'")
        counted = +await Sweeper(database, Metrics()).count()
        assert counted == +await Sweeper(database, Metrics()).count(), "nothing has changed"
        assert await count(database, "SELECT count(*) FROM checkpoints") == states
        assert counted["temporary threads"] == counted["resting threads"] == 1
        removed = +await Sweeper(database, Metrics()).finish()
        assert set(removed) == set(counted)
        # What went with its thread is not counted again.
        assert all(removed[what] <= counted[what] for what in counted)
        assert removed["checkpoints"] == 6
        assert +await Sweeper(database, Metrics()).count() == Counter()


# --- portions ---------------------------------------------------------------------------------------------------------


async def test_what_others_hold_is_passed_over_and_comes_later(settings: Settings, database: Database) -> None:
    async with database.transaction() as connection:
        for _ in range(5):
            await create_thread(connection, NewThread(uuid4(), {}, temporary=True))
        await connection.execute("UPDATE thread SET hidden_at = now() - interval '1 day'")
    async with database.transaction() as connection:
        await connection.execute("SELECT FROM thread ORDER BY thread_id LIMIT 2 FOR UPDATE")
        async with asyncio.timeout(60):
            await Sweeper(database, Metrics()).finish()
        assert await count(database, "SELECT count(*) FROM thread") == 2
    await Sweeper(database, Metrics()).finish()
    assert await count(database, "SELECT count(*) FROM thread") == 0


async def test_everything_has_its_turn_however_much_there_is_of_one_thing(database: Database) -> None:
    """A sweep that is out of time goes on with what it did not reach."""
    async with database.transaction() as connection:
        for _ in range(3):
            await create_thread(connection, NewThread(uuid4(), {}, temporary=True))
        await connection.execute("UPDATE thread SET hidden_at = now() - interval '1 day'")
        await connection.execute(
            "INSERT INTO webhook_delivery (run_id, thread_id, url, run, state, delivered_at, settled_at) "
            "VALUES (gen_random_uuid(), gen_random_uuid(), '', '{}', 'delivered', now(), now() - interval '1 year')"
        )
    hurried = Sweeper(database, Metrics(), budget=0.0)
    await hurried.run()
    assert +hurried.removed == Counter({"temporary threads": 3}), "one thing at a time, then the other duties"
    passes = 1
    while (+hurried.removed).keys() != {"temporary threads", "webhook deliveries"}:
        passes += 1
        await hurried.run()
        assert passes < 50


def test_a_portion_is_what_can_be_done_in_a_moment() -> None:
    portion = BatchSize(first=50, most=100)
    assert portion.took(50, 0.001)
    assert portion.size == 100
    assert portion.took(100, 0.001)
    assert portion.size == 100
    assert portion.took(100, 10.0)
    assert portion.size == 50
    assert not portion.took(49, 0.001)
    assert portion.size == 50, "it had time, and nothing more to do"
    for _ in range(10):
        portion.took(portion.size, 10.0)
    assert portion.size == 1
