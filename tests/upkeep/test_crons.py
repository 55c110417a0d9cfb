"""Every due time fires once, whoever is there to do it and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow
from psycopg_pool import PoolTimeout
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING
from holdfast.engine.create import create_thread
from holdfast.engine.new_run import CreatedRun, NewRun, NewThread
from holdfast.engine.submit import create_run_within
from holdfast.engine.threads import delete_thread
from holdfast.graphs.assistants import assistant_id
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.resources import crons
from holdfast.resources.assistants import ensure_system_assistants
from holdfast.resources.crons import CronContent, create_cron, new_cron_id, upcoming_crons
from holdfast.settings import Settings, load_settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep import crons as upkeep_crons
from holdfast.upkeep.crons import CronFirer, fire
from holdfast.upkeep.duty import LOOK_INTERVAL
from holdfast.upkeep.leader import Upkeep
from tests.engine.scene import somebody_waits
from tests.support.records import query, run_ended
from tests.support.smoke import EXAMPLES, post, working
from tests.support.waiting import until
from tests.upkeep.test_bad_rows import REFUSE
from tests.upkeep.test_slow_rows import PATIENCE, impatient

HOURLY = "0 * * * *"
QUICK = {"seconds": 0}


@pytest.fixture(autouse=True)
async def _assistants(database: Database) -> None:
    await ensure_system_assistants(database, GraphCatalog.load(load_config(EXAMPLES)))


async def cron(database: Database, *, thread_id: UUID | None = None, strategy: str = "enqueue", **columns: Any) -> UUID:
    """A cron that runs `steps`, as the API makes them."""
    cron_id = new_cron_id()
    stateless = thread_id is None
    kept = columns.pop("on_run_completed", "delete")
    kwargs = {
        "input": QUICK,
        "command": None,
        "config": {"configurable": {"cron_id": str(cron_id)}},
        "context": None,
        "stream_mode": ["values"],
        "temporary": stateless and kept == "delete",
    }
    content = {
        "schedule": HOURLY,
        "timezone": None,
        "end_time": None,
        "enabled": True,
        "on_run_completed": kept if stateless else None,
        "metadata": {},
        "payload": {},
        "template": {"kwargs": kwargs, "multitask_strategy": strategy, "after_seconds": 0.0, "priority": 0},
        **columns,
    }
    async with database.connection() as connection:
        await create_cron(connection, cron_id, assistant_id("steps"), thread_id, "", CronContent(**content))
    return cron_id


async def thread(database: Database) -> UUID:
    thread_id = uuid4()
    async with database.connection() as connection:
        await create_thread(connection, NewThread(thread_id, {}))
    return thread_id


async def make_due(database: Database, *cron_ids: UUID, ago: timedelta = timedelta(seconds=1)) -> None:
    await query(
        database,
        "UPDATE cron SET next_run_date = now() - %s::interval WHERE cron_id = ANY(%s) RETURNING 1",
        ago,
        list(cron_ids),
    )


async def row(database: Database, cron_id: UUID) -> DictRow:
    [found] = await query(database, "SELECT * FROM cron WHERE cron_id = %s", cron_id)
    return found


async def runs(database: Database, cron_id: UUID) -> list[DictRow]:
    return await query(
        database, "SELECT * FROM run WHERE metadata ->> 'cron_id' = %s ORDER BY created_at", str(cron_id)
    )


async def due_rows(database: Database) -> list[DictRow]:
    async with database.connection() as connection:
        return [found for found in await upcoming_crons(connection, 100) if found["due_in"] <= 0]


async def one_pass(database: Database) -> float:
    return await CronFirer(database, PostgresSignals(database), Metrics()).run()


async def test_of_many_processes_that_see_a_cron_due_one_fires_it(database: Database) -> None:
    made = [await cron(database, thread_id=await thread(database)) for _ in range(4)]
    made += [await cron(database) for _ in range(4)]
    await make_due(database, *made)
    seen = await due_rows(database)
    assert {found["cron_id"] for found in seen} == set(made)
    fired = await asyncio.gather(*(fire(database, found) for found in seen for _ in range(6)))
    assert sum(firing is not None for firing in fired) == len(made)
    for cron_id in made:
        assert len(await runs(database, cron_id)) == 1
    assert len(await query(database, "SELECT 1 FROM thread")) == len(made)
    assert await due_rows(database) == []


async def test_whole_duties_side_by_side_fire_each_due_time_once(database: Database) -> None:
    made = [await cron(database, on_run_completed="keep") for _ in range(5)]
    for number in (1, 2, 3):
        await make_due(database, *made, ago=timedelta(seconds=number))
        await asyncio.gather(*(one_pass(database) for _ in range(5)))
        for cron_id in made:
            assert len(await runs(database, cron_id)) == number


@pytest.mark.parametrize("moment", ["before the run", "after the run", "connection lost"])
async def test_a_crash_in_the_middle_of_a_firing_leaves_it_due(
    database: Database, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    cron_id = await cron(database)
    await make_due(database, cron_id)
    before = await row(database, cron_id)

    async def crash(connection: AsyncConnection[DictRow], new: NewRun) -> CreatedRun:
        if moment != "before the run":
            await create_run_within(connection, new)
        if moment == "connection lost":
            await connection.close()
        raise psycopg.OperationalError("the process died")

    with monkeypatch.context() as crashing:
        crashing.setattr(upkeep_crons, "create_run_within", crash)
        with pytest.raises(psycopg.OperationalError):
            await one_pass(database)
    assert await row(database, cron_id) == before
    assert await query(database, "SELECT 1 FROM run UNION ALL SELECT 1 FROM thread") == []
    await one_pass(database)
    assert len(await runs(database, cron_id)) == 1


async def test_what_was_missed_is_made_up_for_once(database: Database) -> None:
    cron_id = await cron(database)
    await make_due(database, cron_id, ago=timedelta(days=3))
    assert await one_pass(database) == 0
    assert await one_pass(database) > 0
    assert len(await runs(database, cron_id)) == 1
    due = (await row(database, cron_id))["next_run_date"]
    assert timedelta(0) < due - datetime.now(UTC) <= timedelta(hours=1)


async def test_the_next_due_time_is_by_the_wall_clock_of_the_timezone(database: Database) -> None:
    cron_id = await cron(database, schedule="30 9 * * *", timezone="Asia/Kathmandu")
    await make_due(database, cron_id)
    await one_pass(database)
    due = (await row(database, cron_id))["next_run_date"].astimezone(UTC)
    assert (due.hour, due.minute) == (3, 45)


async def test_a_cron_that_is_off_or_over_does_not_fire(database: Database) -> None:
    now = datetime.now(UTC)
    off = await cron(database, enabled=False)
    over = await cron(database, end_time=now - timedelta(minutes=30))
    last = await cron(database, end_time=now)
    assert (await row(database, over))["next_run_date"] is None
    # Missed, and made up for only if that is not too late.
    await make_due(database, over, ago=timedelta(minutes=45))
    await make_due(database, off, last)
    await one_pass(database)
    assert [len(await runs(database, cron_id)) for cron_id in (off, over, last)] == [0, 0, 1]
    assert [(await row(database, cron_id))["next_run_date"] for cron_id in (over, last)] == [None, None]
    assert await one_pass(database) > 0


async def test_the_run_is_the_crons_and_on_its_thread(database: Database) -> None:
    thread_id = await thread(database)
    cron_id = await cron(database, thread_id=thread_id, metadata={"team": "a"})
    await make_due(database, cron_id)
    await one_pass(database)
    [run] = await runs(database, cron_id)
    assert (run["thread_id"], run["assistant_id"], run["graph_id"]) == (thread_id, assistant_id("steps"), "steps")
    assert run["metadata"] == {
        "created_by": "system",
        "team": "a",
        "cron_id": str(cron_id),
        "graph_id": "steps",
        "assistant_id": str(assistant_id("steps")),
    }
    assert run["kwargs"]["config"]["configurable"] == {"cron_id": str(cron_id)}


async def test_a_busy_thread_that_rejects_costs_the_cron_one_firing(database: Database) -> None:
    thread_id = await thread(database)
    busy = await post(database, "steps", QUICK, thread_id)
    rejecting = await cron(database, thread_id=thread_id, strategy="reject")
    await make_due(database, rejecting)
    await one_pass(database)
    assert await runs(database, rejecting) == []
    assert (await row(database, rejecting))["next_run_date"] > datetime.now(UTC)
    interrupting = await cron(database, thread_id=thread_id, strategy="interrupt")
    await make_due(database, interrupting)
    await one_pass(database)
    assert len(await runs(database, interrupting)) == 1
    [stopped] = await query(database, "SELECT status FROM run WHERE run_id = %s", busy)
    assert stopped["status"] == "interrupted"


@pytest.mark.expects_errors("cron.failed", "upkeep.row_set_aside")
async def test_a_run_the_database_refuses_costs_the_cron_one_firing(database: Database) -> None:
    cron_id = await cron(database)
    unfit = "UPDATE cron SET template = jsonb_set(template::jsonb, '{priority}', '10000000000')::json RETURNING 1"
    await query(database, unfit)
    await make_due(database, cron_id)
    await one_pass(database)
    assert (await row(database, cron_id))["next_run_date"] > datetime.now(UTC)
    assert await query(database, "SELECT 1 FROM run UNION ALL SELECT 1 FROM thread") == []


async def test_the_look_reads_what_is_due_first(database: Database) -> None:
    """However many crons there are."""
    await query(
        database,
        "INSERT INTO cron (cron_id, assistant_id, schedule, next_run_date, enabled, on_run_completed, payload, "
        "template) SELECT gen_random_uuid(), %s, '@daily', now() + number * interval '1 minute', number %% 2 = 0, "
        "'keep', '{}', '{}' FROM generate_series(1, 5000) AS number RETURNING 1",
        assistant_id("steps"),
    )
    plan = await query(
        database, f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {crons.UPCOMING % {'limit': 100, 'aside': 'ARRAY[]'}}"
    )
    text = "\n".join(line["QUERY PLAN"] for line in plan)
    assert "Index Scan using cron_due" in text
    assert "Sort" not in text
    assert "Rows Removed" not in text


@pytest.mark.expects_errors("cron.failed", "upkeep.row_set_aside")
async def test_cron_that_cannot_be_fired_does_not_stop_the_others(database: Database) -> None:
    broken, sound = await cron(database), await cron(database)
    await query(database, "UPDATE cron SET timezone = 'Mars/Olympus' WHERE cron_id = %s RETURNING 1", broken)
    await make_due(database, broken, ago=timedelta(seconds=9))
    await make_due(database, sound)
    await one_pass(database)
    assert len(await runs(database, sound)) == 1
    assert await runs(database, broken) == []
    assert await due_rows(database) == []
    postponed = (await row(database, broken))["next_run_date"] - datetime.now(UTC)
    assert timedelta(0) < postponed < timedelta(seconds=61)


async def test_a_cron_that_cannot_be_written_delays_no_other(database: Database) -> None:
    broken, *sound = [await cron(database) for _ in range(3)]
    await make_due(database, broken, ago=timedelta(seconds=9))
    await make_due(database, *sound)
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute(
            f"CREATE TRIGGER refuse BEFORE UPDATE ON cron FOR EACH ROW WHEN (OLD.cron_id = '{broken}') "
            "EXECUTE FUNCTION refuse()".encode()
        )
    firer = CronFirer(database, PostgresSignals(database), Metrics())
    with capture_logs() as logs:
        await firer.run()
        assert [len(await runs(database, one)) for one in (broken, *sound)] == [0, 1, 1]
        assert await firer.run() > 0
    [reported] = [line for line in logs if line["event"] == "upkeep.row_set_aside"]
    assert (reported["duty"], reported["cron_id"]) == ("crons", str(broken))
    # What was set aside is one due time: a cron that is mended fires at the next.
    async with database.connection() as connection:
        await connection.execute("ALTER TABLE cron DISABLE TRIGGER refuse")
    assert await firer.run() > 0
    await make_due(database, broken, ago=timedelta(seconds=5))
    await firer.run()
    assert len(await runs(database, broken)) == 1


async def test_a_cron_with_a_time_that_python_cannot_read_hides_no_other(database: Database) -> None:
    far, due = await cron(database), await cron(database)
    await query(database, "UPDATE cron SET end_time = '10000-01-01 12:00:00+00' WHERE cron_id = %s RETURNING 1", far)
    await make_due(database, far, due)
    await one_pass(database)
    for cron_id in (far, due):
        assert len(await runs(database, cron_id)) == 1


def hasty(database: Database) -> AbstractAsyncContextManager[Database]:
    """Waits two seconds for a cron that is locked; one that is not has as long, on a busy machine."""
    return impatient(database.settings, database_timeout=8.0)


async def test_a_cron_whose_thread_is_locked_delays_no_other(database: Database) -> None:
    locked = await thread(database)
    waits, due = await cron(database, thread_id=locked), await cron(database)
    await make_due(database, waits, ago=timedelta(minutes=1))
    await make_due(database, due)
    async with hasty(database) as upkeep, database.transaction() as connection:
        await connection.execute("SELECT 1 FROM thread WHERE thread_id = %s FOR UPDATE", (locked,))
        with capture_logs() as logs:
            await one_pass(upkeep)
        assert len(await runs(database, due)) == 1
    assert [line["cron_id"] for line in logs if line["event"] == "cron.failed"] == [str(waits)]


@pytest.mark.expects_errors("cron.failed", "upkeep.row_set_aside")
async def test_crons_whose_threads_are_locked_leave_time_for_others(database: Database) -> None:
    """All that is due is tried within the time that the duty has."""
    threads = [await thread(database) for _ in range(4)]
    waiting = [await cron(database, thread_id=thread_id) for thread_id in threads]
    due = await cron(database)
    await make_due(database, *waiting, ago=timedelta(minutes=1))
    await make_due(database, due)
    async with hasty(database) as upkeep, database.transaction() as connection:
        [duty] = [duty for duty in Upkeep(upkeep, PostgresSignals(upkeep), Metrics()).duties if duty.name == "crons"]
        await connection.execute("SELECT 1 FROM thread WHERE thread_id = ANY(%s) FOR UPDATE", (threads,))
        async with asyncio.timeout(duty.timeout):
            await duty.work()
        assert len(await runs(database, due)) == 1


@pytest.mark.expects_errors("cron.failed", "upkeep.row_set_aside")
async def test_a_cron_that_is_locked_delays_no_other(database: Database) -> None:
    """Its thread is locked, too, as by somebody who deletes both."""
    locked = await thread(database)
    with_thread, alone, due = await cron(database, thread_id=locked), await cron(database), await cron(database)
    await make_due(database, with_thread, alone, ago=timedelta(minutes=1))
    await make_due(database, due)
    async with hasty(database) as upkeep:
        async with database.transaction() as connection:
            await connection.execute("SELECT 1 FROM thread WHERE thread_id = %s FOR UPDATE", (locked,))
            await connection.execute("SELECT 1 FROM cron WHERE cron_id = ANY(%s) FOR UPDATE", ([with_thread, alone],))
            await one_pass(upkeep)
            assert len(await runs(database, due)) == 1
            assert (
                await CronFirer(upkeep, PostgresSignals(upkeep), Metrics())._fire((await due_rows(database))[1])
                is False
            )
        assert len(await due_rows(database)) == 2
        await one_pass(upkeep)
    assert [len(await runs(database, one)) for one in (with_thread, alone)] == [1, 1]


async def test_a_cron_is_not_blamed_for_a_pool_that_is_used_up(database: Database) -> None:
    await make_due(database, await cron(database))
    [due] = await due_rows(database)
    small = database.settings.model_copy(update={"database_timeout": 2.0, "pool_min": 1, "pool_max": 1})
    narrow = Database(small, "test")
    # Not within its own timeout: a busy machine may take longer to connect.
    await narrow.pool.open(wait=True, timeout=PATIENCE)
    try:
        async with narrow.connection():
            with capture_logs() as logs, pytest.raises(PoolTimeout):
                await CronFirer(narrow, PostgresSignals(narrow), Metrics())._fire(due)
    finally:
        await narrow.close()
    assert logs == []
    assert len(await due_rows(database)) == 1


async def test_a_change_while_it_is_due_is_what_counts(database: Database) -> None:
    cron_id, deleted = await cron(database), await cron(database)
    await make_due(database, cron_id, deleted)
    seen = {found["cron_id"]: found for found in await due_rows(database)}
    await query(database, "UPDATE cron SET enabled = false WHERE cron_id = %s RETURNING 1", cron_id)
    await query(database, "DELETE FROM cron WHERE cron_id = %s RETURNING 1", deleted)
    assert [await fire(database, seen[one]) for one in (cron_id, deleted)] == [None, None]
    assert await query(database, "SELECT 1 FROM run") == []


async def test_a_thread_deleted_while_its_cron_fires(database: Database) -> None:
    """Both want the thread first, so neither waits for the other for ever."""
    thread_id = await thread(database)
    cron_id = await cron(database, thread_id=thread_id)
    await make_due(database, cron_id)
    [seen] = await due_rows(database)

    async def waits() -> bool:
        statement = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return bool(await query(database, statement))

    async with database.transaction() as deleting:
        await deleting.execute("SELECT 1 FROM thread WHERE thread_id = %s FOR UPDATE", (thread_id,))
        firing = asyncio.create_task(fire(database, seen))
        await until(waits, "the firing waits for the thread")
        await deleting.execute("DELETE FROM thread WHERE thread_id = %s", (thread_id,))
    assert await firing is None
    assert await query(database, "SELECT 1 FROM cron UNION ALL SELECT 1 FROM run") == []


async def test_firing_and_deleting_at_the_same_time(database: Database) -> None:
    for _ in range(8):
        thread_id = await thread(database)
        cron_id = await cron(database, thread_id=thread_id)
        await make_due(database, cron_id)
        [seen] = await due_rows(database)
        await asyncio.gather(fire(database, seen), delete_thread(database, thread_id, EVERYTHING))
        assert await query(database, "SELECT 1 FROM cron UNION ALL SELECT 1 FROM run") == []


async def test_cron_duty_sleeps_until_the_next_cron_is_due(database: Database) -> None:
    assert await one_pass(database) == LOOK_INTERVAL
    cron_id = await cron(database)
    await make_due(database, cron_id, ago=timedelta(seconds=-4.5))
    assert 0 < await one_pass(database) <= 4.5


async def test_every_second_for_real(database: Database, database_url: str) -> None:
    """The leader comes back for what is due long before it would otherwise."""
    settings: Settings = load_settings({"REAPER_INTERVAL_SECONDS": "30"}, database_url=database_url)
    thread_id = await thread(database)
    mine = await cron(database, schedule="* * * * * *", thread_id=thread_id)
    fresh = await cron(database, schedule="* * * * * *")
    kept = await cron(database, schedule="* * * * * *", on_run_completed="keep")

    async with working(settings):

        async def fired() -> bool:
            return min([len(await runs(database, cron_id)) for cron_id in (mine, fresh, kept)]) >= 3

        await until(fired, "three firings of each")
        await query(database, "UPDATE cron SET enabled = false RETURNING 1")
        for cron_id in (mine, fresh, kept):
            ended = [await run_ended(database, run["run_id"]) for run in await runs(database, cron_id)]
            assert {run["status"] for run in ended} == {"success"}
    assert {run["thread_id"] for run in await runs(database, mine)} == {thread_id}
    for cron_id, hidden in ((fresh, True), (kept, False)):
        threads = [run["thread_id"] for run in await runs(database, cron_id)]
        assert len(set(threads)) == len(threads)
        found = await query(database, "SELECT hidden_at FROM thread WHERE thread_id = ANY(%s)", threads)
        assert [thread["hidden_at"] is not None for thread in found] == [hidden] * len(threads)


async def test_cron_duty_waits_for_no_other_duty(database: Database, database_url: str) -> None:
    """Other duties wait for a lock, and are not given up."""
    settings = load_settings({"DATABASE_TIMEOUT": "300"}, database_url=database_url)
    other = Database(settings, "test")
    await other.open()
    cron_id = await cron(database)
    # Not a connection of ours: those are ended when they are idle in a transaction.
    async with await AsyncConnection.connect(database_url, options="-c search_path=holdfast") as connection:
        await connection.execute("LOCK TABLE webhook_delivery, interrupt, abandoned, graph_absence, checkpoint_writes")
        upkeep = Upkeep(other, PostgresSignals(other), Metrics())
        await upkeep.start()
        await somebody_waits(database, 3)
        await make_due(database, cron_id)

        async def fired() -> bool:
            return bool(await runs(database, cron_id))

        await until(fired, "the cron fires while the tables are locked")
    await upkeep.stop()
    await other.close()


async def test_crons_can_be_switched_off(database: Database, database_url: str) -> None:
    cron_id = await cron(database)
    await make_due(database, cron_id)
    for value, fired in (("false", 0), ("true", 1)):
        other = Database(load_settings({"FF_CRONS_ENABLED": value}, database_url=database_url), "test")
        await other.open()
        for duty in Upkeep(other, PostgresSignals(other), Metrics()).duties:
            await duty.work()
        await other.close()
        assert len(await runs(database, cron_id)) == fired


async def test_the_threads_of_a_cron_may_have_a_time_to_live(database: Database) -> None:
    cron_id = await cron(database, on_run_completed="keep")
    await query(
        database,
        'UPDATE cron SET template = (template::jsonb || \'{"thread_ttl": [5, "keep_latest"]}\')::json RETURNING 1',
    )
    await make_due(database, cron_id)
    await one_pass(database)
    [run] = await runs(database, cron_id)
    [found] = await query(database, "SELECT * FROM thread WHERE thread_id = %s", run["thread_id"])
    assert (found["ttl_minutes"], found["ttl_strategy"]) == (5, "keep_latest")
