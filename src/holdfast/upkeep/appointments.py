"""What is to be done by the clock: crons, the deadlines of questions, and what families of runs have left to do.

Hardly ever is any of it due, so one statement asks for all, seldom; whoever is due sooner than that is come back for.
"""

from __future__ import annotations

import time

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.waking import NEVER
from holdfast.signals import Signals
from holdfast.upkeep.children import ChildKeeper
from holdfast.upkeep.crons import CronFirer
from holdfast.upkeep.deadlines import Deadlines

# Seconds between two looks when nothing is due before: how late something may be done that was not there at the last.
LOOK_INTERVAL = 5.0

# Each by the index that holds only what there is to do.
LOOK = f"""
SELECT EXISTS (SELECT 1 FROM abandoned)
       OR EXISTS (SELECT 1 FROM run WHERE status = 'pending' AND ready_at = {NEVER}) AS families,
       (SELECT extract(epoch FROM next_run_date - now())::float8 FROM cron
        WHERE enabled AND next_run_date IS NOT NULL ORDER BY next_run_date LIMIT 1) AS cron_in,
       (SELECT extract(epoch FROM due_at - now())::float8 FROM interrupt
        WHERE answered_by IS NULL AND settled_at IS NULL AND due_at IS NOT NULL ORDER BY due_at LIMIT 1) AS question_in
"""


class Appointments:
    """Safe to run in any number of processes: so is each of the duties."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._settings = database.settings
        self._crons = CronFirer(database, signals)
        self._deadlines = Deadlines(database, signals)
        self._children = ChildKeeper(database, signals)
        self._look_at = 0.0

    async def run(self, connection: AsyncConnection[DictRow]) -> float:
        """Do what is due. Returns the seconds until the next look should be."""
        wait = self._look_at - time.monotonic()
        if wait > 0:
            return wait
        seen = await (await connection.execute(LOOK)).fetchone()
        assert seen is not None
        looked_at, pause = time.monotonic(), LOOK_INTERVAL
        if seen["families"]:
            await self._children.run(connection)
        duties = (
            (self._deadlines, seen["question_in"]),
            (self._crons, seen["cron_in"] if self._settings.crons else None),
        )
        for duty, due_in in duties:
            if due_in is not None:
                pause = min(pause, due_in if due_in > 0 else await duty.run(connection))
        self._look_at = looked_at + pause
        return pause
