"""The hub of a web process follows each watched thread once, for any number of watchers.

A watcher is a cursor. It gets events from the recent events of the thread if they include the next one, else from the
log: after a gap, after a pause, or at its start. There is no buffer for each watcher.
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
from holdfast.lifecycle.service import TaskService
from holdfast.signals import Signals
from holdfast.streams.hints import EventHint, ThreadChanged, parse_hint
from holdfast.streams.log import EVENT_PAGE_BYTES, LogEvent, ended_runs, has_event, newest_seqs, read_after
from holdfast.streams.recent_events import MAX_RECENT_EVENTS, RecentEvents, RecentEventsMemory
from holdfast.streams.shared_heartbeat import SharedHeartbeat
from holdfast.streams.timed_event import SharedTimers, TimedEvent
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

# How long a feed is kept for the watcher of a run that has just been created.
EXPECTED_RUN_SECONDS = 2.0
# The number of threads in one statement of the slow poll.
POLL_BATCH = 2000


class HubClosed(Exception):
    """The process stops serving streams."""


class Expired(HubClosed):
    """The next events of a watcher have expired while it was connected. When it reconnects, it gets an error."""


@dataclass(slots=True)
class CatchUp:
    """Whether a watcher has reached the end of the log once. Until then it gets past events, whose delay is not
    measured."""

    done: bool = False


class Feed:
    """A followed thread. The recent events end at `last_seq`; `stale` means that the log may have more."""

    def __init__(
        self, database: Database, thread_id: UUID, after: int, memory: RecentEventsMemory | None = None
    ) -> None:
        self.thread_id = thread_id
        self.watchers = 0
        # The watchers, and the expected runs of this thread.
        self.references = 0
        self.last_seq = after
        self.stale = True
        # The number of hints that the thread has changed in a way that its log does not show.
        self.changes = 0
        # While a run is being created: the hints that arrive before the number of its first event is known.
        self._buffered: list[tuple[int | None, Sequence[LogEvent]]] | None = None
        self._buffered_bytes = 0
        # Whether `last_seq` comes from the creation of a run and not from the log.
        self._last_seq_from_hint = False
        # Whether the recent events must be compared with the log before they are used.
        self._must_verify = False
        self._database = database
        self._recent = RecentEvents(memory or RecentEventsMemory())
        self._changed = TimedEvent()
        self._reading = asyncio.Lock()

    def buffer_hints(self) -> None:
        """Buffer hints until `start_after`."""
        self._buffered, self._buffered_bytes = [], 0

    def start_after(self, last_seq: int, events: Sequence[LogEvent] = ()) -> None:
        """Process the buffered hints. The events of the expected run come after `last_seq`.

        A watcher of that run need not read the log: if the log was longer already, the next hint leaves a gap, and the
        log is read then. `events`: the first events of the run.
        """
        buffered, self._buffered = self._buffered, None
        if buffered is not None:
            self.last_seq, self.stale = last_seq, False
            self._last_seq_from_hint = True
        if events:
            self.hint(events[-1].seq, events)
        for seq, hint in buffered or ():
            self.hint(seq, hint)

    def mark_stale(self, after: int) -> None:
        """Read the log before the next events are given out, for a watcher that may want earlier events. Not needed if
        everything known came from the log already."""
        self.start_after(after)
        if self._last_seq_from_hint:
            self.stale = True

    def hint(self, seq: int | None, events: Sequence[LogEvent] = ()) -> None:
        """The log has grown to `seq`; None: it may have grown. `events`: its last ones, consecutive.

        Events that directly follow the recent ones are appended. After a gap, or while the feed is stale, the events
        are read from the log.
        """
        if self._buffered is not None:
            self._buffered_bytes += sum(len(event.data) for event in events)
            if len(self._buffered) < MAX_RECENT_EVENTS and self._buffered_bytes <= EVENT_PAGE_BYTES:
                self._buffered.append((seq, events))
                return
            # Too many hints are buffered: the run may not have been created at all.
            self.mark_stale(0)
        if seq is None or seq > self.last_seq:
            if events and not self.stale and events[0].seq <= self.last_seq + 1:
                self._append(events)
            else:
                self.stale = True
        self.wake()

    def clear(self) -> None:
        """Drop all events. Called when the thread has no watchers."""
        self._recent.clear()

    def thread_changed(self) -> None:
        """The thread's state has been updated, or the thread deleted."""
        self.changes += 1
        self.verify_before_use()

    def verify_before_use(self) -> None:
        """Compare the recent events with the log before they are used again. The thread may have been deleted, and a
        new thread with another log may have its id."""
        self._must_verify = self.stale = True
        self.wake()

    def _append(self, events: Sequence[LogEvent]) -> None:
        """Append consecutive events, of which some may be present already."""
        new = [event for event in events if event.seq > self.last_seq]
        if new:
            self._recent.extend(new)
            self.last_seq = new[-1].seq

    def wake(self) -> None:
        """Wake the watchers."""
        self._changed.set()
        self._changed = TimedEvent()

    @property
    def changed(self) -> TimedEvent:
        """The event of the next change. Get it before you call `read`, so that no change is lost in between."""
        return self._changed

    async def read(self, after: int) -> list[LogEvent]:
        """The events after a cursor that exist now; empty at the end of the log."""
        # Also wait for a refill that another watcher has begun: the watcher of an ended run leaves at the first empty
        # result, and would miss events.
        if self.stale or self._reading.locked():
            async with self._reading:
                if self.stale:
                    await self._refill()
        if after >= self.last_seq:
            return []
        if (recent := self._recent.after(after)) is not None:
            return recent
        async with self._database.connection() as connection:
            return (await read_after(connection, self.thread_id, after)).events

    async def _refill(self) -> None:
        must_verify = self._must_verify
        self.stale = self._last_seq_from_hint = self._must_verify = False
        try:
            async with self._database.connection() as connection:
                if must_verify:
                    await self._drop_if_deleted(connection)
                events, more = await read_after(connection, self.thread_id, self.last_seq, MAX_RECENT_EVENTS)
        except BaseException:
            self.stale = True
            self._must_verify = self._must_verify or must_verify
            raise
        if more:
            self.stale = True
        if events:
            # Hints may have added some of them meanwhile, or later ones.
            self._append(events)
            self.wake()

    async def _drop_if_deleted(self, connection: AsyncConnection[DictRow]) -> None:
        """Drop the recent events if the thread was deleted. A new thread with the same id has later events, so it is
        enough to check whether the oldest recent event still exists."""
        first = self._recent.first
        if first is not None and not await has_event(connection, self.thread_id, first):
            self._recent.clear()
            self.last_seq = (await newest_seqs(connection, {self.thread_id: 0})).get(self.thread_id, 0)


