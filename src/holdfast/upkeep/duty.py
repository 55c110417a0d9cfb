"""A duty of the upkeep: a loop with its own schedule, its own timeout and its own failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext

import psycopg
import structlog

from holdfast.db.outages import is_outage
from holdfast.lifecycle.backoff import Backoff

log = structlog.get_logger(__name__)

# Seconds between two looks for what is due by the clock: how late something may be done that became due sooner than
# expected.
LOOK_INTERVAL = 5.0
# Seconds between two tries of a duty that fails: longer each time, at most this.
LONGEST_PAUSE_SECONDS = 15.0
# The same while the database is away: what is due is done soon after it is back.
OUTAGE_PAUSE_SECONDS = 1.0
# The database is away, busy or slow, or a row that the duty needs is locked. Every other error is a defect, and is
# logged with its traceback.
EXPECTED_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError, OSError)


class Duty:
    """Calls `work` again and again. `work` returns the seconds until it should be called next.

    A call that fails or takes longer than `timeout` seconds is repeated after a pause of at most `longest_pause`
    seconds. The first failure is logged, and so is the end of the failures. Only a failure with which the lead is lost,
    as `lost` says, ends the duty. `turn` limits how many duties work at once.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[float]],
        *,
        timeout: float,
        longest_pause: float = LONGEST_PAUSE_SECONDS,
        lost: Callable[[], bool] = lambda: False,
        turn: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        self.name = name
        self.work = work
        self.timeout = timeout
        self._lost = lost
        self._turn = turn or nullcontext()
        self._backoff = Backoff("upkeep.duty_failing", "upkeep.duty_recovered", cap=longest_pause, about={"duty": name})

    async def run(self) -> None:
        while True:
            try:
                async with self._turn, asyncio.timeout(self.timeout):
                    pause = await self.work()
            except Exception as error:
                if self._lost():
                    raise
                if not isinstance(error, EXPECTED_ERRORS) and not self._backoff.failing:
                    log.exception("upkeep.duty_crashed", duty=self.name)
                # A timeout may be the duty's own, of work that is too slow or waits for a lock.
                away = is_outage(error) and not isinstance(error, TimeoutError)
                await self._backoff.failed(error, at_most=OUTAGE_PAUSE_SECONDS if away else None)
                continue
            self._backoff.succeeded()
            await asyncio.sleep(max(0.0, pause) + random.uniform(0.005, 0.03))  # noqa: S311
