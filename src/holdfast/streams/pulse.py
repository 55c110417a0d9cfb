"""Regular calls for ten thousand at once: what an idle stream costs is its heartbeat, and little else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Seconds. Those who came within the same space of this length are called together.
WIDTH = 0.05

Beat = Callable[[], None]


class Pulse:
    """Calls each of its members every so many seconds, from when it joined. One timer for all; none while there is
    nobody to call. A beat must not raise, and must not wait."""

    def __init__(self, every: float) -> None:
        self._slots: list[set[Beat]] = [set() for _ in range(max(1, round(every / WIDTH)))]
        self._width = every / len(self._slots)
        self._members = 0
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def beating(self, beat: Beat) -> Iterator[None]:
        """Call `beat` for the length of the block."""
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._next = int(loop.time() / self._width) + 1
            self._schedule(loop)
        # The space that has just passed: its turn comes after a whole interval.
        slot = self._slots[(self._next - 1) % len(self._slots)]
        slot.add(beat)
        self._members += 1
        try:
            yield
        finally:
            slot.discard(beat)
            self._members -= 1
            if not self._members and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(self._next * self._width, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ring_to(int(loop.time() / self._width))
        self._schedule(loop)

    def _ring_to(self, now: int) -> None:
        """Call those whose time has come: once, even if the loop was held up for longer than the interval."""
        for number in range(max(self._next, now - len(self._slots) + 1), max(self._next, now) + 1):
            for beat in tuple(self._slots[number % len(self._slots)]):
                beat()
            self._next = number + 1
