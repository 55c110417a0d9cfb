"""The duty that removes expired items of the store. Reads skip them already: this frees their space."""

from __future__ import annotations

import structlog

from holdfast.db.connect import Database
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.batch_size import LIMIT_TIMES, MAX_BATCH_ROWS, BatchSize
from holdfast.upkeep.sweeping import Sweeping
from holdfast.upkeep.sweeps import Sweep, oldest

log = structlog.get_logger(__name__)

EXPIRED = "expires_at < now()"

# An item that is being put again at this moment is locked, and not expired when it is looked at next.
OLDEST_ITEMS = oldest("ctid", "store", EXPIRED, "expires_at")

# By an array of places, as `SWEEP_KEYS`.
SWEEP_ITEMS = f"""
WITH doomed AS ({OLDEST_ITEMS})
DELETE FROM store WHERE ctid = ANY(ARRAY(SELECT ctid FROM doomed))
"""

COUNT_ITEMS = f"SELECT count(*) FROM store WHERE {EXPIRED}"

EXPIRED_ITEMS = Sweep("store items", SWEEP_ITEMS, COUNT_ITEMS, lambda _: 0.0, OLDEST_ITEMS, "ctid")


class ItemSweeper:
    """Removes a batch each interval, and the next at once while there are more."""

    def __init__(self, database: Database, metrics: Metrics, interval: float) -> None:
        self._interval = interval
        self._seconds = LIMIT_TIMES * database.settings.database_timeout
        self._sweeping = Sweeping(
            database, metrics, EXPIRED_ITEMS, BatchSize(first=MAX_BATCH_ROWS, most=MAX_BATCH_ROWS)
        )

    async def run(self) -> float:
        """Remove a batch. Returns the seconds until the next."""
        swept, more = await self._sweeping.take(self._seconds)
        if swept:
            log.debug("upkeep.items_swept", items=swept)
        return 0.0 if more else self._interval
