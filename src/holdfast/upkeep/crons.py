"""The duty that fires crons when they are due."""

from __future__ import annotations

import math

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.cancel import announce_cancelled
from holdfast.engine.created import say_created
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.resources.crons import fire, postpone, upcoming_crons
from holdfast.signals import Signals

# Seconds until a cron is tried again that failed for no good reason.
RETRY_INTERVAL = 60.0
BATCH = 100

log = structlog.get_logger(__name__)


class CronFirer:
    """Safe to run in any number of processes: a due time is taken by one of them, with its run or not at all."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals

    async def run(self, connection: AsyncConnection[DictRow]) -> float:
        """Fire what is due, at most one batch. Returns the seconds until there is more, if that is known."""
        upcoming = await upcoming_crons(connection, BATCH)
        due = [cron for cron in upcoming if cron["due_in"] <= 0]
        for cron in due:
            await self._fire(cron)
        if due:
            # What has fired may be due again soon, and there may be more than a batch.
            return 0.0
        return min((float(cron["due_in"]) for cron in upcoming), default=math.inf)

    async def _fire(self, due: DictRow) -> None:
        about = {"cron_id": str(due["cron_id"]), "due": due["next_run_date"].isoformat()}
        try:
            firing = await fire(self._database, due)
        except (psycopg.OperationalError, OSError):
            raise
        except Exception:
            # One cron that cannot be fired must not keep the others, nor the other duties, from being done.
            log.exception("cron.failed", **about)
            await postpone(self._database, due, RETRY_INTERVAL)
            return
        if firing is None:
            return
        if firing.created is None or firing.new is None:
            log.warning("cron.skipped", reason=firing.skipped, **about)
            return
        strategy, delay = firing.new.multitask_strategy, firing.new.after_seconds
        log.info("cron.fired", run_id=str(firing.new.run_id), **about)
        say_created(firing.new, firing.created, by="cron")
        announce_cancelled(
            self._signals, firing.created.cancelled, "rollback" if strategy == "rollback" else "interrupt"
        )
        if firing.created.ready:
            announce_ready(self._signals, [ReadyRun(firing.new.run_id, firing.new.graph_id, delay)])
