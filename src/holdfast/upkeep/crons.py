"""The duty that fires crons when they are due."""

from __future__ import annotations

import structlog
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside, ignore_failures
from holdfast.engine.cancel import announce_cancelled
from holdfast.engine.created import say_created
from holdfast.engine.crons import fire, next_cron_due, postpone, upcoming_crons
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.signals import Signals
from holdfast.upkeep.duty import LOOK_INTERVAL

# Seconds until a cron is tried again that failed for no good reason.
RETRY_INTERVAL = 60.0
# Seconds until the next look when everything that is due is locked.
LOCKED_INTERVAL = 1.0
BATCH = 100

log = structlog.get_logger(__name__)


class CronFirer:
    """Safe to run in any number of processes: a due time is taken by one of them, with its run or not at all."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals
        self._aside = RowsSetAside("crons", "due_time", database.metrics, first_pause=RETRY_INTERVAL)

    async def run(self) -> float:
        """Fire what is due, at most one batch. Returns the seconds until the next look."""
        aside = self._aside.ids()
        async with self._database.connection() as connection:
            due_in = await next_cron_due(connection, aside)
            if due_in is None or due_in > 0:
                return LOOK_INTERVAL if due_in is None else min(LOOK_INTERVAL, due_in)
            due = [cron for cron in await upcoming_crons(connection, BATCH, aside) if cron["due_in"] <= 0]
        dealt_with = [await self._fire(cron) for cron in due]
        # What has fired may be due again soon, and there may be more than a batch.
        return 0.0 if any(dealt_with) else LOCKED_INTERVAL

    async def _fire(self, due: DictRow) -> bool:
        """Whether the cron was dealt with: not if it is locked, or if another process was first."""
        about = {"cron_id": str(due["cron_id"]), "due": due["next_run_date"].isoformat()}
        try:
            firing = await fire(self._database, due)
        except Exception as error:
            if is_outage(error) and not isinstance(error, TimeoutError):
                raise
            # A cron that cannot be fired, or whose thread somebody has locked, must not keep the others from it.
            log.exception("cron.failed", **about)
            # Setting it aside does not depend on its row, which may be what cannot be written.
            async with ignore_failures(self._database):
                await postpone(self._database, due, RETRY_INTERVAL)
            self._aside.put(due, error)
            return True
        if firing is None:
            return False
        if firing.created is None or firing.new is None:
            log.warning("cron.skipped", reason=firing.skipped, **about)
            return True
        strategy, delay = firing.new.multitask_strategy, firing.new.after_seconds
        log.info("cron.fired", run_id=str(firing.new.run_id), **about)
        say_created(firing.new, firing.created, by="cron")
        announce_cancelled(
            self._signals, firing.created.cancelled, "rollback" if strategy == "rollback" else "interrupt"
        )
        if firing.created.ready:
            announce_ready(self._signals, [ReadyRun(firing.new.run_id, firing.new.graph_id, delay)])
        return True
