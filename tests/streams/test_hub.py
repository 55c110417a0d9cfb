"""The hub without hints: its reads of the database, and the watching of newly created runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.settings import Settings, load_settings
from holdfast.signals import Listener, Topic
from holdfast.streams import hub as hub_module
from holdfast.streams.hub import Hub
from holdfast.streams.log import EVENT_PAGE_BYTES, LogEvent
from holdfast.streams.recent_events import MAX_RECENT_EVENTS
from holdfast.telemetry.metrics import Metrics
from tests.support.records import query
from tests.support.waiting import until_true

THREADS = 40
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WRITE = "INSERT INTO event (thread_id, seq, run_id, kind, data) VALUES (%s, %s, %s, 'custom', '1') RETURNING seq"


class SilentSignals:
    """Signals that deliver no hints."""

    max_payload = 1000

    def __init__(self) -> None:
        self.degraded = False
        self.listeners: list[Listener] = []
        self.followed: Counter[UUID] = Counter()

    def listen(self, topic: Topic, listener: Listener) -> None:
        self.listeners.append(listener)

    def follow(self, thread_id: UUID, on_subscribed: Callable[[], None]) -> None:
        self.followed[thread_id] += 1

    def unfollow(self, thread_id: UUID) -> None:
        self.followed[thread_id] -= 1

    def publish(self, topic: Topic, payload: str, *, thread_id: UUID | None = None, max_delay: float = 0.0) -> None:
        raise AssertionError("the hub publishes no hints")

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, poll_interval=60, degraded_poll=0.1)


class Watching:
    """Threads with two watchers each, and the events that these have got."""

    def __init__(self, hub: Hub) -> None:
        self.threads = [uuid4() for _ in range(THREADS)]
        self.seen: dict[UUID, list[list[int]]] = {thread_id: [[], []] for thread_id in self.threads}
        self.tasks = [
            asyncio.create_task(self._watch(hub, thread_id, seen))
            for thread_id, both in self.seen.items()
            for seen in both
        ]

    async def _watch(self, hub: Hub, thread_id: UUID, seen: list[int]) -> None:
        async for events in hub.thread_events(thread_id, 0, tick=60):
            seen += [event.seq for event in events]

    def all_saw(self, *numbers: int) -> bool:
        return all(seen == list(numbers) for both in self.seen.values() for seen in both)


@pytest.fixture
async def reads(database: Database) -> AsyncIterator[Counter[str]]:
    """Counts the calls of the functions that read the database."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        real = getattr(hub_module, name)

        async def ask(*arguments: Any) -> Any:
            counted[name] += 1
            return await real(*arguments)

        return ask

    with patch.multiple(hub_module, read_after=counting("read_after"), newest_seqs=counting("newest_seqs")):
        yield counted


async def write(database: Database, threads: list[UUID], number: int) -> None:
    for thread_id in threads:
        await query(database, WRITE, thread_id, number, uuid4())


async def test_degraded_hub_polls_all_threads_with_one_statement(database: Database, reads: Counter[str]) -> None:
    signals = SilentSignals()
    hub = Hub(database, signals, Metrics())
    await hub.start()
    watching = Watching(hub)
    await until_true(lambda: reads["read_after"] == THREADS, "every thread is read once")
    signals.degraded = True
    for listener in signals.listeners:
        listener(None)
    await until_true(lambda: reads["newest_seqs"] >= 5, "the hub polls often")
    assert reads["read_after"] == THREADS, "threads without new events are not read"
    await write(database, watching.threads[:3], 1)
    await until_true(
        lambda: all(seen == [1] for thread in watching.threads[:3] for seen in watching.seen[thread]),
        "new events arrive",
    )
    assert reads["read_after"] == THREADS + 3, "one read for each thread with new events, for all its watchers"
    await hub.stop()
    await cancel_all(watching.tasks)
    assert not any(signals.followed.values())


async def test_hub_polls_at_once_when_hints_may_be_lost(database: Database, reads: Counter[str]) -> None:
    signals = SilentSignals()
    hub = Hub(database, signals, Metrics())
    await hub.start()
    watching = Watching(hub)
    await until_true(lambda: reads["read_after"] == THREADS, "every thread is read once")
    await write(database, watching.threads, 1)
    for listener in signals.listeners:
        listener(None)
    await until_true(lambda: watching.all_saw(1), "missed events are found")
    assert reads["newest_seqs"] == 1
    await hub.stop()
    await cancel_all(watching.tasks)


