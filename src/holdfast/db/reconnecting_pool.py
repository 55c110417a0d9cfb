"""A pool that connects again soon after an outage.

psycopg_pool doubles the pause after each attempt to connect that failed, so after an outage of 40 seconds the pool
could stay empty for another 40. No setting limits the pause. Here it is at most RECONNECT_MAX_PAUSE_SECONDS.

This module relies on inner classes of psycopg_pool. docs/dependencies.md says why, and tests/test_private_parts.py
fails when they change.
"""

from __future__ import annotations

import time
from typing import Any

from psycopg_pool import AsyncConnectionPool
from psycopg_pool.pool_async import AddConnection, MaintenanceTask

from holdfast.db.answer_timeout import TimedAsyncConnection
from holdfast.db.time_limit import paused_time_limit

# The longest pause between two attempts of the pool to connect.
RECONNECT_MAX_PAUSE_SECONDS = 1.0


class ReconnectingPool(AsyncConnectionPool[TimedAsyncConnection]):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # When each waiting request began to wait for a connection, the longest wait first. Other threads read it, too.
        self.waits_since: dict[object, float] = {}

    async def schedule_task(self, task: MaintenanceTask, delay: float) -> None:
        if isinstance(task, AddConnection):
            delay = min(delay, RECONNECT_MAX_PAUSE_SECONDS)
        await super().schedule_task(task, delay)

    async def getconn(self, timeout: float | None = None) -> TimedAsyncConnection:
        request = object()
        self.waits_since[request] = time.monotonic()
        try:
            with paused_time_limit():
                return await super().getconn(timeout)
        finally:
            del self.waits_since[request]
