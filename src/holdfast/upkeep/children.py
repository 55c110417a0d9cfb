"""The duty that looks after families of runs: children whose parent was stopped, and parents that wait too long."""

from __future__ import annotations

import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.children import cancel_abandoned, release_overdue
from holdfast.engine.ready import announce_ready
from holdfast.engine.waking import NEVER
from holdfast.signals import Signals

BATCH = 100

log = structlog.get_logger(__name__)

# One cheap question for both, because hardly ever is there anything to do. The oldest that waits, by its index.
LOOK = f"""
SELECT EXISTS (SELECT 1 FROM abandoned) AS abandoned,
       EXISTS (SELECT 1 FROM run WHERE status = 'pending' AND ready_at = {NEVER}) AS waiting
"""


class ChildKeeper:
    """Safe to run in any number of processes: everything it does can be done twice."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals

    async def run(self, connection: AsyncConnection[DictRow]) -> None:
        seen = await (await connection.execute(LOOK)).fetchone()
        assert seen is not None
        if seen["abandoned"]:
            parents, children = await cancel_abandoned(self._database, self._signals, BATCH)
            if children:
                log.info("children.cancelled", parents=parents, children=children)
        if seen["waiting"]:
            overdue = await release_overdue(connection, self._database.settings.run_timeout)
            if overdue:
                log.info("children.waited_too_long", run_ids=[str(run.run_id) for run in overdue])
                announce_ready(self._signals, overdue)
