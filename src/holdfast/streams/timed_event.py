"""An event to wait for with a timeout, cheap enough for ten thousand waiting tasks.

`asyncio.timeout` needs a timer, a cancellation and an exception for each wait that times out, and in idle streams each
wait does.
"""

from __future__ import annotations

import asyncio
import math

# Timeouts in the same slot of time end together, at the end of the slot.
SLOT_SECONDS = 0.05
# The loop's clock has a resolution of milliseconds. This makes sure that no task is woken too early.
CLOCK_ROUNDING_SECONDS = 0.001

Waiter = asyncio.Future[None]


class SharedTimers:
    """One timer for all tasks whose timeouts are in the same slot."""

    def __init__(self) -> None:
        self._due: dict[int, set[Waiter]] = {}

    def add(self, when: float, waiter: Waiter) -> set[Waiter]:
        """Wake the waiter at a time of the loop's clock, or shortly after. Returns the set that holds the waiter:
        discard it there if it is woken for another reason."""
        number = math.ceil(when / SLOT_SECONDS)
        waiters = self._due.get(number)
        if waiters is None:
            waiters = self._due[number] = set()
            waiter.get_loop().call_at(number * SLOT_SECONDS + CLOCK_ROUNDING_SECONDS, self._expire, number)
        waiters.add(waiter)
        return waiters

    def _expire(self, number: int) -> None:
        _wake(self._due.pop(number))


class TimedEvent:
    """An event that is set once."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: set[Waiter] = set()

    def set(self) -> None:
        """Wake all waiting tasks."""
        self._is_set = True
        _wake(self._waiters)

    async def wait(self, timers: SharedTimers | None = None, until: float | None = None) -> None:
        """Wait until the event is set or, with `timers`, until about that time of the loop's clock."""
        if self._is_set:
            return
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        due = None if timers is None or until is None else timers.add(until, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if due is not None:
                due.discard(waiter)


def _wake(waiters: set[Waiter]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
