"""The hub of a web process: follows each watched thread once, whatever the number of watchers.

A watcher is a cursor. It is served from the thread's recent events if it is near their end, and from the log
otherwise: after a gap, after a pause, or because it only just came. The log is the only buffer there is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.lifecycle.backoff import Backoff
from holdfast.signals import Signals
from holdfast.streams.changes import Alarms, Change
from holdfast.streams.hints import EventHint, Touched, understand
from holdfast.streams.log import PORTION_BYTES, LogEvent, ended_runs, has_event, heads, read_after
from holdfast.streams.pulse import Pulse
from holdfast.streams.recent import RECENT, AllRecent, Recent

log = structlog.get_logger(__name__)

# Seconds for which a watcher is waited for.
EXPECTED = 2.0
# Threads asked for at once by the slow poll.
POLL_BATCH = 2000


class HubClosed(Exception):
    """The process stops serving streams."""


class Expired(HubClosed):
    """What comes next for a watcher has expired while it was on its way. It has to come back, and will be told."""


@dataclass(slots=True)
class Eagerness:
    """Whether a watcher has come to the end once and waits for what is new. Until then it is told of the past, which
    is late by nobody's fault."""

    waits: bool = False


class Feed:
    """One followed thread. `recent` ends at `head`; `stale` means that the log may hold more."""

    def __init__(self, database: Database, thread_id: UUID, after: int, everything: AllRecent | None = None) -> None:
        self.thread_id = thread_id
        self.watchers = 0
        # Those, and whoever expects to be one.
        self.holders = 0
        self.head = after
        self.stale = True
        # How often something about the thread was said to have changed that the log does not tell.
        self.touches = 0
        # Of a thread where a run is being created: what has been said before it is known where its events begin.
        self._early: list[tuple[int | None, Sequence[LogEvent]]] | None = None
        self._early_bytes = 0
        # Whether `head` is not known from the log.
        self._unseen = False
        # Whether the events that are kept have to be compared with the log before they are used.
        self._doubtful = False
        self._database = database
        self._recent = Recent(everything or AllRecent())
        self._changed = Change()
        self._reading = asyncio.Lock()

    def expect(self) -> None:
        """Keep what is said until `begin`."""
        self._early, self._early_bytes = [], 0

    def begin(self, head: int, events: Sequence[LogEvent] = ()) -> None:
        """What the expected run says comes after `head`, and nothing that has come since was missed. For whoever waits
        for that run, the log need not be looked at: if it had gone further before, a gap in what comes will show it.
        `events`: the first of it."""
        early, self._early = self._early, None
        if early is not None:
            self.head, self.stale = head, False
            self._unseen = True
        if events:
            self.hint(events[-1].seq, events)
        for seq, told in early or ():
            self.hint(seq, told)

    def doubt(self, after: int) -> None:
        """Somebody else has come, who may want what was in the log before."""
        self.begin(after)
        if self._unseen:
            self.stale = True

    def hint(self, seq: int | None, events: Sequence[LogEvent] = ()) -> None:
        """The log has grown to `seq`, or (None) may have. `events`: the last of it, consecutive.

        Events that go on where we are need not be read. After a gap, or when others are being read already, the log
        has the last word.
        """
        if self._early is not None:
            self._early_bytes += sum(len(event.data) for event in events)
            if len(self._early) < RECENT and self._early_bytes <= PORTION_BYTES:
                self._early.append((seq, events))
                return
            # It is a long time to wait, for a run that may never have been created.
            self.doubt(0)
        if seq is None or seq > self.head:
            if events and not self.stale and events[0].seq <= self.head + 1:
                self._append(events)
            else:
                self.stale = True
        self.wake()

    def forget(self) -> None:
        """Keep no events: nobody follows the thread any more."""
        self._recent.clear()

    def touch(self) -> None:
        """The thread's state has been updated, or the thread deleted."""
        self.touches += 1
        self.compare()

    def compare(self) -> None:
        """Compare what is kept with the log before it is used again. The thread may have been deleted, and its id be
        that of another thread, whose log begins anew."""
        self._doubtful = self.stale = True
        self.wake()

    def _append(self, events: Sequence[LogEvent]) -> None:
        """Consecutive events, of which some may be there already."""
        new = [event for event in events if event.seq > self.head]
        if new:
            self._recent.extend(new)
            self.head = new[-1].seq

    def wake(self) -> None:
        self._changed.set()
        self._changed = Change()

    @property
    def changed(self) -> Change:
        """Set at the next change. To be fetched before looking, so that nothing falls in between."""
        return self._changed

    async def read(self, after: int) -> list[LogEvent]:
        """The events after a cursor that are there now; empty when it is at the end."""
        # Not past a refill that is under way either: a watcher whose run is over leaves at the first empty answer.
        if self.stale or self._reading.locked():
            async with self._reading:
                if self.stale:
                    await self._refill()
        if after >= self.head:
            return []
        if (recent := self._recent.after(after)) is not None:
            return recent
        async with self._database.connection() as connection:
            return (await read_after(connection, self.thread_id, after)).events

    async def _refill(self) -> None:
        doubtful = self._doubtful
        self.stale = self._unseen = self._doubtful = False
        try:
            async with self._database.connection() as connection:
                if doubtful:
                    await self._drop_deleted(connection)
                events, more = await read_after(connection, self.thread_id, self.head, RECENT)
        except BaseException:
            self.stale = True
            self._doubtful = self._doubtful or doubtful
            raise
        if more:
            self.stale = True
        if events:
            # Hints may have brought some of them meanwhile, or more.
            self._append(events)
            self.wake()

    async def _drop_deleted(self, connection: AsyncConnection[DictRow]) -> None:
        """Keep nothing of a thread that was deleted. Its events come before those of the thread that has its id now, so
        the oldest tells."""
        first = self._recent.first
        if first is not None and not await has_event(connection, self.thread_id, first):
            self._recent.clear()
            self.head = (await heads(connection, {self.thread_id: 0})).get(self.thread_id, 0)


