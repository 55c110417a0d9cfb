"""The journal: what runs hand in becomes durable in groups, in order, under their fences, and each answers for its
own."""

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
from holdfast.journal.batch import CheckpointEntry
from holdfast.journal.journal import Lane
from holdfast.settings import Settings, load_settings
from tests.support.catalogs import catalog_of
from tests.support.records import payloads, post_run, query, run_row, thread_events, thread_row
from tests.support.station import Station, open_station
from tests.support.waiting import until, until_true
from tests.worker.crash_graphs import steps

SUCCESS = Ended(status=RunStatus.SUCCESS, resting="idle", values=b'{"words": []}')
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


async def open_lanes(station: Station, count: int) -> list[Lane]:
    """Lanes of runs that were really created and claimed."""
    for _ in range(count):
        await post_run(station.database, "steps", input={})
    lanes = [attempt.lane for attempt in await station.claim(count)]
    assert len(lanes) == count
    return lanes


async def written(station: Station, lane: Lane) -> list[Any]:
    """The payloads of a lane's thread, in order; the log is known to be gapless by then."""
    return payloads(await thread_events(station.database, lane.thread_id), "custom")


def say(lane: Lane, value: object) -> None:
    lane.event("custom", orjson.dumps(value))


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


async def test_everything_that_waits_goes_into_one_commit(station: Station) -> None:
    lanes = await open_lanes(station, 20)
    for number, lane in enumerate(lanes):
        say(lane, number)
        say(lane, -number)
    await asyncio.gather(*(lane.flush() for lane in lanes))

    assert station.journal.commits == 1
    for number, lane in enumerate(lanes):
        assert await written(station, lane) == [number, -number]
    assert sorted(station.announced) == sorted((lane.thread_id, 3) for lane in lanes)


async def test_what_a_run_says_first_is_written_although_nobody_waits(station: Station) -> None:
    [lane] = await open_lanes(station, 1)
    say(lane, "first")
    await until_true(lambda: station.announced == [(lane.thread_id, 2)], "it is written")
    assert await written(station, lane) == ["first"]


