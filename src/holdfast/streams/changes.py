"""Waiting for something to happen or for a moment to come, cheaply enough for ten thousand at once.

`asyncio.timeout` would do, but takes a timer, a cancellation and an exception for each that waits in vain, which is
what an idle stream does all day long.
"""

from __future__ import annotations

import asyncio
import math

# Seconds. Alarms that fall into the same space of this length go off together, at its end.
WIDTH = 0.05
# The loop's clock counts in milliseconds: nobody is to find that it was woken a little too early.
ROUNDING = 0.001

Waiter = asyncio.Future[None]


class Alarms:
    """One timer for all who want to be woken at about the same time."""

    def __init__(self) -> None:
        self._due: dict[int, set[Waiter]] = {}

    def add(self, when: float, waiter: Waiter) -> set[Waiter]:
        """Wake the waiter at a time of the loop's clock or shortly after. Discard it from what this returns when it has
        been woken by something else."""
        number = math.ceil(when / WIDTH)
        waiters = self._due.get(number)
        if waiters is None:
            waiters = self._due[number] = set()
            waiter.get_loop().call_at(number * WIDTH + ROUNDING, self._ring, number)
        waiters.add(waiter)
        return waiters

    def _ring(self, number: int) -> None:
        _wake(self._due.pop(number))


class Change:
    """Happens once."""

    __slots__ = ("_happened", "_waiters")

    def __init__(self) -> None:
        self._happened = False
        self._waiters: set[Waiter] = set()

    def set(self) -> None:
        self._happened = True
        _wake(self._waiters)

    async def wait(self, alarms: Alarms | None = None, until: float | None = None) -> None:
        """Until it has happened, or, with `alarms`, until about that time of the loop's clock."""
        if self._happened:
            return
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        due = None if alarms is None or until is None else alarms.add(until, waiter)
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
