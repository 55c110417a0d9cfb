"""The hub of a web process: follows each watched thread once, whatever the number of watchers.

A watcher is a cursor. It is served from the thread's recent events if it is near their end, and from the log
otherwise: after a gap, after a pause, or because it only just came. The log is the only buffer there is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import orjson
import psycopg
import structlog

from holdfast.db.connect import Database
from holdfast.signals import Signals
from holdfast.streams.log import LogEvent, ended_runs, heads, read_after
from holdfast.telemetry.backoff import Backoff

log = structlog.get_logger(__name__)

RECENT = 1000
# Threads asked for at once by the slow poll.
POLL_BATCH = 2000


class HubClosed(Exception):
    """The process stops serving streams."""


class Feed:
    """One followed thread. `recent` ends at `head`; `stale` means that the log may hold more."""

    def __init__(self, database: Database, thread_id: UUID, after: int) -> None:
        self.thread_id = thread_id
        self.watchers = 0
        self.head = after
        self.stale = True
        # How often something about the thread was said to have changed that the log does not tell.
        self.touches = 0
        self._database = database
        self._recent: deque[LogEvent] = deque(maxlen=RECENT)
        self._changed = asyncio.Event()
        self._reading = asyncio.Lock()

    def hint(self, seq: int | None) -> None:
        """The log has grown to `seq`, or (None) may have."""
        if seq is None or seq > self.head:
            self.stale = True
        self.wake()

    def touch(self) -> None:
        """The thread's state has been updated, or the thread deleted."""
        self.touches += 1
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change. To be fetched before looking, so that nothing falls in between."""
        return self._changed

    async def read(self, after: int) -> list[LogEvent]:
        """The events after a cursor that are there now; empty when it is at the end."""
        if self.stale:
            async with self._reading:
                if self.stale:
                    await self._refill()
        if after >= self.head:
            return []
        if self._recent and self._recent[0].seq <= after + 1:
            return [event for event in self._recent if event.seq > after]
        async with self._database.connection() as connection:
            return await read_after(connection, self.thread_id, after)

    async def _refill(self) -> None:
        self.stale = False
        try:
            async with self._database.connection() as connection:
                events = await read_after(connection, self.thread_id, self.head, RECENT)
        except BaseException:
            self.stale = True
            raise
        if len(events) == RECENT:
            self.stale = True
        if events:
            self._recent.extend(events)
            self.head = events[-1].seq
            self.wake()


class Hub:
    """All feeds of a process, woken by hints and, behind them, by one slow poll for all."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._settings = database.settings
        self._feeds: dict[UUID, Feed] = {}
        self._ended: dict[UUID, tuple[asyncio.Event, Feed]] = {}
        self._run_watchers: dict[UUID, int] = {}
        self._closing = False
        signals.listen("events", self._hint)

    @property
    def watchers(self) -> int:
        """Open streams."""
        return sum(feed.watchers for feed in self._feeds.values())

    @property
    def threads(self) -> int:
        """Followed threads."""
        return len(self._feeds)

    @contextmanager
    def watch(self, thread_id: UUID, after: int) -> Iterator[Feed]:
        """Follow a thread for the length of the block."""
        feed = self._feeds.get(thread_id)
        if feed is None:
            feed = self._feeds[thread_id] = Feed(self._database, thread_id, after)
        feed.watchers += 1
        try:
            yield feed
        finally:
            feed.watchers -= 1
            if feed.watchers == 0:
                del self._feeds[thread_id]

    async def thread_events(
        self, thread_id: UUID, after: int, *, tick: float, touches: bool = False
    ) -> AsyncIterator[list[LogEvent]]:
        """A thread's events after a cursor, as they become visible, run after run; never ends by itself.

        Yields an empty list about every `tick` seconds, regularly, also while events flow. Survives an outage of the
        database. Raises HubClosed when the process is going away: the watcher goes on elsewhere, from its cursor.

        With `touches`, an empty list also comes when the thread was changed or deleted otherwise since it is being
        watched: look for yourself.
        """
        with self.watch(thread_id, after) as feed:
            async for events in self._follow(feed, after, tick, lambda: False, touches=touches):
                yield events

    async def run_events(
        self, thread_id: UUID, run_id: UUID, after: int, *, tick: float
    ) -> AsyncIterator[list[LogEvent]]:
        """The same for one run, up to and including its `end`. A run that ends without a word in the log (cancelled
        before it started, deleted) ends the iteration."""
        with self.watch(thread_id, after) as feed, self._watch_run(run_id, feed) as ended:
            async for events in self._follow(feed, after, tick, ended.is_set):
                mine = [event for event in events if event.run_id == run_id]
                if mine or not events:
                    yield mine
                if mine and mine[-1].kind == "end":
                    return

    async def _follow(
        self, feed: Feed, after: int, tick: float, over: Callable[[], bool], *, touches: bool = False
    ) -> AsyncIterator[list[LogEvent]]:
        loop = asyncio.get_running_loop()
        touched = 0
        backoff = Backoff("stream.outage", "stream.recovered")
        next_tick = loop.time() + tick
        while True:
            if self._closing:
                raise HubClosed
            changed, finished = feed.changed, over()
            try:
                events = await feed.read(after)
                backoff.succeeded()
            except (psycopg.Error, OSError) as error:
                await backoff.failed(error)
                events, finished = [], False
            if events:
                after = events[-1].seq
                yield events
            elif finished:
                return
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_tick):
                        await changed.wait()
            if loop.time() >= next_tick:
                next_tick += tick
                yield []
            elif touches and feed.touches != touched:
                touched = feed.touches
                yield []

    def close(self) -> None:
        """End all watching."""
        self._closing = True
        for feed in self._feeds.values():
            feed.wake()

    def run_ended(self, run_id: UUID) -> None:
        """Tell the watchers of a run that it is over."""
        if run_id in self._ended:
            event, feed = self._ended[run_id]
            event.set()
            # Its last events were committed with its end, or before: whoever stops watching must have read them.
            feed.hint(None)

    async def run(self) -> None:
        """The slow poll behind the hints."""
        backoff = Backoff("hub.outage", "hub.recovered")
        while True:
            await asyncio.sleep(self._settings.poll_interval)
            try:
                await self._poll()
                backoff.succeeded()
            except (psycopg.Error, OSError) as error:
                await backoff.failed(error)

    async def _poll(self) -> None:
        threads, runs = list(self._feeds), list(self._ended)
        for start in range(0, len(threads), POLL_BATCH):
            async with self._database.connection() as connection:
                for thread_id, seq in (await heads(connection, threads[start : start + POLL_BATCH])).items():
                    feed = self._feeds.get(thread_id)
                    if feed is not None and seq > feed.head:
                        feed.hint(seq)
        for start in range(0, len(runs), POLL_BATCH):
            async with self._database.connection() as connection:
                for run_id in await ended_runs(connection, runs[start : start + POLL_BATCH]):
                    self.run_ended(run_id)

    @contextmanager
    def _watch_run(self, run_id: UUID, feed: Feed) -> Iterator[asyncio.Event]:
        event, _ = self._ended.setdefault(run_id, (asyncio.Event(), feed))
        self._run_watchers[run_id] = self._run_watchers.get(run_id, 0) + 1
        try:
            yield event
        finally:
            self._run_watchers[run_id] -= 1
            if self._run_watchers[run_id] == 0:
                del self._run_watchers[run_id], self._ended[run_id]

    def _hint(self, payload: str | None) -> None:
        if payload is None:
            for feed in self._feeds.values():
                feed.hint(None)
            return
        with suppress(ValueError, TypeError, KeyError):
            hint = orjson.loads(payload)
            if isinstance(hint, dict):
                for run_id in hint.get("ended", ()):
                    self.run_ended(UUID(run_id))
                for thread_id in hint.get("touched", ()):
                    if (watched := self._feeds.get(UUID(thread_id))) is not None:
                        watched.touch()
                return
            for thread_id, seq in hint:
                if (watched := self._feeds.get(UUID(thread_id))) is not None:
                    watched.hint(seq)
