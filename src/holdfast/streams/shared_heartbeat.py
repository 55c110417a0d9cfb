"""Periodic callbacks for ten thousand streams with one timer. An idle stream costs little more than its heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Callbacks that were added in the same slot of time are called together.
SLOT_SECONDS = 0.05

Callback = Callable[[], None]


class SharedHeartbeat:
    """Calls each callback every `interval` seconds, from the time that it was added. Uses one timer, and none while
    there are no callbacks. A callback must not raise and must not block."""

    def __init__(self, interval: float) -> None:
        self._slots: list[set[Callback]] = [set() for _ in range(max(1, round(interval / SLOT_SECONDS)))]
        self._width = interval / len(self._slots)
        self._count = 0
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def calling(self, callback: Callback) -> Iterator[None]:
        """Call `callback` periodically during the block."""
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._next = int(loop.time() / self._width) + 1
            self._schedule(loop)
        # The slot that has just passed: it comes again after a whole interval.
        slot = self._slots[(self._next - 1) % len(self._slots)]
        slot.add(callback)
        self._count += 1
        try:
            yield
        finally:
            slot.discard(callback)
            self._count -= 1
            if not self._count and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(self._next * self._width, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_due(int(loop.time() / self._width))
        self._schedule(loop)

    def _call_due(self, now: int) -> None:
        """Call the callbacks that are due, each once, even if the loop was blocked for longer than the interval."""
        for number in range(max(self._next, now - len(self._slots) + 1), max(self._next, now) + 1):
            for callback in tuple(self._slots[number % len(self._slots)]):
                callback()
            self._next = number + 1
