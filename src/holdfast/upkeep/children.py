"""The duty that looks after families of runs: children whose parent was stopped, and parents that wait too long."""

from __future__ import annotations

import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.children import cancel_abandoned, release_overdue
from holdfast.engine.ready import announce_ready
from holdfast.signals import Signals

BATCH = 100

log = structlog.get_logger(__name__)


class ChildKeeper:
    """Safe to run in any number of processes: everything it does can be done twice."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals

    async def run(self, connection: AsyncConnection[DictRow]) -> None:
        parents, children = await cancel_abandoned(self._database, self._signals, BATCH)
        if children:
            log.info("children.cancelled", parents=parents, children=children)
        overdue = await release_overdue(connection, self._database.settings.run_timeout)
        if overdue:
            log.info("children.waited_too_long", run_ids=[str(run.run_id) for run in overdue])
            announce_ready(self._signals, overdue)
