"""A session that is used as a database: for functions that take a `Database`, without a connection of the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database


class SessionDatabase(Database):
    """Every use is a use of `session`. For one task at a time."""

    def __init__(self, database: Database, session: AsyncConnection[DictRow]) -> None:
        # Not the parent's: there is no pool to make.
        self.settings = database.settings
        self.metrics = database.metrics
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
