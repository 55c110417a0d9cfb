"""A write of one run that cannot be stored, although the server answers, fails only that run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from psycopg import AsyncConnection

from holdfast.db.answer_timeout import NoAnswer
from holdfast.db.connect import Database, connection_parameters
from holdfast.engine.outcome import Ended
from holdfast.engine.states import RunStatus
from holdfast.errors import JournalFailed, LeaseLost
from holdfast.journal.entries import WritesEntry
from holdfast.settings import Settings
from tests.journal.test_lost_answers import breaking, open_writers
from tests.support.catalogs import catalog_of
from tests.support.crash_graphs import steps
from tests.support.live_worker import quick_settings
from tests.support.records import payloads, query, run_row, thread_events
from tests.support.station import Station, open_station
from tests.support.waiting import until, until_true

SUCCESS = Ended(status=RunStatus.SUCCESS, thread_status="idle", values=b'{"words": []}')
# The larger an event is, the longer the server takes for it.
SLOW_EVENTS = """
CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF length(NEW.data) > 100000 THEN PERFORM pg_sleep(120); END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER slow BEFORE INSERT ON event FOR EACH ROW EXECUTE FUNCTION take_time();
"""
# What a server says that is short of memory, or cannot reach its disk.
SHORT = """
CREATE FUNCTION fall_short() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF length(NEW.data) > {size} THEN RAISE EXCEPTION 'short' USING ERRCODE = '{state}'; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER short BEFORE INSERT ON event FOR EACH ROW EXECUTE FUNCTION fall_short();
"""


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url)


@pytest.fixture
async def station(settings: Settings, database: Database) -> AsyncIterator[Station]:
    async with open_station(settings, database, catalog_of(steps=steps([]))) as opened:
        yield opened


@pytest.fixture
async def hasty_station(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Station]:
    """A commit that waits is given up: it may take nearly as long as the lease. One of a run that is well takes less,
    also on a busy machine. A wait for a lock does not end sooner, as behind PgBouncer."""
    monkeypatch.setattr("holdfast.journal.session.SET_GROUP_LOCK_TIMEOUT", "SET lock_timeout = '1min'")
    hasty = settings.model_copy(update={"lease": 4.0})
    async with open_station(hasty, database, catalog_of(steps=steps([]))) as opened:
        yield opened


@asynccontextmanager
async def locking(station: Station) -> AsyncIterator[AsyncConnection[Any]]:
    """A transaction of another client that stays open."""
    settings = quick_settings(str(station.database.settings.database_url), lease=900.0)
    connection = await AsyncConnection.connect(connection_parameters(settings, "other"))
    async with connection:
        yield connection
        await connection.rollback()


async def test_journal_fails_only_the_run_whose_write_times_out(hasty_station: Station, database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute(SLOW_EVENTS)
    slow, *others = await open_writers(hasty_station, 4)
    slow.add_event("custom", orjson.dumps("x" * 200_000))
    for number, writer in enumerate(others):
        writer.add_event("custom", orjson.dumps(number))
    ends = [writer.finish(SUCCESS) for writer in others]
    written = await asyncio.gather(slow.flush(), *ends, return_exceptions=True)
    assert isinstance(written[0], JournalFailed)
    assert "an event (custom), 200002 bytes" in str(written[0])
    assert written[1:] == [None] * 3
    # Its end can be written, and that of others with it.
    slow.discard()
    await slow.finish(Ended(status=RunStatus.ERROR, thread_status="error"))
    assert (await run_row(database, slow.run_id))["status"] == "error"
    for number, writer in enumerate(others):
        assert (await run_row(database, writer.run_id))["status"] == "success"
        assert payloads(await thread_events(database, writer.thread_id), "custom") == [number]


@pytest.mark.parametrize("state", ["53200", "58030", "53100"], ids=["memory", "disk", "full disk"])
async def test_journal_fails_no_run_while_the_server_is_short_of_memory_or_disk(
    station: Station, database: Database, state: str
) -> None:
    writers = await open_writers(station, 4)
    async with database.connection() as connection:
        await connection.execute(SHORT.format(size=0, state=state).encode())
    for number, writer in enumerate(writers):
        writer.add_event("custom", orjson.dumps(number))
    waiting = [asyncio.create_task(writer.flush()) for writer in writers]
    await until_true(
        lambda: all(writer.tries > 1 for writer in writers) or any(task.done() for task in waiting),
        "all were tried twice",
    )
    assert not any(task.done() for task in waiting)
    assert station.journal.backoff.failing
    async with database.connection() as connection:
        await connection.execute("DROP TRIGGER short ON event")
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
    for number, writer in enumerate(writers):
        assert payloads(await thread_events(database, writer.thread_id), "custom") == [number]


@pytest.mark.parametrize("state", ["53200", "53100"], ids=["memory", "full disk"])
async def test_journal_fails_a_large_write_that_the_server_has_no_room_for(
    station: Station, database: Database, state: str
) -> None:
    large, other = await open_writers(station, 2)
    async with database.connection() as connection:
        await connection.execute(SHORT.format(size=100_000, state=state).encode())
    large.add_event("custom", orjson.dumps("x" * 200_000))
    failing = asyncio.create_task(large.flush())
    async with asyncio.timeout(60):
        while not failing.done():
            # The server works for others.
            other.add_event("custom", b"1")
            await other.flush()
            await asyncio.sleep(0.05)
        with pytest.raises(JournalFailed, match="could not store it"):
            await failing


async def test_journal_writes_other_runs_while_an_isolated_run_waits_for_a_lock(
    settings: Settings, database: Database
) -> None:
    settings = settings.model_copy(update={"lease": 900.0})
    async with open_station(settings, database, catalog_of(steps=steps([]))) as station:
        locked, other = await open_writers(station, 2)
        async with locking(station) as holder:
            await holder.execute("SELECT 1 FROM run WHERE run_id = %s FOR UPDATE", (locked.run_id,))
            locked.isolated = True
            locked.add_event("custom", b"1")
            waiting = asyncio.create_task(locked.flush())
            for _ in range(2):
                await until_true(lambda: locked in station.journal.in_flight, "the locked run is tried")
                async with asyncio.timeout(60):
                    other.add_event("custom", b"2")
                    await other.flush()
        async with asyncio.timeout(60):
            await waiting


async def test_journal_isolates_a_run_of_a_group_that_waits_for_a_lock(settings: Settings, database: Database) -> None:
    settings = settings.model_copy(update={"lease": 900.0})
    async with open_station(settings, database, catalog_of(steps=steps([]))) as station:
        locked, other = await open_writers(station, 2)
        async with locking(station) as holder:
            await holder.execute("SELECT 1 FROM run WHERE run_id = %s FOR UPDATE", (locked.run_id,))
            for writer in (locked, other):
                writer.add_event("custom", b"1")
            waiting = asyncio.create_task(locked.flush())
            async with asyncio.timeout(60):
                await other.flush()
            assert not waiting.done()
            assert not station.journal.backoff.failing
        async with asyncio.timeout(60):
            await waiting


async def test_isolated_run_is_written_once_its_lock_is_free(hasty_station: Station, database: Database) -> None:
    locked, *others = await open_writers(hasty_station, 3)
    async with locking(hasty_station) as holder:
        await holder.execute("SELECT 1 FROM run WHERE run_id = %s FOR UPDATE", (locked.run_id,))
        for number, writer in enumerate([locked, *others]):
            writer.add_event("custom", orjson.dumps(number))
        waiting = asyncio.create_task(locked.flush())
        async with asyncio.timeout(60):
            await asyncio.gather(*(writer.flush() for writer in others))
            # They are not held up from now on.
            for writer in others:
                writer.add_event("custom", orjson.dumps("again"))
                await writer.flush()
        locked.add_event("custom", orjson.dumps("later"))
        assert not waiting.done()
    async with asyncio.timeout(60):
        await waiting
        await locked.finish(SUCCESS)
    assert locked.failure is None
    assert payloads(await thread_events(database, locked.thread_id), "custom") == [0, "later"]
    assert payloads(await thread_events(database, others[0].thread_id), "custom") == [1, "again"]


async def test_isolated_run_that_is_lost_fails_with_lease_lost(hasty_station: Station) -> None:
    [writer] = await open_writers(hasty_station, 1)
    async with locking(hasty_station) as holder:
        await holder.execute("SELECT 1 FROM run WHERE run_id = %s FOR UPDATE", (writer.run_id,))
        ending = asyncio.create_task(writer.finish(SUCCESS))
        await until_true(
            lambda: writer.isolated and writer in hasty_station.journal.in_flight and not writer._waiters,
            "it is written alone",
        )
        writer.mark_lost()
        async with asyncio.timeout(60):
            with pytest.raises(LeaseLost):
                await ending


async def test_journal_fails_no_run_while_a_table_is_locked(hasty_station: Station, database: Database) -> None:
    writers = await open_writers(hasty_station, 5)
    async with locking(hasty_station) as holder:
        await holder.execute("LOCK TABLE event IN ACCESS EXCLUSIVE MODE")
        for number, writer in enumerate(writers):
            writer.add_event("custom", orjson.dumps(number))
        waiting = [asyncio.create_task(writer.flush()) for writer in writers]

        async with asyncio.timeout(60):
            while not any(writer.isolated for writer in writers):
                await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
    for number, writer in enumerate(writers):
        assert writer.failure is None
        assert payloads(await thread_events(database, writer.thread_id), "custom") == [number]


async def test_journal_fails_no_run_whose_commit_was_stored_but_not_answered(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commits happen, and their answers come too late."""
    monkeypatch.setattr("holdfast.journal.group_writer.LARGE_WRITE_BYTES", 0)
    [writer] = await open_writers(station, 1)
    writer.add_event("custom", b"1")
    broken = breaking(monkeypatch, before=False, times=3, error=lambda: NoAnswer("too late"))
    await writer.flush()
    assert len(broken) == 3
    await writer.finish(SUCCESS)
    events = await thread_events(station.database, writer.thread_id)
    assert [event.kind for event in events] == ["metadata", "custom", "end"]


async def test_session_that_was_given_up_writes_nothing_more(hasty_station: Station, database: Database) -> None:
    """It gets what was sent to it when all of that has been written by another one, and something else since."""
    [writer] = await open_writers(hasty_station, 1)
    thread_id = str(writer.thread_id)
    answer = (thread_id, "", "1", "task", -4)
    writer.add_event("custom", b"1")
    await writer.flush()
    assert hasty_station.journal.session._connection is not None
    pid = hasty_station.journal.session._connection.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        writer.add_writes(WritesEntry([(answer, ("", "words", "msgpack", b"x"))], True))
        async with asyncio.timeout(60):
            await writer.flush()
        writer.add_writes(WritesEntry([], False, takes=answer))
        await writer.flush()
    finally:
        os.kill(pid, signal.SIGCONT)

    async def gone() -> bool:
        return not await query(database, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid)

    await until(gone, "the session has ended")
    assert await query(database, "SELECT 1 FROM checkpoint_writes WHERE thread_id = %s", thread_id) == []