class Hub:
    """All feeds of a process, woken by hints and, behind them, by one slow poll for all."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._settings = database.settings
        self._metrics = database.metrics
        self._feeds: dict[UUID, Feed] = {}
        self._recent = AllRecent()
        self._ended: dict[UUID, tuple[asyncio.Event, Feed]] = {}
        self._run_watchers: dict[UUID, int] = {}
        # Runs that were created a moment ago to be watched.
        self._expected: set[UUID] = set()
        self._closing = False
        self._signals = signals
        self._look = asyncio.Event()
        self._alarms = Alarms()
        self.pulse = Pulse(database.settings.stream_heartbeat)
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
    def watch(self, thread_id: UUID, after: int, run_id: UUID | None = None) -> Iterator[Feed]:
        """Follow a thread for the length of the block; `run_id`: for what this run says."""
        feed = self._hold(thread_id, after)
        if run_id not in self._expected:
            feed.doubt(after)
        feed.watchers += 1
        try:
            yield feed
        finally:
            feed.watchers -= 1
            self._let_go(feed)

    def expect(self, thread_id: UUID) -> None:
        """A run is about to be created in a thread, and to be watched from here: what is said of it from now on is
        kept for a moment, and whoever watches it need not look into the log first. To be followed by `begin`."""
        if thread_id not in self._feeds:
            self._hold(thread_id, 0).expect()
        else:
            self._hold(thread_id, 0)
        asyncio.get_running_loop().call_later(EXPECTED, self._let_go, self._feeds[thread_id])

    def begin(self, thread_id: UUID, run_id: UUID, head: int, events: Sequence[LogEvent] = ()) -> None:
        """The run that was expected is there, and its events come after `head`; `events`: those that it has already."""
        if (feed := self._feeds.get(thread_id)) is not None:
            feed.begin(head, events)
            self._expected.add(run_id)
            asyncio.get_running_loop().call_later(EXPECTED, self._expected.discard, run_id)

    def _hold(self, thread_id: UUID, after: int) -> Feed:
        feed = self._feeds.get(thread_id)
        if feed is None:
            feed = self._feeds[thread_id] = Feed(self._database, thread_id, after, self._recent)
            self._signals.follow(thread_id, partial(feed.hint, None))
        feed.holders += 1
        return feed

    def _let_go(self, feed: Feed) -> None:
        feed.holders -= 1
        if feed.holders == 0:
            del self._feeds[feed.thread_id]
            feed.forget()
            self._signals.unfollow(feed.thread_id)

    async def thread_events(
        self, thread_id: UUID, after: int, *, tick: float | None, touches: bool = False, counted: bool = True
    ) -> AsyncIterator[list[LogEvent]]:
        """A thread's events after a cursor, as they become visible, run after run; never ends by itself.

        Yields an empty list about every `tick` seconds, regularly, also while events flow; None: not at all. Survives
        an outage of the database. Raises HubClosed when the process is going away: the watcher goes on elsewhere, from
        its cursor.

        With `touches`, an empty list also comes when the thread was changed or deleted otherwise since it is being
        watched: look for yourself.

        Raises Expired when the next events are gone. From the beginning (0), what is left is all there is. Not
        `counted`: nobody is sent them.
        """
        with self.watch(thread_id, after) as feed:
            eager = Eagerness()
            async for events in self._follow(feed, after, tick, lambda: False, eager, touches=touches):
                if events:
                    if events[-1].seq != (after or events[0].seq - 1) + len(events):
                        raise Expired(f"The events after {after} have expired. Subscribe anew, and read the state.")
                    after = events[-1].seq
                    if counted:
                        self._count(events, eager)
                yield events

    async def run_events(
        self, thread_id: UUID, run_id: UUID, after: int, *, tick: float | None, over: bool = False
    ) -> AsyncIterator[list[LogEvent]]:
        """The same for one run, up to and including its `end`. A run that ends without a word in the log (cancelled
        before it started, deleted) ends the iteration. `over`: it is known to have ended."""
        with self.watch(thread_id, after, run_id) as feed, self._watch_run(run_id, feed) as ended:
            if over:
                # Others may have the feed, and be behind.
                ended.set()
                feed.hint(None)
            eager = Eagerness()
            async for events in self._follow(feed, after, tick, ended.is_set, eager):
                mine = [event for event in events if event.run_id == run_id]
                if mine:
                    self._count(mine, eager)
                if mine or not events:
                    yield mine
                if mine and mine[-1].kind == "end":
                    return

    async def _follow(
        self,
        feed: Feed,
        after: int,
        tick: float | None,
        over: Callable[[], bool],
        eager: Eagerness,
        *,
        touches: bool = False,
    ) -> AsyncIterator[list[LogEvent]]:
        loop = asyncio.get_running_loop()
        touched = 0
        backoff = Backoff("stream.outage", "stream.recovered")
        next_tick = None if tick is None else loop.time() + tick
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
                eager.waits = True
                await changed.wait(self._alarms, next_tick)
            if tick is not None and next_tick is not None and loop.time() >= next_tick:
                next_tick += tick
                yield []
            elif touches and feed.touches != touched:
                touched = feed.touches
                yield []

    async def still_logged(self, thread_id: UUID, event: LogEvent) -> bool:
        """Whether an event that a watcher was given is in the thread's log. If it is not, the thread was deleted or the
        event has expired: what is kept of the thread is then compared with the log before anybody is given more."""
        async with self._database.connection() as connection:
            if await has_event(connection, thread_id, event):
                return True
        if (feed := self._feeds.get(thread_id)) is not None:
            feed.compare()
        return False

    def _count(self, events: list[LogEvent], eager: Eagerness) -> None:
        """Events are about to be sent."""
        self._metrics.events_delivered.add(len(events))
        if eager.waits:
            now = time.time() + self._metrics.clock_ahead
            self._metrics.event_lag.observe(max(0.0, now - events[0].created_at.timestamp()))

    @property
    def closing(self) -> bool:
        """The process stops serving streams."""
        return self._closing

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
        """The slow poll behind the hints; a quicker one while they do not come through."""
        backoff = Backoff("hub.outage", "hub.recovered")
        while True:
            degraded = self._signals.degraded
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.degraded_poll if degraded else self._settings.poll_interval):
                    await self._look.wait()
            self._look.clear()
            try:
                await self._poll()
                backoff.succeeded()
            except (psycopg.Error, OSError) as error:
                await backoff.failed(error)

    async def _poll(self) -> None:
        feeds, runs = list(self._feeds.values()), list(self._ended)
        for start in range(0, len(feeds), POLL_BATCH):
            known = {feed.thread_id: feed.head for feed in feeds[start : start + POLL_BATCH]}
            async with self._database.connection() as connection:
                for thread_id, seq in (await heads(connection, known)).items():
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
            # Not a read for each thread: the poll asks for all of them at once.
            self._look.set()
            return
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            told = understand(payload, self._feeds)
            if isinstance(told, EventHint):
                if (watched := self._feeds.get(told.thread_id)) is not None:
                    watched.hint(told.seq, told.events)
                return
            if isinstance(told, Touched):
                if (watched := self._feeds.get(told.thread_id)) is not None:
                    watched.touch()
                return
            for run_id in told:
                self.run_ended(run_id)
