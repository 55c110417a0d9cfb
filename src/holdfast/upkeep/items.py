"""The duty that removes expired items of the store. Nobody sees them any more: this is about space."""

from __future__ import annotations

import time

import structlog

from holdfast.db.connect import Database

log = structlog.get_logger(__name__)

BATCH = 500

# An item that is being put again at this moment is locked, and not expired when it is looked at next.
SWEEP_ITEMS = """
WITH doomed AS (
    SELECT prefix, key FROM store WHERE expires_at < now()
    ORDER BY expires_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
)
DELETE FROM store USING doomed WHERE store.prefix = doomed.prefix AND store.key = doomed.key
"""

COUNT_ITEMS = "SELECT count(*) FROM store WHERE expires_at < now()"


class ItemSweeper:
    """Runs once an interval, or at once again while there is more."""

    def __init__(self, database: Database, interval: float) -> None:
        self._database = database
        self._interval = interval
        self._due = 0.0

    async def run(self) -> None:
        if time.monotonic() < self._due:
            return
        async with self._database.connection() as connection:
            swept = (await connection.execute(SWEEP_ITEMS, {"batch": BATCH})).rowcount
        self._due = time.monotonic() + (0.0 if swept >= BATCH else self._interval)
        if swept:
            log.debug("upkeep.items_swept", items=swept)
