"""The duty that serves the deadlines of questions: a default answer, or an escalation."""

from __future__ import annotations

import math

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.created import say_created
from holdfast.engine.outbox import announce_webhooks
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.resources.interrupts import postpone_deadline, serve_deadline, upcoming_deadlines
from holdfast.signals import Signals

# Seconds until a deadline is tried again that failed for no good reason.
RETRY_INTERVAL = 60.0
BATCH = 100

log = structlog.get_logger(__name__)


class Deadlines:
    """Safe to run in any number of processes: a deadline is served by one of them. What passed while nobody was there
    is served when somebody is."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals

    async def run(self, connection: AsyncConnection[DictRow]) -> float:
        """Serve what is due. Returns the seconds until there is more, if that is known."""
        upcoming = await upcoming_deadlines(connection, BATCH)
        due = [question for question in upcoming if question["due_in"] <= 0]
        for question in due:
            await self._serve(question)
        if due:
            return 0.0
        return min((float(question["due_in"]) for question in upcoming), default=math.inf)

    async def _serve(self, due: DictRow) -> None:
        about = {"interrupt_id": due["interrupt_id"], "thread_id": str(due["thread_id"])}
        try:
            served = await serve_deadline(self._database, due)
        except (psycopg.OperationalError, OSError):
            raise
        except Exception:
            # One that cannot be served must not keep the others, nor the other duties, from being done.
            log.exception("interrupt.deadline_failed", **about)
            await postpone_deadline(self._database, due, RETRY_INTERVAL)
            return
        if served is None:
            return
        if served.escalated:
            log.info("interrupt.escalated", **about)
        elif served.new is None or served.created is None:
            log.warning("interrupt.deadline_skipped", reason=served.skipped, **about)
        else:
            log.info("interrupt.defaulted", run_id=str(served.new.run_id), **about)
            say_created(served.new, served.created, by="deadline")
            if served.created.ready:
                announce_ready(self._signals, [ReadyRun(served.new.run_id, served.new.graph_id)])
        if served.told:
            announce_webhooks(self._signals)
