"""The process of a worker: its Unix signals, its logs and traces, and the threads of plain nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from types import FrameType

import structlog

from holdfast.errors import OperatorError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig
from holdfast.lifecycle.event_loop import run_in_event_loop
from holdfast.lifecycle.garbage_collection import collect_garbage_rarely
from holdfast.lifecycle.service import run_until
from holdfast.settings import Settings
from holdfast.telemetry.logs import configure_logging
from holdfast.telemetry.tracing import configure_tracing, end_tracing
from holdfast.worker.main import Worker
from holdfast.worker.replacement import EXIT_CODE
from holdfast.worker.threads import NodeThreads

log = structlog.get_logger(__name__)

# Seconds to wait for threads and tasks of graph code that do not end, once all runs are handed back.
THREADS_END_TIMEOUT_SECONDS = 1.0
TASKS_END_TIMEOUT_SECONDS = 1.0


async def _main(settings: Settings, catalog: GraphCatalog, probes: socket.socket | None) -> int:
    """Returns the exit code."""
    threads = NodeThreads(settings.jobs)
    asyncio.get_running_loop().set_default_executor(threads)
    worker = Worker(settings, catalog, probes=probes, node_threads=threads)
    asked = 0

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            os._exit(130)
        worker.request_stop_from_signal()

    # Not the event loop's handlers: they need the loop, which graph code may block.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        await run_until(worker, worker.stop_requested)
    finally:
        end_tracing()
    code = EXIT_CODE if worker.replaced else 0
    # The interpreter would wait for these threads and tasks, and delay the deploy. Their runs are executed elsewhere.
    if busy := await threads.end(THREADS_END_TIMEOUT_SECONDS):
        log.warning("worker.threads_left", threads=busy)
        os._exit(code)
    if left := await _end_tasks(TASKS_END_TIMEOUT_SECONDS):
        log.warning("worker.tasks_left", tasks=left)
        os._exit(code)
    return code


async def _end_tasks(timeout: float) -> int:
    """Cancel the tasks that graph code has left. Returns how many have not ended after the timeout."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, left = await asyncio.wait(left, timeout=timeout)
    return len(left)


def run_worker(settings: Settings, project: ProjectConfig, *, probes: socket.socket | None = None) -> int:
    """Run a worker until it is stopped. The first SIGTERM or SIGINT drains it, the second ends it at once.

    `probes`: a bound socket to answer probes on, for the supervisor, instead of HOLDFAST_HEALTH_PORT.
    """
    configure_logging(settings, importing=True, role="worker", pid=os.getpid())
    catalog = GraphCatalog.load(project)
    configure_logging(settings, role="worker", pid=os.getpid())
    configure_tracing(settings, "worker")
    collect_garbage_rarely()
    try:
        return run_in_event_loop(_main(settings, catalog, probes))
    except* OperatorError as group:
        error = group.exceptions[0]
    raise error from None
