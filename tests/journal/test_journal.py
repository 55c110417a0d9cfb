"""The journal: entries become durable in groups, in order and under their fences. A bad entry fails only its run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import orjson
import pytest

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.outcome import Ended, Released, RolledBack
from holdfast.engine.states import RunStatus
from holdfast.errors import Cancelled, JournalFailed, LeaseLost
from holdfast.journal.entries import CheckpointEntry
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import Settings, load_settings
from tests.support.catalogs import catalog_of
from tests.support.crash_graphs import steps
from tests.support.records import payloads, post_run, query, run_row, thread_events, thread_row
from tests.support.station import Station, open_station
from tests.support.waiting import until, until_true

SUCCESS = Ended(status=RunStatus.SUCCESS, thread_status="idle", values=b'{"words": []}')
TAKE_OVER = """
UPDATE run SET fence = fence + 1, status = 'pending', worker_id = NULL WHERE run_id = %s RETURNING run_id
"""


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, max_entry_bytes=1024 * 1024, journal_buffer_bytes=64 * 1024)


@pytest.fixture
async def station(settings: Settings, database: Database) -> AsyncIterator[Station]:
    async with open_station(settings, database, catalog_of(steps=steps([]))) as opened:
        yield opened


async def open_writers(station: Station, count: int) -> list[RunWriter]:
    """Writers of runs that were really created and claimed."""
    for _ in range(count):
        await post_run(station.database, "steps", input={})
    writers = [attempt.writer for attempt in await station.claim(count)]
    assert len(writers) == count
    return writers


async def written(station: Station, writer: RunWriter) -> list[Any]:
    """The payloads of a writer's thread, in order; the log is known to be gapless by then."""
    return payloads(await thread_events(station.database, writer.thread_id), "custom")


def say(writer: RunWriter, value: object) -> None:
    writer.add_event("custom", orjson.dumps(value))


@asynccontextmanager
async def blocked(database: Database, run_id: UUID) -> AsyncIterator[None]:
    """A commit that touches the run waits for the length of the block."""
    async with database.transaction() as connection:
        await connection.execute("SELECT 1 FROM run WHERE run_id = %s FOR UPDATE", (run_id,))
        yield


async def waits_for_lock(database: Database) -> bool:
    rows = await query(
        database,
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name ~ '^holdfast journal' AND wait_event_type = 'Lock'",
    )
    return bool(rows)


async def test_journal_writes_all_waiting_runs_in_one_commit(station: Station) -> None:
    writers = await open_writers(station, 20)
    for number, writer in enumerate(writers):
        say(writer, number)
        say(writer, -number)
    await asyncio.gather(*(writer.flush() for writer in writers))

    assert station.journal.commits == 1
    for number, writer in enumerate(writers):
        assert await written(station, writer) == [number, -number]
    assert sorted(station.announced) == sorted((writer.thread_id, 3) for writer in writers)


async def test_first_write_of_a_run_needs_no_waiter(station: Station) -> None:
    [writer] = await open_writers(station, 1)
    say(writer, "first")
    await until_true(lambda: station.announced == [(writer.thread_id, 2)], "it is written")
    assert await written(station, writer) == ["first"]


