"""A cache for figures that the database counts and that many clients poll."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database

CACHE_SECONDS = 1.0

Count = Callable[[AsyncConnection[DictRow]], Awaitable[dict[str, Any]]]


class CachedFigures:
    """Counts at most once a second, however many autoscalers, dashboards and terminals ask."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._counting = asyncio.Lock()
        self._until = 0.0
        self._figures: dict[str, Any] = {}

    async def figures(self, database: Database) -> dict[str, Any]:
        async with self._counting:
            if time.monotonic() >= self._until:
                async with database.connection() as connection:
                    self._figures = await self._count(connection)
                self._until = time.monotonic() + CACHE_SECONDS
        return self._figures
