"""The recent events of followed threads that a process keeps in memory, limited for each thread and in total."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from holdfast.streams.log import EVENT_PAGE_BYTES, LogEvent

# Events kept of one thread. Their bytes are limited to one page of the log, so that a page that was read is kept whole.
MAX_RECENT_EVENTS = 1000
# Bytes of an event in Python besides its data: the objects for the number, the run, the time and the names.
EVENT_OVERHEAD_BYTES = 400
# Bytes kept of all threads together, including that overhead.
MAX_RECENT_BYTES = 64 * 1024 * 1024


class RecentEventsMemory:
    """Limits the bytes that all threads keep. Above the limit, the thread whose last event is the oldest is cleared:
    its watchers read the log."""

    def __init__(self, max_bytes: int = MAX_RECENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._keeping: dict[RecentEvents, None] = {}
        self.bytes = 0

    def add(self, recent: RecentEvents, size: int) -> None:
        """Count `size` more bytes of a thread; negative for fewer."""
        self.bytes += size
        self._keeping.pop(recent, None)
        self._keeping[recent] = None
        while self.bytes > self._max_bytes and len(self._keeping) > 1:
            next(iter(self._keeping)).clear()

    def remove(self, recent: RecentEvents, size: int) -> None:
        """Count a thread as empty that kept `size` bytes."""
        self.bytes -= size
        self._keeping.pop(recent, None)


class RecentEvents:
    """The last consecutive events of one thread. An event that exceeds the limit alone is kept as the only one, so that
    its watchers need not each read it from the log."""

    def __init__(self, memory: RecentEventsMemory) -> None:
        self._memory = memory
        self._events: deque[LogEvent] = deque()
        self._bytes = 0

    def extend(self, events: Sequence[LogEvent]) -> None:
        """Append events that directly follow the kept ones, and drop the oldest ones above the limits."""
        before, kept = self._size(), self._events
        kept.extend(events)
        self._bytes += sum([len(event.data) for event in events])
        while len(kept) > MAX_RECENT_EVENTS or (self._bytes > EVENT_PAGE_BYTES and len(kept) > 1):
            self._bytes -= len(kept.popleft().data)
        self._memory.add(self, self._size() - before)

    def after(self, cursor: int) -> list[LogEvent] | None:
        """The events after a cursor; None if the first of them is not kept."""
        if not self._events or self._events[0].seq > cursor + 1:
            return None
        # Search from the end: a thousand watchers that are one event behind must not scan all events.
        return list(takewhile(lambda event: event.seq > cursor, reversed(self._events)))[::-1]

    @property
    def first(self) -> LogEvent | None:
        """The oldest event that is kept."""
        return self._events[0] if self._events else None

    def clear(self) -> None:
        """Drop all events."""
        self._memory.remove(self, self._size())
        self._events.clear()
        self._bytes = 0

    def _size(self) -> int:
        return self._bytes + EVENT_OVERHEAD_BYTES * len(self._events)
