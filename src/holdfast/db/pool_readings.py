"""Reads the pool of a process for its metrics."""

from __future__ import annotations

from holdfast.db.connect import Database
from holdfast.telemetry import metrics


def pool_readings(database: Database) -> metrics.Readings:
    """The current values. May be called from any thread: the pool returns a copy of its counters."""
    stats = database.pool.get_stats()
    size = stats.get("pool_size", 0)
    return {
        metrics.POOL_SIZE: size,
        metrics.POOL_LIMIT: stats.get("pool_max", 0),
        metrics.POOL_USED: max(0, size - stats.get("pool_available", 0)),
        metrics.POOL_WAITING: stats.get("requests_waiting", 0),
        metrics.POOL_REQUESTS: stats.get("requests_num", 0),
        metrics.POOL_WAITED: stats.get("requests_wait_ms", 0) / 1000,
        metrics.POOL_TIMEOUTS: stats.get("requests_errors", 0),
    }
