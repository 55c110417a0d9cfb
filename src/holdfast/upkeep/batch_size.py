"""How many rows a sweep takes at a time: as many as take about a quarter of a second.

A thread may have ten rows or a million. A fixed number of threads would hold their locks for a moment or for minutes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.time_limit import time_limit

# Seconds that one batch should take.
TARGET_SECONDS = 0.25
FIRST_BATCH_ROWS = 50
MAX_BATCH_ROWS = 500
# How many times DATABASE_TIMEOUT a batch may take. The timeout of the pool's statements is longer: it closes the
# connection.
LIMIT_TIMES = 2.5


class BatchSize:
    """`size` is how many rows to take next. It shrinks when a batch took too long, and grows while there are more."""

    def __init__(self, first: int = FIRST_BATCH_ROWS, most: int = MAX_BATCH_ROWS) -> None:
        self.size = min(first, most)
        self._most = most

    def took(self, count: int, seconds: float) -> bool:
        """The last batch had `count` rows. Returns whether there may be more."""
        more = count >= self.size
        if seconds > TARGET_SECONDS:
            self.size = max(1, self.size // 2)
        elif more and seconds < TARGET_SECONDS / 2:
            self.size = min(self._most, self.size * 2)
        return more

    def failed(self) -> None:
        """The last batch failed, or took too long. The next has one row, so that only a row that cannot be removed
        fails again."""
        self.size = 1

    def succeeded(self) -> None:
        """Take twice as many next, independent of how long the last batch took."""
        self.size = min(self._most, self.size * 2)


async def take(
    database: Database, statement: str, parameters: Mapping[str, Any], batch_size: BatchSize, seconds: float | None
) -> tuple[int, bool]:
    """Execute a statement that takes up to %(batch)s rows. Returns how many it took, and whether there may be more.

    `seconds`: how long it may take; None: no limit. Raises TooSlow when it takes longer.
    """
    started = time.monotonic()
    try:
        async with time_limit(database, seconds), database.connection() as connection:
            cursor = await connection.execute(statement.encode(), {"batch": batch_size.size, **parameters})
            row = await cursor.fetchone() if cursor.description is not None else None
    except Exception as error:
        if not is_outage(error):
            batch_size.failed()
        raise
    taken = cursor.rowcount if row is None else int(row["count"])
    return taken, batch_size.took(taken, time.monotonic() - started)
