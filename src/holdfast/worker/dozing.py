"""A worker of the reserve does not even listen while its host has no time to spare.

To hear all that the others tell each other costs it, and Postgres, some percent of what they do. So it dozes: for a
second it is deaf, then it listens until it has heard that others are taking runs, or that nobody does and it is its
turn (`reserve.py`). Whoever has runs of its own does not doze: they may be cancelled.

Others who go on taking may still be too slow: what keeps the host busy need not be theirs. So now and then it asks
whether a run has been left standing for all the time that it dozed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import psycopg

from holdfast.db.connect import Database
from holdfast.engine.claim import longest_ready
from holdfast.signals import Signals
from holdfast.worker.idleness import Idleness
from holdfast.worker.wakes import LONGEST, Wakes

# Seconds between two looks at the host.
LOOK = 0.25
# Seconds without a hint.
DEAF = 1.0
# Seconds in which it must have become clear whether the others take: the wait for that, and a little.
AWAKE = 1.5 * LONGEST
# Seconds between two looks at what there may be to hear.
GLANCE = 0.02
# How often it dozes before it asks what is left standing.
IN_A_ROW = 2


async def left_standing(database: Database) -> float:
    """Seconds that a run has been ready, at most. While that cannot be asked: who knows."""
    try:
        async with database.connection() as connection:
            return await longest_ready(connection)
    except (psycopg.Error, OSError):
        return math.inf


class Dozing:
    """Decides when the signals are deaf. `occupied`: whether this worker has runs; `look`: look for some; `standing`:
    for how long some have been ready."""

    def __init__(
        self,
        signals: Signals,
        wakes: Wakes,
        occupied: Callable[[], bool],
        look: Callable[[], None],
        standing: Callable[[], Awaitable[float]],
        spare: Callable[[], bool] | None = None,
    ) -> None:
        self._signals = signals
        self._wakes = wakes
        self._occupied = occupied
        self._look = look
        self._standing = standing
        # Not shared with others: it is about the time since it was last asked.
        self._spare = spare or Idleness().spare

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            dozed = 0
            # Where nothing is told, listening costs nothing.
            while self._others_take() and self._may_doze():
                await self._doze()
                dozed += 1
                if dozed % IN_A_ROW == 0 and await self._standing() > IN_A_ROW * DEAF:
                    self._look()
                await self._listen()

    def _others_take(self) -> bool:
        return asyncio.get_running_loop().time() - self._wakes.others_took_at < LOOK

    def _may_doze(self) -> bool:
        return self._wakes.resting and not self._occupied() and not self._signals.degraded and not self._spare()

    async def _doze(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + DEAF
        self._wakes.let_go()
        self._signals.deaf = True
        try:
            while self._signals.deaf and (left := until - loop.time()) > 0 and self._may_doze():  # noqa: ASYNC110
                await asyncio.sleep(min(LOOK, left))
        finally:
            self._signals.deaf = False

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        until = began + AWAKE
        while self._wakes.others_took_at <= began and loop.time() < until and not self._occupied():  # noqa: ASYNC110
            await asyncio.sleep(GLANCE)
