"""Ends a worker whose event loop is blocked. The watchdog's thread does this, because the event loop cannot.

The runs of the worker are handed over, and only the run that blocks counts a crash. The supervisor or orchestrator
starts another process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn
from uuid import UUID

import structlog

from holdfast.db.connect import open_blocking_session, with_session_options
from holdfast.db.outages import is_outage
from holdfast.engine.blame import blame, hand_over
from holdfast.settings import Settings
from holdfast.telemetry.exceptions import describe
from holdfast.worker.condition import Condition
from holdfast.worker.heartbeat import Heartbeat

log = structlog.get_logger(__name__)

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the process could not go on, and another one can."""
# Seconds for the heartbeat to end, beyond what its statement may take.
HALT_MARGIN_SECONDS = 2.0


class Replacement:
    """Decides when to end a worker whose event loop is blocked. `worker_id` returns the worker's present id."""

    def __init__(
        self, settings: Settings, heartbeat: Heartbeat, condition: Condition, worker_id: Callable[[], UUID | None]
    ) -> None:
        self._settings = settings
        self._heartbeat = heartbeat
        self._condition = condition
        self._worker_id = worker_id
        # When the worker was asked to stop, on the monotonic clock.
        self.stop_asked_at: float | None = None

    def look(self, about: Mapping[str, Any]) -> None:
        """To be called while the loop is blocked, from another thread. `about`: what blocks it. Ends the process if the
        loop has been blocked for too long, or would not let the worker stop within its grace."""
        asked_at = self.stop_asked_at
        if asked_at is not None and time.monotonic() - asked_at > self._settings.drain_timeout:
            log.error("worker.left_blocked", stopping=True, **about)
            # A deploy counts against no run.
            leave_at_once(self._settings, self._heartbeat, self._worker_id(), [], 0)
        if self._condition.blocked_too_long:
            log.error("worker.left_blocked", stopping=False, **about)
            # None: what blocks the loop belongs to no run that the worker holds, and each may be the cause.
            blamed = [UUID(about["run_id"])] if self._condition.holds(about.get("run_id")) else None
            leave_at_once(self._settings, self._heartbeat, self._worker_id(), blamed)


def leave_at_once(
    settings: Settings,
    heartbeat: Heartbeat,
    worker_id: UUID | None,
    blamed: Sequence[UUID] | None,
    code: int = EXIT_CODE,
) -> NoReturn:
    """Hand over the worker's runs and end the process. If the database is away the lease expires instead, and every run
    of the worker is a suspect."""
    try:
        if worker_id is not None:
            _hand_over(settings, worker_id, blamed, heartbeat.halt)
    except Exception as error:
        # Where in our code an outage was noticed says nothing.
        log.error("worker.not_handed_over", error=describe(error), exc_info=None if is_outage(error) else error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _hand_over(
    settings: Settings, worker_id: UUID, blamed: Sequence[UUID] | None, halt: Callable[[float], None]
) -> None:
    with open_blocking_session(settings, "watchdog") as connection:
        with with_session_options(connection, settings):
            # Before the heartbeat's session ends: from then on the worker may be declared lost at any time.
            blame(connection, worker_id, blamed)
        # A renewal after the lease has ended would take the runs back.
        halt(settings.database_timeout + HALT_MARGIN_SECONDS)
        with with_session_options(connection, settings):
            hand_over(connection, worker_id)
