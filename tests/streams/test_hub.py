"""The hub without hints: what it asks the database, and how often."""

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
from holdfast.streams.log import PORTION_BYTES, LogEvent
from holdfast.streams.recent import RECENT
from tests.support.records import query
from tests.support.waiting import until_true

THREADS = 40
NOW = datetime(2026, 1, 1, tzinfo=UTC)
WRITE = "INSERT INTO event (thread_id, seq, run_id, kind, data) VALUES (%s, %s, %s, 'custom', '1') RETURNING seq"


class SilentSignals:
    """Signals that carry nothing."""

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
        raise AssertionError("the hub tells nobody anything")

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, poll_interval=60, degraded_poll=0.1)


class Watching:
    """Threads, each watched twice, and what their watchers have seen."""

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
async def asked(database: Database) -> AsyncIterator[Counter[str]]:
    """How often each question was put to the database."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        real = getattr(hub_module, name)

        async def ask(*arguments: Any) -> Any:
            counted[name] += 1
            return await real(*arguments)

        return ask

    with patch.multiple(hub_module, read_after=counting("read_after"), heads=counting("heads")):
        yield counted


async def write(database: Database, threads: list[UUID], number: int) -> None:
    for thread_id in threads:
        await query(database, WRITE, thread_id, number, uuid4())


async def test_while_hints_do_not_come_one_statement_asks_for_all_threads(
    database: Database, asked: Counter[str]
) -> None:
    signals = SilentSignals()
    hub = Hub(database, signals)
    polling = asyncio.create_task(hub.run())
    watching = Watching(hub)
    await until_true(lambda: asked["read_after"] == THREADS, "every thread is read once")
    signals.degraded = True
    for listener in signals.listeners:
        listener(None)
    await until_true(lambda: asked["heads"] >= 5, "the hub polls often")
    assert asked["read_after"] == THREADS, "and reads nothing where nothing is new"
    await write(database, watching.threads[:3], 1)
    await until_true(
        lambda: all(seen == [1] for thread in watching.threads[:3] for seen in watching.seen[thread]), "news are seen"
    )
    assert asked["read_after"] == THREADS + 3, "once for each thread that has news, however many watch it"
    await cancel_all([polling, *watching.tasks])
    assert not any(signals.followed.values())


async def test_when_hints_may_have_been_missed_it_looks_at_once(database: Database, asked: Counter[str]) -> None:
    signals = SilentSignals()
    hub = Hub(database, signals)
    polling = asyncio.create_task(hub.run())
    watching = Watching(hub)
    await until_true(lambda: asked["read_after"] == THREADS, "every thread is read once")
    await write(database, watching.threads, 1)
    for listener in signals.listeners:
        listener(None)
    await until_true(lambda: watching.all_saw(1), "what was missed is found")
    assert asked["heads"] == 1
    await cancel_all([polling, *watching.tasks])


class Expecting:
    """A thread with events of one run in its log, where another run is being created."""

    def __init__(self, database: Database, hub: Hub) -> None:
        self.thread_id, self.old, self.new = uuid4(), uuid4(), uuid4()
        self.hub = hub
        self._database = database

    async def write(self, run_id: UUID, *numbers: int, kind: str = "custom") -> None:
        for number in numbers:
            statement = WRITE.replace("'custom'", f"'{kind}'")
            await query(self._database, statement, self.thread_id, number, run_id)

    async def seen(self, run_id: UUID, after: int = 0, *, over: bool = False) -> list[int]:
        async with asyncio.timeout(60):
            watching = self.hub.run_events(self.thread_id, run_id, after, tick=None, over=over)
            return [event.seq async for events in watching for event in events]


@pytest.fixture
async def expecting(database: Database) -> Expecting:
    scene = Expecting(database, Hub(database, SilentSignals()))
    await scene.write(scene.old, 1, 2)
    await scene.write(scene.old, 3, kind="end")
    scene.hub.expect(scene.thread_id)
    return scene


async def test_who_comes_while_a_run_is_being_created_sees_what_was_before(expecting: Expecting) -> None:
    """A run that is over ends with the first empty answer, so there must not be one."""
    assert await expecting.seen(expecting.old, over=True) == [1, 2, 3]


async def test_and_after_it_was_created(expecting: Expecting) -> None:
    # Whoever created it knows less than the log.
    expecting.hub.begin(expecting.thread_id, expecting.new, 1)
    assert await expecting.seen(expecting.old, 1, over=True) == [2, 3]


async def test_the_events_of_the_expected_run_are_not_looked_for(expecting: Expecting, asked: Counter[str]) -> None:
    expecting.hub.begin(expecting.thread_id, expecting.new, 3)
    watching = asyncio.create_task(expecting.seen(expecting.new, 3))
    told = [LogEvent(4, expecting.new, "custom", "", b"1", NOW), LogEvent(5, expecting.new, "end", "", b"{}", NOW)]
    for flush in (told[:1], told[1:]):
        await asyncio.sleep(0)
        expecting.hub._feeds[expecting.thread_id].hint(flush[-1].seq, flush)
    assert await watching == [4, 5]
    assert asked["read_after"] == 0


async def test_a_run_that_is_over_is_seen_whole_although_others_are_behind(expecting: Expecting) -> None:
    """Somebody follows the thread, and has not heard yet how its run ended."""
    watching = asyncio.create_task(expecting.seen(expecting.new, 3))
    await until_true(lambda: expecting.hub.watchers == 1, "somebody watches")
    await expecting.hub._feeds[expecting.thread_id].read(3)
    await expecting.write(expecting.new, 4, 5)
    await expecting.write(expecting.new, 6, kind="end")
    assert await expecting.seen(expecting.new, 3, over=True) == [4, 5, 6]
    await cancel_all([watching])


async def test_nothing_piles_up_for_a_run_that_never_comes(expecting: Expecting) -> None:
    feed = expecting.hub._feeds[expecting.thread_id]
    for number in range(4, 3 * RECENT):
        feed.hint(number, [LogEvent(number, expecting.new, "custom", "", b"1", NOW)])
    assert feed._early is None
    assert feed.stale


async def test_large_events_do_not_pile_up_for_a_run_that_never_comes(expecting: Expecting) -> None:
    feed = expecting.hub._feeds[expecting.thread_id]
    large = b"x" * (PORTION_BYTES // 2)
    for number in (4, 5):
        feed.hint(number, [LogEvent(number, expecting.new, "custom", "", large, NOW)])
        assert feed._early is not None
    feed.hint(6, [LogEvent(6, expecting.new, "custom", "", large, NOW)])
    assert feed._early is None
    assert feed.stale
