"""How much a sweep takes at a time: as much as it gets done in a moment, whatever that is today.

A thread may hold ten rows or a million, so a fixed number of threads would hold their locks for a moment or for
minutes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.time_limit import time_limit

# Seconds that one portion should take.
MOMENT = 0.25
FIRST = 50
MOST = 500
# How many times DATABASE_TIMEOUT a portion may take. Less than a statement of the pool: that closes the connection.
LIMIT_TIMES = 2.5


class Portion:
    """`size` is what to take next. It shrinks when the last took too long, and grows while there is more."""

    def __init__(self, first: int = FIRST, most: int = MOST) -> None:
        self.size = min(first, most)
        self._most = most

    def took(self, count: int, seconds: float) -> bool:
        """The last portion had `count`. Returns whether there may be more."""
        more = count >= self.size
        if seconds > MOMENT:
            self.size = max(1, self.size // 2)
        elif more and seconds < MOMENT / 2:
            self.size = min(self._most, self.size * 2)
        return more

    def failed(self) -> None:
        """The last portion failed, or took too long. The next is a single one, so that only what cannot be removed
        fails again."""
        self.size = 1

    def succeeded(self) -> None:
        """Take twice as much next, however long the last portion took."""
        self.size = min(self._most, self.size * 2)


async def take(
    database: Database, statement: str, parameters: Mapping[str, Any], portion: Portion, seconds: float | None
) -> tuple[int, bool]:
    """Execute a statement that takes up to %(batch)s rows. Returns how many it took, and whether there may be more.

    `seconds`: how long it may take; None: any time. Raises TooSlow when they are over.
    """
    started = time.monotonic()
    try:
        async with time_limit(database, seconds), database.connection() as connection:
            cursor = await connection.execute(statement.encode(), {"batch": portion.size, **parameters})
            row = await cursor.fetchone() if cursor.description is not None else None
    except Exception as error:
        if not is_outage(error):
            portion.failed()
        raise
    taken = cursor.rowcount if row is None else int(row["count"])
    return taken, portion.took(taken, time.monotonic() - started)
