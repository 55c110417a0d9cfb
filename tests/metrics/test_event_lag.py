"""Events delivered, and how late: of what is new, not of what a watcher has missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.streams.hub import Hub
from holdfast.telemetry.metrics import Metrics
from tests.streams.test_hub import SilentSignals
from tests.support.records import query
from tests.support.waiting import until_true

# An event as old as one likes.
WRITE = """
INSERT INTO event (thread_id, seq, run_id, kind, data, created_at)
VALUES (%s, %s, %s, 'custom', '1', now() - make_interval(secs => %s)) RETURNING seq
"""


class Scene:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.signals = SilentSignals()
        self.metrics = Metrics()
        self.hub = Hub(database, self.signals, self.metrics)
        self.thread_id = uuid4()
        self.seen: list[int] = []
        self.reader: asyncio.Task[None] | None = None

    async def write(self, *numbers: int, age: float = 0.0) -> None:
        for number in numbers:
            await query(self.database, WRITE, self.thread_id, number, UUID(int=1), age)

    def watch(self) -> None:
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for events in self.hub.thread_events(self.thread_id, 0, tick=None):
            self.seen += [event.seq for event in events]

    async def reads(self, *numbers: int) -> None:
        await until_true(lambda: self.seen == list(numbers), f"the watcher has {numbers}")

    async def waits(self) -> None:
        feed = self.hub._feeds[self.thread_id]
        await until_true(lambda: bool(feed.changed._waiters), "the watcher waits")

    @property
    def lags(self) -> tuple[int, float]:
        """How many were observed, and their sum."""
        [(_, counts, total)] = self.metrics.event_lag.tallies()
        return sum(counts), total


@pytest.fixture
async def scene(database: Database) -> AsyncIterator[Scene]:
    scene = Scene(database)
    yield scene
    if scene.reader is not None:
        await cancel_all([scene.reader])


async def test_the_past_is_delivered_and_is_nobodys_delay(scene: Scene) -> None:
    await scene.write(1, 2, 3, age=3600)
    scene.watch()
    await scene.reads(1, 2, 3)
    await scene.waits()
    assert scene.metrics.events_delivered.values() == {(): 3}
    assert scene.lags == (0, 0.0)
    await scene.write(4, 5, age=7)
    scene.hub._feeds[scene.thread_id].hint(None)
    await scene.reads(1, 2, 3, 4, 5)
    count, lag = scene.lags
    assert count == 1
    assert 7 <= lag < 60
    assert scene.metrics.events_delivered.values() == {(): 5}


async def test_the_databases_clock_is_the_one_that_counts(scene: Scene) -> None:
    await scene.write(1)
    scene.watch()
    await scene.reads(1)
    await scene.waits()
    # The database is an hour ahead of us: without regard to that, nothing would seem to be late.
    scene.metrics.clock_ahead = 3600.0
    await scene.write(2, age=-3600 + 5)
    scene.hub._feeds[scene.thread_id].hint(None)
    await scene.reads(1, 2)
    count, lag = scene.lags
    assert count == 1
    assert 5 <= lag < 60


async def test_who_only_looks_is_sent_nothing(scene: Scene) -> None:
    await scene.write(1, 2)
    looking = scene.hub.thread_events(scene.thread_id, 0, tick=None, counted=False)
    assert [event.seq for event in await anext(looking)] == [1, 2]
    await looking.aclose()  # type: ignore[attr-defined]
    assert scene.metrics.events_delivered.values() == {(): 0}