async def test_run_that_ends_within_the_first_write_delay_is_one_commit(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.journal.run_writer.FIRST_WRITE_DELAY_SECONDS", 3600)
    writer, other = await open_writers(station, 2)
    say(writer, "first")
    say(other, "awaited")
    await other.flush()
    assert (await written(station, writer), await written(station, other)) == ([], ["awaited"])
    say(writer, "last")
    await writer.finish(SUCCESS)
    assert station.journal.commits == 2
    assert await written(station, writer) == ["first", "last"]


@pytest.mark.parametrize(("runs", "delays"), [(1, 0), (2, 1)])
async def test_journal_delays_the_next_group_after_a_commit_of_several_runs(
    station: Station, monkeypatch: pytest.MonkeyPatch, runs: int, delays: int
) -> None:
    """After a commit of one run there is no delay: no other run can join, and a client may wait for the next step."""
    longest = 0.0123
    monkeypatch.setattr("holdfast.journal.journal.MAX_GROUP_DELAY_SECONDS", longest)
    delayed: list[float] = []
    delay = station.journal._delay_next_group

    async def noted(seconds: float) -> None:
        delayed.append(seconds)
        await delay(seconds)

    writers = await open_writers(station, runs)
    monkeypatch.setattr(station.journal, "_delay_next_group", noted)
    async with blocked(station.database, writers[0].run_id):
        for writer in writers:
            say(writer, "slowly")
        flushing = asyncio.gather(*(writer.flush() for writer in writers))
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        await asyncio.sleep(longest)
    await flushing
    say(writers[0], "after it")
    await writers[0].flush()
    assert delayed.count(longest) == delays
    assert station.journal.commits == 2


@pytest.mark.parametrize("other_one", ["waits too", "has ended", "is lost", "is superseded"])
async def test_delay_of_a_group_ends_when_all_runs_wait(
    station: Station, monkeypatch: pytest.MonkeyPatch, other_one: str
) -> None:
    delay = station.journal._delay_next_group
    monkeypatch.setattr(station.journal, "_delay_next_group", lambda _: delay(3600))
    writer, other, ended = await open_writers(station, 3)
    say(writer, "first")
    say(other, "first")
    flushing = [asyncio.create_task(writer.flush()), asyncio.create_task(other.flush())]
    await asyncio.gather(*flushing, ended.finish(SUCCESS))
    assert station.journal.commits == 1
    say(writer, "second")
    waiting = asyncio.create_task(writer.flush())
    await asyncio.sleep(0.05)
    assert not waiting.done(), "the other may still bring something"
    match other_one:
        case "waits too":
            await asyncio.wait_for(other.finish(SUCCESS), 30)
        case "has ended":
            await asyncio.wait_for(asyncio.gather(waiting, other.finish(SUCCESS)), 30)
            say(writer, "third")
            waiting = asyncio.create_task(writer.flush())
        case "is lost":
            other.mark_lost()
        case "is superseded":
            successor = await other.supersede()
            successor.mark_lost()
    await asyncio.wait_for(waiting, 30)
    assert await written(station, writer) == ["first", "second", *(["third"] if other_one == "has ended" else [])]


async def test_group_is_not_delayed_for_runs_that_waited_before(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run handed in its entries while the commit was under way."""
    delay = station.journal._delay_next_group
    monkeypatch.setattr(station.journal, "_delay_next_group", lambda _: delay(3600))
    writer, *ended = await open_writers(station, 3)
    async with blocked(station.database, ended[0].run_id):
        ending = [asyncio.create_task(one.finish(SUCCESS)) for one in ended]
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        say(writer, "meanwhile")
        waiting = asyncio.create_task(writer.flush())
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(waiting, *ending), 30)


async def test_group_grows_while_the_previous_commit_is_under_way(station: Station) -> None:
    first, *others = await open_writers(station, 10)
    async with blocked(station.database, first.run_id):
        say(first, "first")
        await until(lambda: waits_for_lock(station.database), "the first commit is under way")
        for number, writer in enumerate(others):
            say(writer, number)
        flushing = asyncio.gather(*(writer.flush() for writer in [first, *others]))
    await flushing

    assert station.journal.commits == 2


async def test_journal_keeps_order_and_numbers_under_any_interleaving(station: Station) -> None:
    writers = await open_writers(station, 12)
    chance = random.Random(7)

    async def write(writer: RunWriter) -> None:
        for number in range(60):
            say(writer, number)
            match chance.randrange(4):
                case 0:
                    await writer.flush()
                case 1:
                    await asyncio.sleep(0)
        await writer.finish(SUCCESS)

    await asyncio.gather(*(write(writer) for writer in writers))

    assert station.journal.commits < 12 * 60
    for writer in writers:
        events = await thread_events(station.database, writer.thread_id)
        assert payloads(events, "custom") == list(range(60))
        assert [event.kind for event in events[-1:]] == ["end"]
        assert (await thread_row(station.database, writer.thread_id))["last_seq"] == 62


async def test_journal_rejects_a_stale_fence_and_writes_the_other_runs(station: Station) -> None:
    before, stale, after = await open_writers(station, 3)
    await query(station.database, TAKE_OVER, stale.run_id)
    for writer in (before, stale, after):
        say(writer, "late")
    results = await asyncio.gather(before.flush(), stale.flush(), after.finish(SUCCESS), return_exceptions=True)

    assert [type(result) for result in results] == [type(None), LeaseLost, type(None)]
    assert await written(station, before) == ["late"]
    assert await written(station, stale) == []
    assert await written(station, after) == ["late"]
    assert (await run_row(station.database, after.run_id))["status"] == "success"
    with pytest.raises(LeaseLost):
        say(stale, "again")
    with pytest.raises(LeaseLost):
        await stale.finish(SUCCESS)
    assert (await run_row(station.database, stale.run_id))["status"] == "pending"


@pytest.mark.parametrize("outcome", [SUCCESS, Released(), Released(after=1.0), RolledBack()])
async def test_journal_rejects_each_outcome_under_a_stale_fence(outcome: Any, station: Station) -> None:
    stale, other = await open_writers(station, 2)
    await query(station.database, TAKE_OVER, stale.run_id)
    taken_over = await run_row(station.database, stale.run_id)

    results = await asyncio.gather(stale.finish(outcome), other.finish(outcome), return_exceptions=True)

    assert [type(result) for result in results] == [LeaseLost, type(None)]
    assert await run_row(station.database, stale.run_id) == taken_over
    assert [event.kind for event in await thread_events(station.database, stale.thread_id)] == ["metadata"]


async def test_writer_of_a_deleted_run_fails_with_lease_lost(station: Station) -> None:
    gone, other = await open_writers(station, 2)
    await query(station.database, "DELETE FROM run WHERE run_id = %s RETURNING run_id", gone.run_id)
    say(gone, "late")
    say(other, "fine")
    results = await asyncio.gather(gone.flush(), other.flush(), return_exceptions=True)

    assert [type(result) for result in results] == [LeaseLost, type(None)]
    assert await written(station, gone) == []


def spoil(writer: RunWriter, how: str) -> None:
    """Hand in something that the database, or the driver, refuses."""
    row = (str(writer.thread_id), "", "id", None, '{"channel_versions": {}}', "{}")
    match how:
        case "nul in the kind":
            writer.add_event("cus\0tom", b"{}")
        case "lone surrogate in the namespace":
            writer.add_event("custom", b"{}", "child:\ud800")
        case "nul in jsonb":
            writer.add_checkpoint(CheckpointEntry([], (*row[:4], '{"text": "\\u0000"}', "{}")))
        case "no json at all":
            writer.add_checkpoint(CheckpointEntry([], (*row[:4], "{", "{}")))
        case "number already given":
            writer.next_seq = 1


@pytest.mark.parametrize(
    "how",
    [
        "nul in the kind",
        "lone surrogate in the namespace",
        "nul in jsonb",
        "no json at all",
        "number already given",
    ],
)
async def test_journal_fails_only_the_run_whose_data_is_refused(how: str, station: Station) -> None:
    before, culprit, after = await open_writers(station, 3)
    say(culprit, "good")
    await culprit.flush()
    for writer in (before, culprit, after):
        say(writer, "with the bad")
    spoil(culprit, how)
    results = await asyncio.gather(before.flush(), culprit.flush(), after.finish(SUCCESS), return_exceptions=True)

    assert [type(result) for result in results] == [type(None), JournalFailed, type(None)]
    assert await written(station, before) == ["with the bad"]
    assert await written(station, after) == ["with the bad"]
    # What came with it is left out as well: a run's part of a batch is written whole or not at all.
    assert await written(station, culprit) == ["good"]
    with pytest.raises(JournalFailed):
        say(culprit, "more")
    culprit.discard()
    culprit.next_seq = 3
    await culprit.finish(Ended(status=RunStatus.ERROR, thread_status="error", error={"error": "x", "message": "\0"}))
    assert (await run_row(station.database, culprit.run_id))["status"] == "error"
    say(before, "on")
    await before.flush()
    assert await written(station, before) == ["with the bad", "on"]


async def test_writer_refuses_an_entry_that_is_too_large(station: Station) -> None:
    writer, other = await open_writers(station, 2)
    say(writer, "small")
    with pytest.raises(JournalFailed, match="MAX_ENTRY_BYTES"):
        writer.add_event("custom", b"x" * (1024 * 1024 + 1))
    say(other, "fine")
    await asyncio.gather(writer.flush(), other.flush())

    assert await written(station, writer) == ["small"]


async def test_writer_waits_for_space_when_its_buffer_is_full(station: Station) -> None:
    fast, slow = await open_writers(station, 2)
    handed_in = 0

    async def write() -> None:
        nonlocal handed_in
        for number in range(100):
            say(fast, [number, "x" * 4096])
            handed_in += 1
            await fast.wait_for_space()

    async with blocked(station.database, fast.run_id):
        writing = asyncio.create_task(write())
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        await until_true(lambda: handed_in > 10, "the buffer fills")
        for _ in range(50):
            await asyncio.sleep(0)
        # 64 KiB are allowed to wait, and one more entry than fits was handed in.
        assert handed_in == 16
        assert not writing.done()
        say(slow, "small")
        await asyncio.wait_for(slow.wait_for_space(), 60)
    await writing
    await fast.flush()

    assert [number for number, _ in await written(station, fast)] == list(range(100))


async def test_lost_writer_writes_nothing_more(station: Station) -> None:
    writer, other = await open_writers(station, 2)
    async with blocked(station.database, other.run_id):
        say(other, "in flight")
        await until(lambda: waits_for_lock(station.database), "a commit is under way")
        say(writer, "waiting")
        flushing = asyncio.gather(writer.flush(), writer.finish(SUCCESS), return_exceptions=True)
        await asyncio.sleep(0)
        writer.mark_lost()
        assert [type(result) for result in await flushing] == [LeaseLost, LeaseLost]
    await other.flush()

    assert await written(station, writer) == []
    assert await written(station, other) == ["in flight"]
    with pytest.raises(LeaseLost):
        say(writer, "late")
    writer.discard()
    with pytest.raises(LeaseLost):
        await writer.finish(SUCCESS)


async def test_requested_rollback_prevents_the_end_of_a_run(station: Station) -> None:
    writer, other = await open_writers(station, 2)
    say(writer, "to be undone")
    await writer.flush()
    await cancel_runs(station.database, writer.thread_id, None, "rollback")
    results = await asyncio.gather(writer.finish(SUCCESS), other.finish(SUCCESS), return_exceptions=True)

    assert isinstance(results[0], Cancelled)
    assert results[0].action == "rollback"
    assert results[1] is None
    assert (await run_row(station.database, writer.run_id))["status"] == "running"
    writer.discard()
    await writer.finish(RolledBack())
    assert await query(station.database, "SELECT 1 FROM run WHERE run_id = %s", writer.run_id) == []
    assert (await thread_row(station.database, writer.thread_id))["status"] == "idle"
    assert (await thread_row(station.database, writer.thread_id))["last_seq"] == 3


@pytest.mark.parametrize("outcome", [Released(), Released(after=0.5)])
async def test_requested_rollback_lets_a_run_be_released(outcome: Any, station: Station) -> None:
    """Releasing a run is not its end: the worker that claims it next finds the request."""
    [writer] = await open_writers(station, 1)
    await cancel_runs(station.database, writer.thread_id, None, "rollback")
    await writer.finish(outcome)

    run = await run_row(station.database, writer.run_id)
    assert (run["status"], run["cancel_action"]) == ("pending", "rollback")


async def test_flush_waits_for_entries_in_flight(station: Station) -> None:
    [writer] = await open_writers(station, 1)
    await writer.flush()
    assert station.journal.commits == 0
    async with blocked(station.database, writer.run_id):
        say(writer, "in flight")
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        flushing = asyncio.create_task(writer.flush())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not flushing.done()
    await flushing
    assert await written(station, writer) == ["in flight"]


async def test_cancelled_flush_does_not_disturb_the_journal(station: Station) -> None:
    [writer] = await open_writers(station, 1)
    async with blocked(station.database, writer.run_id):
        say(writer, 1)
        flushing = asyncio.create_task(writer.flush())
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
    say(writer, 2)
    await writer.flush()
    assert await written(station, writer) == [1, 2]


async def test_superseded_writer_writes_nothing_and_its_successor_continues(station: Station) -> None:
    [writer] = await open_writers(station, 1)
    say(writer, 1)
    successor = await writer.supersede()
    with pytest.raises(LeaseLost):
        say(writer, "from the one left behind")
    say(successor, 2)
    await successor.finish(SUCCESS)

    assert await written(station, writer) == [1, 2]
    assert (await run_row(station.database, writer.run_id))["status"] == "success"


async def test_stopped_journal_writes_what_was_handed_in(settings: Settings, database: Database) -> None:
    async with open_station(settings, database, catalog_of(steps=steps([]))) as station:
        writers = await open_writers(station, 5)
        for writer in writers:
            say(writer, "at the last moment")
        await station.journal.stop()
    for writer in writers:
        assert await written(station, writer) == ["at the last moment"]
