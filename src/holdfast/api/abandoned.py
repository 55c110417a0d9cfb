"""Cancel runs whose clients have disconnected after asking for a cancel on disconnect.

The client cannot repeat its request, so a cancel that fails is repeated until the database accepts it. The run may end
in the meantime: cancelling a run that has ended does nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal
from uuid import UUID

import psycopg
import structlog

from holdfast.db.outages import is_outage
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.cancelling import run_together
from holdfast.lifecycle.service import TaskService
from holdfast.telemetry.exceptions import describe

log = structlog.get_logger(__name__)

# Runs that may wait to be cancelled. They accumulate when clients disconnect during a database outage.
MAX_WAITING_RUNS = 20_000
# Runs that are cancelled at the same time. The other connections of the pool are for requests. One of these places is
# reserved for runs whose cancel has not failed yet.
MAX_CONCURRENT_CANCELS = 4
# The time limit of one attempt. The run's thread may be locked, and other runs must not wait for that lock.
CANCEL_TIMEOUT_SECONDS = 5.0
# A process that stops continues its attempts for this time.
DRAIN_TIMEOUT_SECONDS = 3.0

Cancel = Callable[[UUID, list[UUID], Literal["interrupt"]], Awaitable[object]]


class AbandonedRuns(TaskService):
    """Cancels the runs that it is given while it is started. A cancel that fails is tried again after all others.
    `stop` waits a little while for what is left.

    `cancel` says how to cancel. To be set before it is started.
    """

    name = "abandoned"

    def __init__(self) -> None:
        super().__init__()
        self.cancel: Cancel | None = None
        # Runs that are not cancelled yet, with their threads.
        self._left: dict[UUID, UUID] = {}
        # Subsets of these: runs that wait for the first attempt, runs that wait for another attempt, and all runs whose
        # cancel has failed.
        self._new: deque[UUID] = deque()
        self._again: deque[UUID] = deque()
        self._failed: set[UUID] = set()
        # Running repeated attempts.
        self._retries = 0
        self._more = asyncio.Event()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._backoff = Backoff("abandoned.outage", "abandoned.recovered")

    def add(self, thread_id: UUID, run_id: UUID) -> None:
        """Enqueue a run to be cancelled."""
        if run_id in self._left:
            return
        if len(self._left) >= MAX_WAITING_RUNS:
            log.warning(
                "run.not_cancelled", run_id=str(run_id), error=f"{MAX_WAITING_RUNS} others wait to be cancelled"
            )
            return
        self._left[run_id] = thread_id
        self._new.append(run_id)
        self._none_left.clear()
        self._more.set()

    async def _run(self) -> None:
        assert self.cancel is not None
        cancel = self.cancel
        await run_together(
            **{f"abandoned.{number}": self._cancel_one_by_one(cancel) for number in range(MAX_CONCURRENT_CANCELS)}
        )

    async def _stop(self) -> None:
        if self._task is not None:
            await self.drain()
        await super()._stop()

    async def drain(self) -> None:
        """Wait a little while for what is left, and report what is not cancelled then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_SECONDS):
                await self._none_left.wait()
        for run_id in self._left:
            log.warning("run.not_cancelled", run_id=str(run_id), error="the process has stopped")

    async def _cancel_one_by_one(self, cancel: Cancel) -> None:
        while True:
            if self._new:
                await self._try(cancel, self._new.popleft())
            elif self._again and self._retries < MAX_CONCURRENT_CANCELS - 1:
                self._retries += 1
                try:
                    await self._try(cancel, self._again.popleft())
                finally:
                    self._retries -= 1
                    self._more.set()
            else:
                self._more.clear()
                await self._more.wait()

    async def _try(self, cancel: Cancel, run_id: UUID) -> None:
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_SECONDS):
                await cancel(self._left[run_id], [run_id], "interrupt")
        except Exception as error:
            # A held lock, and a server that is not primary yet, are temporary as well.
            if isinstance(error, psycopg.OperationalError) or is_outage(error):
                self._failed.add(run_id)
                self._again.append(run_id)
                await self._backoff.failed(error)
                return
            log.warning("run.not_cancelled", run_id=str(run_id), error=describe(error))
        del self._left[run_id]
        self._failed.discard(run_id)
        if not self._left:
            self._none_left.set()
        if not self._failed:
            self._backoff.succeeded()
