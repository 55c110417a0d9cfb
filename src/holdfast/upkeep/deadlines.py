"""The duty that serves the deadlines of questions: a default answer, or an escalation."""

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
from holdfast.upkeep.duty import LOOK_INTERVAL

# Seconds until a deadline is tried again that failed for no good reason.
RETRY_INTERVAL = 60.0
# Seconds until the next look when everything that is due is locked.
LOCKED_INTERVAL = 1.0
BATCH = 100

log = structlog.get_logger(__name__)


class Deadlines:
    """Safe to run in any number of processes: a deadline is served by one of them. What passed while nobody was there
    is served when somebody is."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals
        self._aside = RowsSetAside("deadlines", "due_time", database.metrics, first_delay=RETRY_INTERVAL)

    async def run(self) -> float:
        """Serve what is due, at most one batch. Returns the seconds until the next look."""
        aside = self._aside.ids()
        async with self._database.connection() as connection:
            due_in = await next_deadline(connection, aside)
            if due_in is None or due_in > 0:
                return LOOK_INTERVAL if due_in is None else min(LOOK_INTERVAL, due_in)
            due = [one for one in await upcoming_deadlines(connection, BATCH, aside) if one["due_in"] <= 0]
        dealt_with = [await self._serve(question) for question in due]
        return 0.0 if any(dealt_with) else LOCKED_INTERVAL

    async def _serve(self, due: DictRow) -> bool:
        """Whether the deadline was dealt with: not if the question is locked, or if another process was first."""
        about = {"interrupt_id": due["interrupt_id"], "thread_id": str(due["thread_id"])}
        try:
            served = await serve_deadline(self._database, due)
        except Exception as error:
            if is_outage(error) and not isinstance(error, TimeoutError):
                raise
            # One that cannot be served, or whose thread somebody has locked, must not keep the others from it.
            log.exception("interrupt.deadline_failed", **about)
            # Setting it aside does not depend on its row, which may be what cannot be written.
            async with ignore_failures(self._database):
                await postpone_deadline(self._database, due, RETRY_INTERVAL)
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
        if served.told:
            announce_webhooks(self._signals)
        return True
