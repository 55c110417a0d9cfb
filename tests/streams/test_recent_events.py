"""RecentEvents: the events kept in memory are limited in number and bytes, for each thread and in total."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from holdfast.streams.log import EVENT_PAGE_BYTES, LogEvent
from holdfast.streams.recent_events import EVENT_OVERHEAD_BYTES, MAX_RECENT_EVENTS, RecentEvents, RecentEventsMemory

NOW = datetime.now(UTC)
RUN = uuid4()


def events(first: int, count: int, size: int) -> list[LogEvent]:
    return [LogEvent(first + number, RUN, "custom", "", b"x" * size, NOW) for number in range(count)]


def kept(recent: RecentEvents, last: int) -> list[int]:
    """The numbers of the kept events, of a log that ends with `last`."""
    for after in range(last):
        found = recent.after(after)
        if found is not None:
            return [event.seq for event in found]
    return []


def test_recent_events_of_thread_are_limited_in_number() -> None:
    recent = RecentEvents(RecentEventsMemory())
    recent.extend(events(1, MAX_RECENT_EVENTS + 5, size=1))
    assert kept(recent, MAX_RECENT_EVENTS + 5) == list(range(6, MAX_RECENT_EVENTS + 6))


def test_recent_events_of_thread_are_limited_in_bytes() -> None:
    memory = RecentEventsMemory()
    recent = RecentEvents(memory)
    recent.extend(events(1, 5, size=EVENT_PAGE_BYTES // 4))
    assert kept(recent, 5) == [2, 3, 4, 5]
    assert memory.bytes == EVENT_PAGE_BYTES + 4 * EVENT_OVERHEAD_BYTES


def test_event_above_the_limit_is_kept_alone() -> None:
    recent = RecentEvents(RecentEventsMemory())
    recent.extend(events(1, 2, size=10))
    recent.extend(events(3, 1, size=EVENT_PAGE_BYTES + 1))
    assert kept(recent, 3) == [3]
    recent.extend(events(4, 1, size=10))
    assert kept(recent, 4) == [4]


def test_recent_events_of_all_threads_are_limited_in_bytes() -> None:
    """The thread whose last event is the oldest is cleared, and its watchers read the log."""
    memory = RecentEventsMemory(max_bytes=1000 + 4 * EVENT_OVERHEAD_BYTES)
    first, second, third = (RecentEvents(memory) for _ in range(3))
    first.extend(events(1, 1, size=400))
    second.extend(events(1, 1, size=400))
    first.extend(events(2, 1, size=100))
    third.extend(events(1, 1, size=400))
    assert second.after(0) is None
    assert (kept(first, 2), kept(third, 1)) == ([1, 2], [1])
    assert memory.bytes == 900 + 3 * EVENT_OVERHEAD_BYTES
    first.clear()
    third.clear()
    assert memory.bytes == 0


def test_newest_event_is_kept_even_above_the_total_limit() -> None:
    memory = RecentEventsMemory(max_bytes=1000)
    small, large = RecentEvents(memory), RecentEvents(memory)
    small.extend(events(1, 1, size=10))
    large.extend(events(1, 1, size=5000))
    assert small.after(0) is None
    assert kept(large, 1) == [1]
