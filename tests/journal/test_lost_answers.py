"""The journal when its connection breaks: at no moment is an entry lost or written twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import psycopg
import pytest
from psycopg import AsyncConnection

from holdfast.db.connect import Database, open_blocking_session
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack
from holdfast.engine.states import RunStatus
from holdfast.errors import LeaseLost
from holdfast.journal.entries import CheckpointEntry, WritesEntry
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.crash_graphs import steps
from tests.support.records import payloads, post_run, query, run_row, thread_events
from tests.support.station import Station, open_station
from tests.support.waiting import until

SUCCESS = Ended(status=RunStatus.SUCCESS, thread_status="idle", values=b'{"words": []}')
KILL_JOURNAL = """
SELECT pg_terminate_backend(pid) AS killed FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ '^holdfast journal'
"""


@pytest.fixture
async def station(settings: Settings, database: Database) -> AsyncIterator[Station]:
    async with open_station(settings, database, catalog_of(steps=steps([]))) as opened:
        yield opened


async def open_writers(station: Station, count: int) -> list[RunWriter]:
    for _ in range(count):
        await post_run(station.database, "steps", input={})
    return [attempt.writer for attempt in await station.claim(count)]


def hand_in(writer: RunWriter, number: int) -> None:
    """An event, a checkpoint and a write: one of each kind of row."""
    thread_id, checkpoint_id = str(writer.thread_id), f"{number:08d}"
    writer.add_event("custom", orjson.dumps(number))
    blob = (thread_id, "", "words", checkpoint_id, "msgpack", b"blob")
    row = (thread_id, "", checkpoint_id, None, f'{{"v": 4, "channel_versions": {{"words": "{checkpoint_id}"}}}}', "{}")
    writer.add_checkpoint(CheckpointEntry([blob], row, 2))
    writer.add_writes(WritesEntry([((thread_id, "", checkpoint_id, "task", 0), ("", "words", "msgpack", b"x"))], False))


async def count_rows(database: Database, table: str, writer: RunWriter) -> int:
    rows = await query(database, f"SELECT count(*) AS n FROM {table} WHERE thread_id = %s", str(writer.thread_id))
    return int(rows[0]["n"])


async def assert_all_written_once(station: Station, writer: RunWriter, count: int) -> None:
    assert payloads(await thread_events(station.database, writer.thread_id), "custom") == list(range(count))
    for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
        assert await count_rows(station.database, table, writer) == count


async def test_journal_neither_loses_nor_repeats_entries_when_its_session_is_killed(station: Station) -> None:
    writers = await open_writers(station, 8)

    killed = 0

    async def write(writer: RunWriter) -> int:
        """Write until four sessions were killed."""
        number = 0
        while number < 40 or killed < 4:
            hand_in(writer, number)
            if number % 3 == 0:
                await writer.flush()
            number += 1
        await writer.finish(SUCCESS)
        return number

    writing = asyncio.gather(*(write(writer) for writer in writers))
    while killed < 4:
        commits = station.journal.commits
        killed += len(await query(station.database, KILL_JOURNAL))

        async def went_on(since: int = commits) -> bool:
            return station.journal.commits > since or writing.done()

        await until(went_on, "a commit after a kill")

    for writer, written in zip(writers, await writing, strict=True):
        await assert_all_written_once(station, writer, written)
        assert (await run_row(station.database, writer.run_id))["status"] == "success"


def breaking(
    patch: pytest.MonkeyPatch, *, before: bool, times: int = 1, error: Callable[[], Exception] | None = None
) -> list[int]:
    """Let the next commits break: before the COMMIT, or after it and before its answer arrives.

    The list grows by one for each that broke.
    """
    broken: list[int] = []
    execute = AsyncConnection.execute
    make = error or (lambda: psycopg.OperationalError("the connection was lost"))

    async def breakable(self: AsyncConnection[Any], statement: Any, *arguments: Any, **options: Any) -> Any:
        if statement != "COMMIT" or len(broken) >= times:
            return await execute(self, statement, *arguments, **options)
        if not before:
            await execute(self, statement, *arguments, **options)
            if self.pgconn.pipeline_status:
                # It stands in the pipeline, which is sent when its block is left.
                await self.wait(self._pipeline._sync_gen())  # type: ignore[union-attr]
        broken.append(1)
        raise make()

    patch.setattr(AsyncConnection, "execute", breakable)
    return broken


async def end(writer: RunWriter, number: int, outcome: Outcome | None = None) -> None:
    """Hand in and wait, without a pause in which the journal could take one without the other."""
    hand_in(writer, number)
    if outcome is None:
        await writer.flush()
    else:
        await writer.finish(outcome)


@pytest.mark.parametrize("before", [True, False], ids=["before the commit", "after the commit"])
@pytest.mark.parametrize("times", [1, 3])
async def test_journal_neither_loses_nor_repeats_a_commit_without_answer(
    before: bool, times: int, station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = await open_writers(station, 3)
    broken = breaking(monkeypatch, before=before, times=times)
    for writer in writers:
        hand_in(writer, 0)
    await asyncio.gather(*(end(writer, 1) for writer in writers))
    await asyncio.gather(*(end(writer, 2, SUCCESS) for writer in writers))

    assert len(broken) == times
    for writer in writers:
        await assert_all_written_once(station, writer, 3)


OUTCOMES: dict[str, Outcome] = {
    "ended": SUCCESS,
    "retry": Released(after=30.0),
    "handed back": Released(),
    "rolled back": RolledBack(),
}


@pytest.mark.parametrize("before", [True, False], ids=["before the commit", "after the commit"])
@pytest.mark.parametrize("name", OUTCOMES)
async def test_outcome_without_answer_is_written_once(
    name: str, before: bool, station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = await open_writers(station, 2)
    await end(writer, 0)
    broken = breaking(monkeypatch, before=before)
    await asyncio.gather(end(writer, 1, OUTCOMES[name]), end(other, 0, SUCCESS))

    assert broken
    assert station.journal.commits == 2
    assert (await run_row(station.database, other.run_id))["status"] == "success"
    assert [event.kind for event in await thread_events(station.database, other.thread_id)][1:] == ["custom", "end"]
    events = await thread_events(station.database, writer.thread_id)
    assert payloads(events, "custom") == [0, 1]
    rows = await query(station.database, "SELECT * FROM run WHERE run_id = %s", writer.run_id)
    match name:
        case "ended":
            assert [row["status"] for row in rows] == ["success"]
            assert [event.kind for event in events] == ["metadata", "custom", "custom", "end"]
        case "retry":
            # Counted once, not once for each time the end was sent.
            assert [(row["status"], row["retries"]) for row in rows] == [("pending", 1)]
        case "handed back":
            assert [(row["status"], row["retries"]) for row in rows] == [("pending", 0)]
        case "rolled back":
            assert rows == []
            assert [end["status"] for end in payloads(events, "end")] == ["rolled_back"]


@pytest.mark.parametrize("before", [True, False], ids=["before the commit", "after the commit"])
async def test_commit_without_answer_in_a_group_with_a_stale_fence_is_written_once(
    before: bool, station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, ended, stale = await open_writers(station, 3)
    await query(
        station.database,
        "UPDATE run SET fence = fence + 1, status = 'pending', worker_id = NULL WHERE run_id = %s RETURNING 1",
        stale.run_id,
    )
    # The quick way fails with a division by zero before it comes to its COMMIT; what breaks is the other one.
    broken = breaking(monkeypatch, before=before)
    results = await asyncio.gather(end(held, 0), end(ended, 0, SUCCESS), end(stale, 0, SUCCESS), return_exceptions=True)

    assert broken
    assert [type(result) for result in results] == [type(None), type(None), LeaseLost]
    for writer in (held, ended):
        await assert_all_written_once(station, writer, 1)
    assert [event.kind for event in await thread_events(station.database, stale.thread_id)] == ["metadata"]
    await end(held, 1)
    await assert_all_written_once(station, held, 2)


async def test_run_taken_over_during_an_outage_fails_with_lease_lost(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit happened, its answer was lost, and before the second try another worker took the run."""
    writer, other = await open_writers(station, 2)

    def taken_over() -> Exception:
        with open_blocking_session(station.database.settings, "test") as connection:
            connection.execute(
                "UPDATE run SET fence = fence + 1, status = 'pending', worker_id = NULL WHERE run_id = %s",
                (writer.run_id,),
            )
        return psycopg.OperationalError("the connection was lost")

    breaking(monkeypatch, before=False, error=taken_over)
    results = await asyncio.gather(end(writer, 0), end(other, 0), return_exceptions=True)

    assert [type(result) for result in results] == [LeaseLost, type(None)]
    await assert_all_written_once(station, writer, 1)
    await assert_all_written_once(station, other, 1)


