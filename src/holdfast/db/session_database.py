"""A `Database` on a single session, for functions that take a `Database` but must not use the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database


class SessionDatabase(Database):
    """Uses `session` for everything. Only one task may use it at a time."""

    def __init__(self, database: Database, session: AsyncConnection[DictRow]) -> None:
        # Does not call the parent's __init__, which would create another pool.
        self.settings = database.settings
        self._pool = database.pool
        self._scope = None
        self._session = session

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        yield self._session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        async with self._session.transaction():
            yield self._session
