"""A database whose every use, for a while, is part of one transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database


class TransactionDatabase(Database):
    """The pool of a process, seen by somebody whose writes are to be committed together by whoever began the
    transaction. What would be a transaction of its own is a savepoint in it: it can fail without the rest.

    For one task at a time. After `end` it is the pool again.
    """

    def __init__(self, database: Database, connection: AsyncConnection[DictRow]) -> None:
        # Not the parent's: there is a pool already.
        self.settings = database.settings
        self.metrics = database.metrics
        self._pool = database.pool
        self._scope = database._scope
        self._within: AsyncConnection[DictRow] | None = connection

    def end(self) -> None:
        """The transaction is over, one way or the other."""
        self._within = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        if self._within is None:
            async with super().connection() as connection:
                yield connection
        else:
            async with self._within.transaction():
                yield self._within

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        if self._within is None:
            async with super().transaction() as connection:
                yield connection
        else:
            async with self._within.transaction():
                yield self._within