async def test_a_run_that_is_over_while_its_first_entries_rest_is_one_commit(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.journal.run_writer.BREATH", 3600)
    lane, other = await open_lanes(station, 2)
    say(lane, "first")
    say(other, "awaited")
    await other.flush()
    assert (await written(station, lane), await written(station, other)) == ([], ["awaited"])
    say(lane, "last")
    await lane.finish(SUCCESS)
    assert station.journal.commits == 2
    assert await written(station, lane) == ["first", "last"]


@pytest.mark.parametrize(("runs", "rests"), [(1, 0), (2, 1)])
async def test_after_a_slow_commit_of_several_runs_the_journal_rests(
    station: Station, monkeypatch: pytest.MonkeyPatch, runs: int, rests: int
) -> None:
    """Of one run it does not: there is nobody to wait for, and somebody may wait for the run's next step."""
    longest = 0.0123
    monkeypatch.setattr("holdfast.journal.journal.LONGEST_REST", longest)
    rested: list[float] = []
    rest = station.journal._rest

    async def noted(seconds: float) -> None:
        rested.append(seconds)
        await rest(seconds)

    lanes = await open_lanes(station, runs)
    monkeypatch.setattr(station.journal, "_rest", noted)
    async with blocked(station.database, lanes[0].run_id):
        for lane in lanes:
            say(lane, "slowly")
        flushing = asyncio.gather(*(lane.flush() for lane in lanes))
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        await asyncio.sleep(longest)
    await flushing
    say(lanes[0], "after it")
    await lanes[0].flush()
    assert rested.count(longest) == rests
    assert station.journal.commits == 2


@pytest.mark.parametrize("other_one", ["waits too", "has ended", "is lost", "is superseded"])
async def test_the_rest_is_over_when_everybody_waits(
    station: Station, monkeypatch: pytest.MonkeyPatch, other_one: str
) -> None:
    rest = station.journal._rest
    monkeypatch.setattr(station.journal, "_rest", lambda _: rest(3600))
    lane, other, ended = await open_lanes(station, 3)
    say(lane, "first")
    say(other, "first")
    flushing = [asyncio.create_task(lane.flush()), asyncio.create_task(other.flush())]
    await asyncio.gather(*flushing, ended.finish(SUCCESS))
    assert station.journal.commits == 1
    say(lane, "second")
    waiting = asyncio.create_task(lane.flush())
    await asyncio.sleep(0.05)
    assert not waiting.done(), "the other may still bring something"
    match other_one:
        case "waits too":
            await asyncio.wait_for(other.finish(SUCCESS), 30)
        case "has ended":
            await asyncio.wait_for(asyncio.gather(waiting, other.finish(SUCCESS)), 30)
            say(lane, "third")
            waiting = asyncio.create_task(lane.flush())
        case "is lost":
            other.void()
        case "is superseded":
            successor = await other.supersede()
            successor.void()
    await asyncio.wait_for(waiting, 30)
    assert await written(station, lane) == ["first", "second", *(["third"] if other_one == "has ended" else [])]


async def test_who_waits_since_before_is_not_kept_waiting(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it handed in came while the commit was under way."""
    rest = station.journal._rest
    monkeypatch.setattr(station.journal, "_rest", lambda _: rest(3600))
    lane, *ended = await open_lanes(station, 3)
    async with blocked(station.database, ended[0].run_id):
        ending = [asyncio.create_task(one.finish(SUCCESS)) for one in ended]
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        say(lane, "meanwhile")
        waiting = asyncio.create_task(lane.flush())
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(waiting, *ending), 30)


async def test_a_group_grows_while_the_previous_commit_takes(station: Station) -> None:
    first, *others = await open_lanes(station, 10)
    async with blocked(station.database, first.run_id):
        say(first, "first")
        await until(lambda: waits_for_lock(station.database), "the first commit is under way")
        for number, lane in enumerate(others):
            say(lane, number)
        flushing = asyncio.gather(*(lane.flush() for lane in [first, *others]))
    await flushing

    assert station.journal.commits == 2


async def test_order_and_numbers_survive_any_interleaving(station: Station) -> None:
    lanes = await open_lanes(station, 12)
    chance = random.Random(7)

    async def write(lane: Lane) -> None:
        for number in range(60):
            say(lane, number)
            match chance.randrange(4):
                case 0:
                    await lane.flush()
                case 1:
                    await asyncio.sleep(0)
        await lane.finish(SUCCESS)

    await asyncio.gather(*(write(lane) for lane in lanes))

    assert station.journal.commits < 12 * 60
    for lane in lanes:
        events = await thread_events(station.database, lane.thread_id)
        assert payloads(events, "custom") == list(range(60))
        assert [event.kind for event in events[-1:]] == ["end"]
        assert (await thread_row(station.database, lane.thread_id))["last_seq"] == 62


async def test_a_stale_fence_writes_nothing_and_its_neighbours_are_written(station: Station) -> None:
    before, stale, after = await open_lanes(station, 3)
    await query(station.database, TAKE_OVER, stale.run_id)
    for lane in (before, stale, after):
        say(lane, "late")
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
async def test_no_outcome_is_written_under_a_stale_fence(outcome: Any, station: Station) -> None:
    stale, other = await open_lanes(station, 2)
    await query(station.database, TAKE_OVER, stale.run_id)
    taken_over = await run_row(station.database, stale.run_id)

    results = await asyncio.gather(stale.finish(outcome), other.finish(outcome), return_exceptions=True)

    assert [type(result) for result in results] == [LeaseLost, type(None)]
    assert await run_row(station.database, stale.run_id) == taken_over
    assert [event.kind for event in await thread_events(station.database, stale.thread_id)] == ["metadata"]


async def test_a_run_that_was_deleted_is_told_so(station: Station) -> None:
    gone, other = await open_lanes(station, 2)
    await query(station.database, "DELETE FROM run WHERE run_id = %s RETURNING run_id", gone.run_id)
    say(gone, "late")
    say(other, "fine")
    results = await asyncio.gather(gone.flush(), other.flush(), return_exceptions=True)

    assert [type(result) for result in results] == [LeaseLost, type(None)]
    assert await written(station, gone) == []


def spoil(lane: Lane, how: str) -> None:
    """Hand in something that the database, or the driver, refuses."""
    row = (str(lane.thread_id), "", "id", None, '{"channel_versions": {}}', "{}")
    match how:
        case "nul in the kind":
            lane.event("cus\0tom", b"{}")
        case "lone surrogate in the namespace":
            lane.event("custom", b"{}", "child:\ud800")
        case "nul in jsonb":
            lane.checkpoint(CheckpointEntry([], (*row[:4], '{"text": "\\u0000"}', "{}")))
        case "no json at all":
            lane.checkpoint(CheckpointEntry([], (*row[:4], "{", "{}")))
        case "number already given":
            lane.next_seq = 1


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
async def test_what_the_database_refuses_fails_its_own_run_only(how: str, station: Station) -> None:
    before, culprit, after = await open_lanes(station, 3)
    say(culprit, "good")
    await culprit.flush()
    for lane in (before, culprit, after):
        say(lane, "with the bad")
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
    await culprit.finish(Ended(status=RunStatus.ERROR, resting="error", error={"error": "x", "message": "\0"}))
    assert (await run_row(station.database, culprit.run_id))["status"] == "error"
    say(before, "on")
    await before.flush()
    assert await written(station, before) == ["with the bad", "on"]


async def test_an_entry_that_is_too_large_is_refused_at_once(station: Station) -> None:
    lane, other = await open_lanes(station, 2)
    say(lane, "small")
    with pytest.raises(JournalFailed, match="MAX_ENTRY_BYTES"):
        lane.event("custom", b"x" * (1024 * 1024 + 1))
    say(other, "fine")
    await asyncio.gather(lane.flush(), other.flush())

    assert await written(station, lane) == ["small"]


async def test_a_run_that_outpaces_the_database_waits(station: Station) -> None:
    fast, slow = await open_lanes(station, 2)
    handed_in = 0

    async def write() -> None:
        nonlocal handed_in
        for number in range(100):
            say(fast, [number, "x" * 4096])
            handed_in += 1
            await fast.room()

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
        await asyncio.wait_for(slow.room(), 60)
    await writing
    await fast.flush()

    assert [number for number, _ in await written(station, fast)] == list(range(100))


async def test_a_void_lane_writes_nothing_more(station: Station) -> None:
    lane, other = await open_lanes(station, 2)
    async with blocked(station.database, other.run_id):
        say(other, "in flight")
        await until(lambda: waits_for_lock(station.database), "a commit is under way")
        say(lane, "waiting")
        flushing = asyncio.gather(lane.flush(), lane.finish(SUCCESS), return_exceptions=True)
        await asyncio.sleep(0)
        lane.void()
        assert [type(result) for result in await flushing] == [LeaseLost, LeaseLost]
    await other.flush()

    assert await written(station, lane) == []
    assert await written(station, other) == ["in flight"]
    with pytest.raises(LeaseLost):
        say(lane, "late")
    lane.discard()
    with pytest.raises(LeaseLost):
        await lane.finish(SUCCESS)


async def test_a_rollback_asked_for_meanwhile_outranks_the_end(station: Station) -> None:
    lane, other = await open_lanes(station, 2)
    say(lane, "to be undone")
    await lane.flush()
    await cancel_runs(station.database, lane.thread_id, None, "rollback")
    results = await asyncio.gather(lane.finish(SUCCESS), other.finish(SUCCESS), return_exceptions=True)

    assert isinstance(results[0], Cancelled)
    assert results[0].action == "rollback"
    assert results[1] is None
    assert (await run_row(station.database, lane.run_id))["status"] == "running"
    lane.discard()
    await lane.finish(RolledBack())
    assert await query(station.database, "SELECT 1 FROM run WHERE run_id = %s", lane.run_id) == []
    assert (await thread_row(station.database, lane.thread_id))["status"] == "idle"
    assert (await thread_row(station.database, lane.thread_id))["last_seq"] == 3


@pytest.mark.parametrize("outcome", [Released(), Released(after=0.5)])
async def test_a_rollback_asked_for_meanwhile_waits_while_the_run_goes_on(outcome: Any, station: Station) -> None:
    """Handing a run back is no end: whoever claims it next sees the request."""
    [lane] = await open_lanes(station, 1)
    await cancel_runs(station.database, lane.thread_id, None, "rollback")
    await lane.finish(outcome)

    run = await run_row(station.database, lane.run_id)
    assert (run["status"], run["cancel_action"]) == ("pending", "rollback")


async def test_flush_waits_for_what_is_in_flight(station: Station) -> None:
    [lane] = await open_lanes(station, 1)
    await lane.flush()
    assert station.journal.commits == 0
    async with blocked(station.database, lane.run_id):
        say(lane, "in flight")
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        flushing = asyncio.create_task(lane.flush())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not flushing.done()
    await flushing
    assert await written(station, lane) == ["in flight"]


async def test_a_flush_that_is_cancelled_leaves_the_journal_alone(station: Station) -> None:
    [lane] = await open_lanes(station, 1)
    async with blocked(station.database, lane.run_id):
        say(lane, 1)
        flushing = asyncio.create_task(lane.flush())
        await until(lambda: waits_for_lock(station.database), "the commit is under way")
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
    say(lane, 2)
    await lane.flush()
    assert await written(station, lane) == [1, 2]


async def test_a_superseded_lane_is_silent_and_its_successor_goes_on(station: Station) -> None:
    [lane] = await open_lanes(station, 1)
    say(lane, 1)
    successor = await lane.supersede()
    with pytest.raises(LeaseLost):
        say(lane, "from the one left behind")
    say(successor, 2)
    await successor.finish(SUCCESS)

    assert await written(station, lane) == [1, 2]
    assert (await run_row(station.database, lane.run_id))["status"] == "success"


async def test_close_writes_what_waits_first(settings: Settings, database: Database) -> None:
    async with open_station(settings, database, catalog_of(steps=steps([]))) as station:
        lanes = await open_lanes(station, 5)
        for lane in lanes:
            say(lane, "at the last moment")
        station.journal.close()
    for lane in lanes:
        assert await written(station, lane) == ["at the last moment"]
