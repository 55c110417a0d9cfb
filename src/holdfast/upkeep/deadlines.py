"""The duty that serves the deadlines of interrupts: it resumes with the default, or escalates."""

from __future__ import annotations

import structlog
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside, ignore_failures
from holdfast.engine.interrupts.inbox import next_deadline, postpone_deadline, serve_deadline, upcoming_deadlines
from holdfast.engine.outbox import announce_webhooks
from holdfast.engine.submit import announce_run
from holdfast.signals import Signals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.duty import LOOK_INTERVAL

# Until a deadline is tried again that could not be served.
RETRY_SECONDS = 60.0
# Until the next look when everything that is due is locked.
LOCKED_RETRY_SECONDS = 1.0
# Deadlines that one pass serves.
MAX_DEADLINES_PER_PASS = 100

log = structlog.get_logger(__name__)


class Deadlines:
    """May run in any number of processes: one of them serves a deadline. Deadlines that passed while no process led the
    upkeep are served later."""

    def __init__(self, database: Database, signals: Signals, metrics: Metrics) -> None:
        self._database = database
        self._signals = signals
        self._aside = RowsSetAside("deadlines", "due_time", metrics, first_delay=RETRY_SECONDS)

    async def run(self) -> float:
        """Serve what is due, at most one batch. Returns the seconds until the next look."""
        aside = self._aside.ids()
        async with self._database.connection() as connection:
            due_in = await next_deadline(connection, aside)
            if due_in is None or due_in > 0:
                return LOOK_INTERVAL if due_in is None else min(LOOK_INTERVAL, due_in)
            upcoming = await upcoming_deadlines(connection, MAX_DEADLINES_PER_PASS, aside)
        processed = [await self._serve(interrupt) for interrupt in upcoming if interrupt["due_in"] <= 0]
        return 0.0 if any(processed) else LOCKED_RETRY_SECONDS

    async def _serve(self, due: DictRow) -> bool:
        """Whether the deadline was processed: not if the interrupt is locked, or another process was first."""
        about = {"interrupt_id": due["interrupt_id"], "thread_id": str(due["thread_id"])}
        try:
            served = await serve_deadline(self._database, due)
        except Exception as error:
            if is_outage(error) and not isinstance(error, TimeoutError):
                raise
            # An interrupt that cannot be served, or whose thread is locked, must not keep the others from being served.
            log.exception("interrupt.deadline_failed", **about)
            # Setting it aside in memory works even if its row cannot be written.
            async with ignore_failures(self._database):
                await postpone_deadline(self._database, due, RETRY_SECONDS)
            self._aside.put(due, error)
            return True
        if served is None:
            return False
        if served.escalated:
            log.info("interrupt.escalated", **about)
        elif served.created is None:
            log.warning("interrupt.deadline_skipped", reason=served.skipped, **about)
        else:
            log.info("interrupt.defaulted", run_id=str(served.created.new.run_id), **about)
            announce_run(self._signals, served.created)
        if served.webhook_queued:
            announce_webhooks(self._signals)
        return True
