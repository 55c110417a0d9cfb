"""A `Database` whose uses are all part of one open transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database


class TransactionDatabase(Database):
    """Passes an open transaction to functions that take a `Database`. The caller who began the transaction commits all
    their writes together. Each use of `connection` or `transaction` is a savepoint, so it can fail without the rest.

    Only one task may use it at a time. After `end` it uses the pool again.
    """

    def __init__(self, database: Database, connection: AsyncConnection[DictRow]) -> None:
        # Does not call the parent's __init__, which would create another pool.
        self.settings = database.settings
        self._pool = database.pool
        self._scope = database._scope
        self._open_transaction: AsyncConnection[DictRow] | None = connection

    def end(self) -> None:
        """Stop using the transaction, which has been committed or rolled back."""
        self._open_transaction = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        if self._open_transaction is None:
            async with super().connection() as connection:
                yield connection
        else:
            async with self._open_transaction.transaction():
                yield self._open_transaction

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        if self._open_transaction is None:
            async with super().transaction() as connection:
                yield connection
        else:
            async with self._open_transaction.transaction():
                yield self._open_transaction
