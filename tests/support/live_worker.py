"""A whole worker in the test's own process, with everything short that is long in production. But for the lease: a
worker that is well must not lose it because the machine stands still for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from holdfast.graphs.catalog import GraphCatalog
from holdfast.lifecycle.service import run_until
from holdfast.settings import Settings, load_settings
from holdfast.worker.main import Worker

QUICK: dict[str, Any] = {
    "lease": 15.0,
    "heartbeat": 0.2,
    "reaper_interval": 0.1,
    "session_grace": 0.3,
    "poll_interval": 0.2,
    "retry_base": 0.02,
    "retry_cap": 0.1,
    "drain_timeout": 0.0,
    "pool_max": 4,
}


def quick_settings(database_url: str, **settings: Any) -> Settings:
    return load_settings({}, **{**QUICK, "database_url": database_url, **settings})


@asynccontextmanager
async def running_worker(settings: Settings, catalog: GraphCatalog, **options: Any) -> AsyncIterator[Worker]:
    """A worker that works for the length of the block and is then shut down in good order."""
    worker = Worker(settings, catalog, **options)
    running = asyncio.create_task(run_until(worker, worker.stop_requested), name="worker")
    try:
        yield worker
    finally:
        worker.request_stop()
        await asyncio.wait_for(running, 60)
