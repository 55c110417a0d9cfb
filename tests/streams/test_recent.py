"""Events that a process keeps are bounded by their number and their bytes, for one thread and for all threads."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from holdfast.streams.log import PORTION_BYTES, LogEvent
from holdfast.streams.recent import EVENT_OVERHEAD_BYTES, RECENT, AllRecent, Recent

NOW = datetime.now(UTC)
RUN = uuid4()


def events(first: int, count: int, size: int) -> list[LogEvent]:
    return [LogEvent(first + number, RUN, "custom", "", b"x" * size, NOW) for number in range(count)]


def kept(recent: Recent, last: int) -> list[int]:
    """The numbers of the events that are kept, of a log that ends with `last`."""
    for after in range(last):
        found = recent.after(after)
        if found is not None:
            return [event.seq for event in found]
    return []


def test_number_of_a_threads_events_is_bounded() -> None:
    recent = Recent(AllRecent())
    recent.extend(events(1, RECENT + 5, size=1))
    assert kept(recent, RECENT + 5) == list(range(6, RECENT + 6))


def test_bytes_of_a_threads_events_are_bounded() -> None:
    everything = AllRecent()
    recent = Recent(everything)
    recent.extend(events(1, 5, size=PORTION_BYTES // 4))
    assert kept(recent, 5) == [2, 3, 4, 5]
    assert everything.bytes == PORTION_BYTES + 4 * EVENT_OVERHEAD_BYTES


def test_event_larger_than_the_bound_is_kept_alone() -> None:
    recent = Recent(AllRecent())
    recent.extend(events(1, 2, size=10))
    recent.extend(events(3, 1, size=PORTION_BYTES + 1))
    assert kept(recent, 3) == [3]
    recent.extend(events(4, 1, size=10))
    assert kept(recent, 4) == [4]


def test_bytes_of_all_threads_are_bounded() -> None:
    """The thread whose last event is the oldest keeps nothing, and its watchers read the log."""
    everything = AllRecent(max_bytes=1000 + 4 * EVENT_OVERHEAD_BYTES)
    first, second, third = (Recent(everything) for _ in range(3))
    first.extend(events(1, 1, size=400))
    second.extend(events(1, 1, size=400))
    first.extend(events(2, 1, size=100))
    third.extend(events(1, 1, size=400))
    assert second.after(0) is None
    assert (kept(first, 2), kept(third, 1)) == ([1, 2], [1])
    assert everything.bytes == 900 + 3 * EVENT_OVERHEAD_BYTES
    first.clear()
    third.clear()
    assert everything.bytes == 0


def test_thread_with_the_newest_event_keeps_it_whatever_its_size() -> None:
    everything = AllRecent(max_bytes=1000)
    small, large = Recent(everything), Recent(everything)
    small.extend(events(1, 1, size=10))
    large.extend(events(1, 1, size=5000))
    assert small.after(0) is None
    assert kept(large, 1) == [1]
