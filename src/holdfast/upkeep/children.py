"""The duty that looks after families of runs: children whose parent was stopped, and parents that wait too long."""

from __future__ import annotations

import structlog

from holdfast.db.connect import Database
from holdfast.db.row_by_row import RowsSetAside
from holdfast.engine.children.families import cancel_abandoned, has_family_work, release_overdue
from holdfast.engine.ready import announce_ready
from holdfast.signals import Signals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.duty import LOOK_INTERVAL

BATCH = 100

log = structlog.get_logger(__name__)


class ChildKeeper:
    """Safe to run in any number of processes: everything it does can be done twice."""

    def __init__(self, database: Database, signals: Signals, metrics: Metrics) -> None:
        self._database = database
        self._signals = signals
        self._aside = RowsSetAside("families", "run_id", metrics)

    async def run(self) -> float:
        """Do what there is to do. Returns the seconds until the next look."""
        async with self._database.connection() as connection:
            if not await has_family_work(connection):
                return LOOK_INTERVAL
        parents, children = await cancel_abandoned(self._database, self._signals, BATCH, self._aside)
        if children:
            log.info("children.cancelled", parents=parents, children=children)
        overdue = await release_overdue(self._database, self._database.settings.run_timeout, self._aside)
        if overdue:
            log.info("children.waited_too_long", run_ids=[str(run.run_id) for run in overdue])
            announce_ready(self._signals, overdue)
        return LOOK_INTERVAL
