"""A worker of the reserve does not even listen while its host has no time to spare.

To hear all that the others tell each other costs it, and Postgres, some percent of what they do. So it dozes: it is
deaf, and asks the database once a second which run is at the front of the queue. If that one has been left standing for
a while, and still is a moment later, the others do not take, whatever keeps the host busy, or are too slow. Then it
looks for runs itself. Whoever has runs of its own does not doze: they may be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg

from holdfast.db.connect import Database
from holdfast.engine.upcoming import Front, front
from holdfast.signals import Signals
from holdfast.worker.idleness import Idleness
from holdfast.worker.wakes import LONGEST, Wakes

# Seconds between two looks at the host.
LOOK = 0.25
# Seconds between two looks at the queue, if nothing has been left standing.
ASK = 1.0
# Seconds after which a run has been left standing too long, although others are taken; and between two looks for that
# reason, because most of the time it means that there are many.
TOO_LONG = 2.0
# Seconds for which a reserve listens when the others do not take: there may be more that they leave.
AWAKE = 10.0


async def ask_front(database: Database) -> Front | None:
    """The run at the front of the queue. While nobody can be asked nothing could be taken either."""
    try:
        async with database.connection() as connection:
            return await front(connection)
    except (psycopg.Error, OSError):
        return None


class Dozing:
    """Decides when the signals are deaf. `occupied`: whether this worker has runs; `look`: look for some; `ask`: which
    is at the front of the queue."""

    def __init__(
        self,
        signals: Signals,
        wakes: Wakes,
        occupied: Callable[[], bool],
        look: Callable[[], None],
        ask: Callable[[], Awaitable[Front | None]],
        spare: Callable[[], bool] | None = None,
    ) -> None:
        self._signals = signals
        self._wakes = wakes
        self._occupied = occupied
        self._look = look
        self._ask = ask
        # Not shared with others: it is about the time since it was last asked.
        self._spare = spare or Idleness().spare

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            if self._may_doze() and not await self._doze():
                await asyncio.sleep(AWAKE)

    def _may_doze(self) -> bool:
        return self._wakes.resting and not self._occupied() and not self._signals.degraded and not self._spare()

    async def _doze(self) -> bool:
        """For as long as there is reason to. False: the others have left a run standing."""
        self._signals.deaf = True
        # Nothing will be heard of what was left to others.
        self._wakes.let_go()
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        try:
            seen: Front | None = None
            while await self._sleeps(ASK if seen is None else LOOK):
                found = await self._ask()
                if found is not None and seen is not None and found.run_id == seen.run_id:
                    self._look()
                    return False
                seen = found if found is not None and found.seconds > LONGEST else None
                if seen is not None and seen.seconds > TOO_LONG and loop.time() - looked_at >= TOO_LONG:
                    looked_at = loop.time()
                    self._look()
            return True
        finally:
            self._signals.deaf = False

    async def _sleeps(self, seconds: float) -> bool:
        """For so long, and whether it may sleep on."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._signals.deaf and self._may_doze():
            left = until - loop.time()
            if left <= 0:
                return True
            await asyncio.sleep(min(LOOK, left))
        return False
