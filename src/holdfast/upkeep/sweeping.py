"""Does a sweep portion by portion, around the rows that cannot be removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.batch_size import BatchSize, take
from holdfast.upkeep.sweeps import Sweep


class Sweeping:
    """After a portion that fails, the next is a single row. One that fails alone is set aside and reported."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        sweep: Sweep,
        portion: BatchSize | None = None,
        limit: int | None = None,
    ) -> None:
        """`limit`: how much one look may take."""
        self._database = database
        self._sweep = sweep
        self._portion = portion or BatchSize()
        self._limit = self._left = limit
        self._aside = RowsSetAside(f"sweep of {sweep.what}", sweep.key, metrics)

    async def take(self, seconds: float | None) -> tuple[int, bool]:
        """Take a portion within the seconds that are given, if any. Returns how much it was, and whether there may be
        more. Raises what the statement raises."""
        parameters = self._sweep.parameters(self._database.settings)
        if parameters is None:
            return 0, False
        batch = self._portion.size if self._left is None else min(self._left, self._portion.size)
        given = {**parameters, "batch": batch, "aside": self._aside.ids()}
        try:
            swept, more = await take(self._database, self._sweep.statement, given, self._portion, seconds)
        except Exception as error:
            if batch == 1 and not is_outage(error):
                await self._pass_over(given, error)
            raise
        if self._left is not None:
            self._left -= swept
            more = more and self._left > 0
        if not more:
            self._left = self._limit
        return swept, more

    async def _pass_over(self, given: Mapping[str, Any], error: Exception) -> None:
        """Set aside the row that cannot be removed: the first that would be taken."""
        async with self._database.connection() as connection:
            row = await (await connection.execute(self._sweep.oldest.encode(), given)).fetchone()
        if row is not None:
            self._aside.put(row, error)
