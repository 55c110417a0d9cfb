"""Reading checkpoints, and writing them where no run is under way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from psycopg import AsyncCursor
from psycopg.rows import DictRow, dict_row

from holdfast.db.connect import Database


class PooledSaver(AsyncPostgresSaver):
    """The stock saver on Holdfast's pool, schema and PgBouncer rules included."""

    def __init__(self, database: Database, serde: SerializerProtocol | None = None) -> None:
        super().__init__(cast(Any, database.pool), serde=serde)
        self._database = database

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[AsyncCursor[DictRow]]:
        async with self._database.connection() as connection:
            if pipeline:
                async with connection.pipeline(), connection.cursor(binary=True, row_factory=dict_row) as cursor:
                    yield cursor
            else:
                async with connection.cursor(binary=True, row_factory=dict_row) as cursor:
                    yield cursor
