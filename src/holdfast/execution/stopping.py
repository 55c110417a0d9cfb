"""Stops the task that runs a graph."""

from __future__ import annotations

import asyncio
import time

import structlog

from holdfast.errors import Cancelled, Drained, LeaseLost, RunTimeout
from holdfast.execution.attempt import Attempt

log = structlog.get_logger(__name__)

# How the server ends an attempt. If graph code raises one of them although the attempt was not stopped, it is an error
# like any other. Otherwise it would return the run to the queue, without counting a retry, each time.
STOP_SIGNALS = (LeaseLost, Drained, Cancelled, RunTimeout)
# How long graph code may take to react to its cancellation before it is left behind.
STOP_TIMEOUT_SECONDS = 10.0


async def stop_task(task: asyncio.Task[None], attempt: Attempt) -> bool:
    """Cancel graph code and wait for it. Code that ignores the cancellation is cancelled again every second. Returns
    False if it was left behind: then the attempt has a new run writer, and the old one writes nothing more."""
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while not task.done() and time.monotonic() < deadline:
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
    if task.done():
        if not task.cancelled():
            # Fetched, because asyncio logs an exception that nothing fetches.
            task.exception()
        return True
    log.error("run.unstoppable", seconds=STOP_TIMEOUT_SECONDS)
    attempt.writer = await attempt.writer.supersede()
    # For the same reason, whenever it ends.
    task.add_done_callback(lambda left: None if left.cancelled() else left.exception())
    return False


def succeeded(task: asyncio.Task[None]) -> bool:
    """Whether the graph came to its own end before a stop reached it."""
    return task.done() and not task.cancelled() and task.exception() is None
