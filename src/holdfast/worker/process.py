"""The process that a worker is: its signals, its logs and traces, and the threads of the nodes it executes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import structlog
import uvloop

from holdfast.errors import OperatorError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig
from holdfast.settings import Settings
from holdfast.telemetry.garbage import collect_seldom
from holdfast.telemetry.logs import configure_logging
from holdfast.telemetry.tracing import configure_tracing, end_tracing
from holdfast.worker.main import Worker
from holdfast.worker.threads import NodeThreads

log = structlog.get_logger(__name__)

# Seconds that a thread which user code blocks is waited for once everything is handed back.
THREAD_PATIENCE = 1.0


async def _main(settings: Settings, catalog: GraphCatalog, probes: socket.socket | None) -> None:
    threads = NodeThreads(settings.jobs)
    worker = Worker(settings, catalog, probes=probes)
    loop = asyncio.get_running_loop()
    asked = 0

    def on_signal() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            os._exit(130)
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await worker.run()
    finally:
        end_tracing()
    if busy := await threads.end(THREAD_PATIENCE):
        # The interpreter would wait for them, and the deploy with it. Their runs go on elsewhere already.
        log.warning("worker.threads_left", threads=busy)
        os._exit(0)


def run_worker(settings: Settings, project: ProjectConfig, *, probes: socket.socket | None = None) -> int:
    """Run a worker until it is told to stop. The first SIGTERM or SIGINT drains it, the second ends it at once.

    `probes`: a bound socket to answer probes on, for the supervisor, instead of HOLDFAST_HEALTH_PORT.
    """
    configure_logging(settings, importing=True, role="worker", pid=os.getpid())
    catalog = GraphCatalog.load(project)
    configure_logging(settings, role="worker", pid=os.getpid())
    configure_tracing(settings, "worker")
    collect_seldom()
    try:
        uvloop.run(_main(settings, catalog, probes))
    except* OperatorError as group:
        raise group.exceptions[0] from None
    return 0
