"""The duty that removes expired items of the store. Nobody sees them any more: this is about space."""

from __future__ import annotations

import structlog

from holdfast.db.connect import Database
from holdfast.upkeep.portions import LIMIT_TIMES, MOST, Portion, take

log = structlog.get_logger(__name__)

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
    """Once an interval, or at once again while there is more."""

    def __init__(self, database: Database, interval: float) -> None:
        self._database = database
        self._interval = interval
        self._portion = Portion(first=MOST, most=MOST)

    async def run(self) -> float:
        """Remove a portion. Returns the seconds until the next."""
        seconds = LIMIT_TIMES * self._database.settings.database_timeout
        swept, more = await take(self._database, SWEEP_ITEMS, {}, self._portion, seconds)
        if swept:
            log.debug("upkeep.items_swept", items=swept)
        return 0.0 if more else self._interval