class Expecting:
    """A thread whose log has events of one run while another run is being created."""

    def __init__(self, database: Database, hub: Hub) -> None:
        self.thread_id, self.old, self.new = uuid4(), uuid4(), uuid4()
        self.hub = hub
        self._database = database

    async def write(self, run_id: UUID, *numbers: int, kind: str = "custom") -> None:
        for number in numbers:
            statement = WRITE.replace("'custom'", f"'{kind}'")
            await query(self._database, statement, self.thread_id, number, run_id)

    async def seen(self, run_id: UUID, after: int = 0, *, ended: bool = False) -> list[int]:
        async with asyncio.timeout(60):
            watching = self.hub.run_events(self.thread_id, run_id, after, tick=None, ended=ended)
            return [event.seq async for events in watching for event in events]


@pytest.fixture
async def expecting(database: Database) -> Expecting:
    scene = Expecting(database, Hub(database, SilentSignals(), Metrics()))
    await scene.write(scene.old, 1, 2)
    await scene.write(scene.old, 3, kind="end")
    scene.hub.expect_run(scene.thread_id)
    return scene


async def test_watcher_during_creation_of_run_gets_earlier_events(expecting: Expecting) -> None:
    """The stream of an ended run ends at the first empty read, so the first read must return its events."""
    assert await expecting.seen(expecting.old, ended=True) == [1, 2, 3]


async def test_watcher_after_creation_of_run_gets_earlier_events(expecting: Expecting) -> None:
    # The log has more events than the creation of the run knows of.
    expecting.hub.run_created(expecting.thread_id, expecting.new, 1)
    assert await expecting.seen(expecting.old, 1, ended=True) == [2, 3]


async def test_events_of_expected_run_are_not_read_from_log(expecting: Expecting, reads: Counter[str]) -> None:
    expecting.hub.run_created(expecting.thread_id, expecting.new, 3)
    watching = asyncio.create_task(expecting.seen(expecting.new, 3))
    first = LogEvent(4, expecting.new, "custom", "", b"1", NOW)
    last = LogEvent(5, expecting.new, "end", "", b"{}", NOW)
    for flush in ([first], [last]):
        await asyncio.sleep(0)
        expecting.hub._feeds[expecting.thread_id].hint(flush[-1].seq, flush)
    assert await watching == [4, 5]
    assert reads["read_after"] == 0


async def test_watcher_of_ended_run_gets_all_events_from_stale_feed(expecting: Expecting) -> None:
    """Another watcher follows the thread, and its feed does not have the last events of the run yet."""
    watching = asyncio.create_task(expecting.seen(expecting.new, 3))
    await until_true(lambda: expecting.hub.watchers == 1, "the first watcher has started")
    await expecting.hub._feeds[expecting.thread_id].read(3)
    await expecting.write(expecting.new, 4, 5)
    await expecting.write(expecting.new, 6, kind="end")
    assert await expecting.seen(expecting.new, 3, ended=True) == [4, 5, 6]
    await cancel_all([watching])


async def test_buffered_hints_of_expected_run_are_limited_in_number(expecting: Expecting) -> None:
    feed = expecting.hub._feeds[expecting.thread_id]
    for number in range(4, 3 * MAX_RECENT_EVENTS):
        feed.hint(number, [LogEvent(number, expecting.new, "custom", "", b"1", NOW)])
    assert feed._buffered is None
    assert feed.stale


async def test_buffered_hints_of_expected_run_are_limited_in_bytes(expecting: Expecting) -> None:
    feed = expecting.hub._feeds[expecting.thread_id]
    large = b"x" * (EVENT_PAGE_BYTES // 2)
    for number in (4, 5):
        feed.hint(number, [LogEvent(number, expecting.new, "custom", "", large, NOW)])
        assert feed._buffered is not None
    feed.hint(6, [LogEvent(6, expecting.new, "custom", "", large, NOW)])
    assert feed._buffered is None
    assert feed.stale