async def test_writer_lost_during_an_outage_does_not_delay_others(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = await open_writers(station, 2)

    def void() -> Exception:
        writer.mark_lost()
        return OSError("no route to host")

    breaking(monkeypatch, before=True, error=void)
    results = await asyncio.gather(end(writer, 0), end(other, 0), return_exceptions=True)

    assert [type(result) for result in results] == [LeaseLost, type(None)]
    assert [event.kind for event in await thread_events(station.database, writer.thread_id)] == ["metadata"]
    await assert_all_written_once(station, other, 1)


async def test_journal_fails_no_run_while_the_server_is_read_only(station: Station) -> None:
    """As after a fail-over, when the old address still leads to the standby."""
    [writer] = await open_writers(station, 1)
    hand_in(writer, 0)
    await writer.flush()
    await set_read_only(station.database, "on")
    await query(station.database, KILL_JOURNAL)
    hand_in(writer, 1)
    flushing = asyncio.create_task(writer.flush())
    await until(lambda: refused(station), "a commit was refused by the read-only server")
    assert not flushing.done()
    await set_read_only(station.database, "off")
    await flushing

    await assert_all_written_once(station, writer, 2)


async def set_read_only(database: Database, state: str) -> None:
    rows = await query(database, "SELECT current_database() AS name")
    async with database.connection() as connection:
        statement = f"ALTER DATABASE {rows[0]['name']} SET default_transaction_read_only = {state}"
        await connection.execute(statement.encode())


async def refused(station: Station) -> Any:
    return station.journal.backoff._failures > 1
