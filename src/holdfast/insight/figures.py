"""The figures of `/metrics` that are counted in the database, at most once every few seconds.

A scrape never fails because of them: while the database is out of reach they are missing, and `holdfast_database_up` is
0.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.insight.fleet import queue_figures
from holdfast.telemetry import metrics
from holdfast.telemetry.instruments import MetricDeclaration

log = structlog.get_logger(__name__)

# Less than a scraper waits for its answer.
COUNT_TIMEOUT_SECONDS = 4.0
# A count is cached for at least this many times as long as it took, so that a long queue does not keep the database
# busy with counting. After a failure the factor is smaller, so that the end of an outage shows soon.
CACHE_TIMES_DURATION = 20.0
CACHE_TIMES_DURATION_IN_OUTAGE = 2.0

# Each uses a partial index that holds only the rows it counts.
DEAD_LETTERS = (
    "SELECT dead_letter AS reason, count(*) AS runs FROM run WHERE dead_letter IS NOT NULL GROUP BY dead_letter"
)
WEBHOOKS = """
SELECT count(*) AS pending, coalesce(extract(epoch FROM now() - min(created_at)), 0)::float8 AS oldest
FROM webhook_delivery WHERE state = 'pending'
"""
LEASES = """
SELECT extract(epoch FROM min(lease_until) - now())::float8 AS lease_left FROM worker
WHERE status IN ('online', 'draining')
"""
CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8 AS now"


class FleetFigures:
    """The cached figures of one process."""

    def __init__(self) -> None:
        self._counting = asyncio.Lock()
        self._until = 0.0
        self.queue: dict[str, Any] | None = None
        """The queue as `/queue` has it; None while the database is out of reach."""
        self._readings: metrics.Readings = {metrics.DATABASE_UP: 0}

    async def readings(self, database: Database, counted: metrics.Metrics) -> metrics.Readings:
        """Sets `counted.clock_ahead`, too."""
        async with self._counting:
            if time.monotonic() >= self._until:
                began, factor = time.monotonic(), CACHE_TIMES_DURATION
                try:
                    async with asyncio.timeout(COUNT_TIMEOUT_SECONDS), database.connection() as connection:
                        counted.clock_ahead = await clock_ahead(connection)
                        await self._count(connection)
                except (psycopg.Error, OSError) as error:  # TimeoutError is an OSError.
                    if self.queue is not None:
                        log.warning("metrics.uncounted", error=f"{type(error).__name__}: {error}".strip())
                    self.queue, self._readings = None, {metrics.DATABASE_UP: 0}
                    factor = CACHE_TIMES_DURATION_IN_OUTAGE
                ended = time.monotonic()
                self._until = ended + max(database.settings.metrics_cache, factor * (ended - began))
        return self._readings

    async def _count(self, connection: AsyncConnection[DictRow]) -> None:
        queue = await queue_figures(connection)
        dead_letters = await (await connection.execute(DEAD_LETTERS)).fetchall()
        webhooks = await (await connection.execute(WEBHOOKS)).fetchone()
        leases = await (await connection.execute(LEASES)).fetchone()
        assert webhooks is not None
        assert leases is not None
        readings: dict[MetricDeclaration, metrics.Reading] = {
            metrics.DATABASE_UP: 1,
            metrics.RUNS: {
                ("pending",): queue["ready"] + queue["scheduled"] + queue["waiting"],
                ("running",): queue["running"],
            },
            metrics.QUEUE_READY: queue["ready"],
            metrics.QUEUE_SCHEDULED: queue["scheduled"],
            metrics.QUEUE_WAITING: queue["waiting"],
            metrics.QUEUE_OLDEST: queue["oldest_seconds"],
            metrics.QUEUE_UNSERVED: {(graph,): ready for graph, ready in queue["unserved"].items()},
            metrics.CLAIMS_PER_SECOND: queue["claims_per_second"],
            metrics.WORKERS_ONLINE: queue["workers_online"],
            metrics.WORKERS_DRAINING: queue["workers_draining"],
            metrics.WORKERS_CAPACITY: int(queue["capacity"]),
            metrics.DEAD_LETTERS_OPEN: dict.fromkeys(((reason,) for reason in metrics.REASONS), 0)
            | {(row["reason"],): row["runs"] for row in dead_letters},
            metrics.WEBHOOKS_PENDING: webhooks["pending"],
            metrics.WEBHOOKS_OLDEST: webhooks["oldest"],
        }
        if leases["lease_left"] is not None:
            readings[metrics.WORKERS_LEASE_LEFT] = leases["lease_left"]
        self.queue, self._readings = queue, readings


async def clock_ahead(connection: AsyncConnection[DictRow]) -> float:
    """How many seconds the database's clock is ahead of this process's.

    Events carry the database's time. The delay until they are sent is measured with this process's clock.
    """
    before = time.time()
    row = await (await connection.execute(CLOCK)).fetchone()
    assert row is not None
    return float(row["now"] - (before + time.time()) / 2)
