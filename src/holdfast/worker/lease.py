"""The lease of a worker as its event loop sees it: the identity it has now, and whether it may still rely on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import UUID

import structlog

from holdfast.lifecycle.service import TaskService
from holdfast.settings import Settings
from holdfast.telemetry.metrics import Metrics
from holdfast.worker.heartbeat import Heartbeat

log = structlog.get_logger(__name__)

# Seconds between two looks at the deadline: this part of the lease, or half a second.
CHECK_SHARE = 0.1
MAX_CHECK_SECONDS = 0.5


class Lease(TaskService):
    """While it is started, it ends a lease whose deadline has passed, even if no renewal comes through to say so.

    `on_lost` is called when the lease is lost, because the worker's runs belong to other workers then. It drops them,
    and returns how many they were.
    """

    name = "lease"

    def __init__(self, settings: Settings, heartbeat: Heartbeat, metrics: Metrics, on_lost: Callable[[], int]) -> None:
        super().__init__()
        self._settings = settings
        self._heartbeat = heartbeat
        self._metrics = metrics
        self._on_lost = on_lost
        self.worker_id: UUID | None = None
        """The worker's id in the database. None: it has none, or has lost its lease."""

    @property
    def held(self) -> bool:
        """Whether the worker may rely on its lease. May be asked from any thread."""
        return self.worker_id is not None and time.monotonic() < self._heartbeat.deadline

    async def acquire(self) -> UUID:
        """The worker's id, once the database knows it."""
        worker_id = await self._heartbeat.registered()
        if self.worker_id != worker_id:
            self.worker_id = worker_id
            log.info("worker.online", worker_id=str(worker_id), jobs=self._settings.jobs)
        return worker_id

    def lose(self, worker_id: UUID) -> None:
        """This identity was declared lost, or was cut off for longer than the lease. Drop all its runs, and register
        under a new id, unless the worker drains."""
        if worker_id != self.worker_id:
            return
        self._metrics.leases_lost.add()
        self.worker_id = None
        log.warning("worker.lease_lost", worker_id=str(worker_id), runs=self._on_lost())
        if not self._heartbeat.draining:
            self._heartbeat.register_anew()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(MAX_CHECK_SECONDS, CHECK_SHARE * self._settings.lease))
            if self.worker_id is not None and not self.held:
                self.lose(self.worker_id)
