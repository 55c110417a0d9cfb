"""The recent events that a process keeps of the threads it follows: bounded for each thread, and for all together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from holdfast.streams.log import PORTION_BYTES, LogEvent

# Events kept of one thread. Their bytes are those of one portion of the log, so that what was read is kept whole.
RECENT = 1000
# Bytes that Python takes for an event beside its data: objects for the number, the run, the time and the names.
EVENT_OVERHEAD_BYTES = 400
# Bytes kept of all threads together, with that overhead.
MAX_RECENT_BYTES = 64 * 1024 * 1024


class AllRecent:
    """Counts the bytes that threads keep. Above the bound, the thread that has had no event for longest keeps
    nothing: its watchers read the log."""

    def __init__(self, max_bytes: int = MAX_RECENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._keeping: dict[Recent, None] = {}
        self.bytes = 0

    def grown(self, recent: Recent, size: int) -> None:
        """A thread keeps `size` bytes more, or less."""
        self.bytes += size
        self._keeping.pop(recent, None)
        self._keeping[recent] = None
        while self.bytes > self._max_bytes and len(self._keeping) > 1:
            next(iter(self._keeping)).clear()

    def gone(self, recent: Recent, size: int) -> None:
        """A thread keeps nothing any more."""
        self.bytes -= size
        self._keeping.pop(recent, None)


class Recent:
    """The last events of one thread, consecutive. An event that is larger than all the others may be is kept alone, so
    that its watchers share it."""

    def __init__(self, everything: AllRecent) -> None:
        self._everything = everything
        self._events: deque[LogEvent] = deque()
        self._bytes = 0

    def extend(self, events: Sequence[LogEvent]) -> None:
        """Keep events that follow on those that are kept."""
        before, kept = self._taken(), self._events
        kept.extend(events)
        self._bytes += sum([len(event.data) for event in events])
        while len(kept) > RECENT or (self._bytes > PORTION_BYTES and len(kept) > 1):
            self._bytes -= len(kept.popleft().data)
        self._everything.grown(self, self._taken() - before)

    def after(self, cursor: int) -> list[LogEvent] | None:
        """The events after a cursor; None when the first of them is not kept."""
        if not self._events or self._events[0].seq > cursor + 1:
            return None
        # From the end: a thousand watchers that are one event behind must not look through them all.
        return list(takewhile(lambda event: event.seq > cursor, reversed(self._events)))[::-1]

    @property
    def first(self) -> LogEvent | None:
        """The oldest event that is kept."""
        return self._events[0] if self._events else None

    def clear(self) -> None:
        """Keep nothing."""
        self._everything.gone(self, self._taken())
        self._events.clear()
        self._bytes = 0

    def _taken(self) -> int:
        return self._bytes + EVENT_OVERHEAD_BYTES * len(self._events)