class Hub(TaskService):
    """All feeds of a process. Hints wake them, and one slow poll for all feeds finds what hints have missed."""

    name = "hub"

    def __init__(self, database: Database, signals: Signals, metrics: Metrics) -> None:
        super().__init__()
        self._database = database
        self._settings = database.settings
        self._metrics = metrics
        self._feeds: dict[UUID, Feed] = {}
        self._recent = RecentEventsMemory()
        self._ended: dict[UUID, tuple[asyncio.Event, Feed]] = {}
        self._run_watchers: dict[UUID, int] = {}
        # Runs that were just created and will be watched from this process.
        self._expected_runs: set[UUID] = set()
        self._closing = False
        self._signals = signals
        self._poll_now = asyncio.Event()
        self._timers = SharedTimers()
        self.heartbeat = SharedHeartbeat(database.settings.stream_heartbeat)
        signals.listen("events", self._hint)

    @property
    def watchers(self) -> int:
        """The number of open streams."""
        return sum(feed.watchers for feed in self._feeds.values())

    @property
    def threads(self) -> int:
        """The number of followed threads."""
        return len(self._feeds)

    @contextmanager
    def watch(self, thread_id: UUID, after: int, run_id: UUID | None = None) -> Iterator[Feed]:
        """Follow a thread during the block. `run_id`: only events of this run are wanted."""
        feed = self._acquire_feed(thread_id, after)
        if run_id not in self._expected_runs:
            feed.mark_stale(after)
        feed.watchers += 1
        try:
            yield feed
        finally:
            feed.watchers -= 1
            self._release_feed(feed)

    def expect_run(self, thread_id: UUID) -> None:
        """Prepare for a run that is about to be created in a thread and watched from this process. Its hints are
        buffered for a moment, so that its watcher need not read the log first. Call `run_created` afterwards."""
        if thread_id not in self._feeds:
            self._acquire_feed(thread_id, 0).buffer_hints()
        else:
            self._acquire_feed(thread_id, 0)
        asyncio.get_running_loop().call_later(EXPECTED_RUN_SECONDS, self._release_feed, self._feeds[thread_id])

    def run_created(self, thread_id: UUID, run_id: UUID, last_seq: int, events: Sequence[LogEvent] = ()) -> None:
        """The expected run has been created. Its events come after `last_seq`; `events`: those that exist already."""
        if (feed := self._feeds.get(thread_id)) is not None:
            feed.start_after(last_seq, events)
            self._expected_runs.add(run_id)
            asyncio.get_running_loop().call_later(EXPECTED_RUN_SECONDS, self._expected_runs.discard, run_id)

    def _acquire_feed(self, thread_id: UUID, after: int) -> Feed:
        feed = self._feeds.get(thread_id)
        if feed is None:
            feed = self._feeds[thread_id] = Feed(self._database, thread_id, after, self._recent)
            self._signals.follow(thread_id, partial(feed.hint, None))
        feed.references += 1
        return feed

    def _release_feed(self, feed: Feed) -> None:
        feed.references -= 1
        if feed.references == 0:
            del self._feeds[feed.thread_id]
            feed.clear()
            self._signals.unfollow(feed.thread_id)

    async def thread_events(
        self, thread_id: UUID, after: int, *, tick: float | None, include_changes: bool = False, counted: bool = True
    ) -> AsyncIterator[list[LogEvent]]:
        """Yield a thread's events after a cursor as they are committed, of all its runs. Does not end by itself.

        Yields an empty list about every `tick` seconds, also between events; None: never. Continues after an outage of
        the database. Raises HubClosed when the process stops: the watcher reconnects elsewhere with its cursor.

        With `include_changes`, also yields an empty list when the thread has changed in a way that its log does not
        show, or was deleted: the caller must check the database.

        Raises Expired when the next events have been deleted. From the beginning (0), it starts with the oldest event
        that exists. `counted`: the events are sent to a client, and are counted in the metrics.
        """
        with self.watch(thread_id, after) as feed:
            catch_up = CatchUp()
            async for events in self._follow(
                feed, after, tick, lambda: False, catch_up, include_changes=include_changes
            ):
                if events:
                    if events[-1].seq != (after or events[0].seq - 1) + len(events):
                        raise Expired(f"The events after {after} have expired. Subscribe anew, and read the state.")
                    after = events[-1].seq
                    if counted:
                        self._count(events, catch_up)
                yield events

    async def run_events(
        self, thread_id: UUID, run_id: UUID, after: int, *, tick: float | None, ended: bool = False
    ) -> AsyncIterator[list[LogEvent]]:
        """Yield the events of one run, up to and including its `end`. Also ends if the run ends without an `end` event
        (cancelled before it started, deleted). `ended`: the run is known to have ended."""
        with self.watch(thread_id, after, run_id) as feed, self._watch_run(run_id, feed) as has_ended:
            if ended:
                # Another watcher may have created the feed, and it may be behind the log.
                has_ended.set()
                feed.hint(None)
            catch_up = CatchUp()
            async for events in self._follow(feed, after, tick, has_ended.is_set, catch_up):
                mine = [event for event in events if event.run_id == run_id]
                if mine:
                    self._count(mine, catch_up)
                if mine or not events:
                    yield mine
                if mine and mine[-1].kind == "end":
                    return

    async def _follow(
        self,
        feed: Feed,
        after: int,
        tick: float | None,
        ended: Callable[[], bool],
        catch_up: CatchUp,
        *,
        include_changes: bool = False,
    ) -> AsyncIterator[list[LogEvent]]:
        loop = asyncio.get_running_loop()
        seen_changes = 0
        backoff = Backoff("stream.outage", "stream.recovered")
        next_tick = None if tick is None else loop.time() + tick
        while True:
            if self._closing:
                raise HubClosed
            changed, finished = feed.changed, ended()
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
                catch_up.done = True
                await changed.wait(self._timers, next_tick)
            if tick is not None and next_tick is not None and loop.time() >= next_tick:
                next_tick += tick
                yield []
            elif include_changes and feed.changes != seen_changes:
                seen_changes = feed.changes
                yield []

    async def is_in_log(self, thread_id: UUID, event: LogEvent) -> bool:
        """Whether an event that a watcher has got is still in the thread's log. If it is not, the thread was deleted or
        the event has expired. Then the recent events are compared with the log before they are used again."""
        async with self._database.connection() as connection:
            if await has_event(connection, thread_id, event):
                return True
        if (feed := self._feeds.get(thread_id)) is not None:
            feed.verify_before_use()
        return False

    def _count(self, events: list[LogEvent], catch_up: CatchUp) -> None:
        """Count events that are about to be sent, and measure their delay."""
        self._metrics.events_delivered.add(len(events))
        if catch_up.done:
            now = time.time() + self._metrics.clock_ahead
            self._metrics.event_lag.observe(max(0.0, now - events[0].created_at.timestamp()))

    @property
    def closing(self) -> bool:
        """The process stops serving streams."""
        return self._closing

    def end_streams(self) -> None:
        """End all streams. Polling goes on until `stop`."""
        self._closing = True
        for feed in self._feeds.values():
            feed.wake()

    def run_ended(self, run_id: UUID) -> None:
        """End the streams of a run's watchers after its last events."""
        if run_id in self._ended:
            event, feed = self._ended[run_id]
            event.set()
            # Its last events were committed with its end, or before. The watchers must read them before they leave.
            feed.hint(None)

    async def _stop(self) -> None:
        self.end_streams()
        await super()._stop()

    async def _run(self) -> None:
        """Poll slowly in addition to hints; poll faster while hints do not arrive."""
        backoff = Backoff("hub.outage", "hub.recovered")
        while True:
            degraded = self._signals.degraded
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.degraded_poll if degraded else self._settings.poll_interval):
                    await self._poll_now.wait()
            self._poll_now.clear()
            try:
                await self._poll()
                backoff.succeeded()
            except (psycopg.Error, OSError) as error:
                await backoff.failed(error)

    async def _poll(self) -> None:
        feeds, runs = list(self._feeds.values()), list(self._ended)
        for start in range(0, len(feeds), POLL_BATCH):
            known = {feed.thread_id: feed.last_seq for feed in feeds[start : start + POLL_BATCH]}
            async with self._database.connection() as connection:
                for thread_id, seq in (await newest_seqs(connection, known)).items():
                    feed = self._feeds.get(thread_id)
                    if feed is not None and seq > feed.last_seq:
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
            # Poll once for all threads instead of reading each one.
            self._poll_now.set()
            return
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            hint = parse_hint(payload, self._feeds)
            if isinstance(hint, EventHint):
                if (watched := self._feeds.get(hint.thread_id)) is not None:
                    watched.hint(hint.seq, hint.events)
                return
            if isinstance(hint, ThreadChanged):
                if (watched := self._feeds.get(hint.thread_id)) is not None:
                    watched.thread_changed()
                return
            for run_id in hint:
                self.run_ended(run_id)
