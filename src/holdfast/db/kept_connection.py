"""A pooled connection that one part of a process keeps.

It serves short and frequent statements. Taking a connection from the pool and returning it costs more than such a
statement. And on changing connections, Postgres would plan the statement on each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import DictRow

from holdfast.db.answer_timeout import TimedAsyncConnection
from holdfast.db.connect import ANSWER_TIMEOUT_SHARE, Database
from holdfast.db.generic_plans import GENERIC_PLANS, PlanRefresh

# How long resetting a connection may take before it is closed instead.
RESET_TIMEOUT_SECONDS = 1.0


class KeptConnection:
    """Takes a connection from the pool at the first use. After an error the connection returns to the pool, and the
    next use takes another. Only one task may use it at a time.

    `others`: how many connections must be left for other users. If POOL_MAX is too small for that, each use takes a
    connection and returns it. `generic_plans`: see `db/generic_plans.py`. Behind PgBouncer, where a session cannot be
    set, each use takes a connection instead.
    """

    def __init__(self, database: Database, *, others: int, generic_plans: bool = False) -> None:
        self._database = database
        self._plans = PlanRefresh() if generic_plans else None
        behind_bouncer = generic_plans and database.settings.pgbouncer
        self._keeps = database.settings.pool_max > others and not behind_bouncer
        self._held: TimedAsyncConnection | None = None
        # The timeout that the pool has set on the connection.
        self._answer_timeout: float | None = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A connection for single statements, as `Database.connection`."""
        if not self._keeps:
            async with self._database.connection() as connection:
                yield connection
            return
        try:
            yield await self._ready()
        except BaseException:
            await self.release()
            raise

    async def release(self) -> None:
        """Return the connection to the pool, even if the task is cancelled meanwhile. The pool replaces a broken
        one."""
        held, self._held = self._held, None
        if held is None:
            return
        try:
            if self._plans is not None and not held.closed:
                await _reset(held)
        except BaseException:
            # It could not be reset, so no other user may get it.
            held.pgconn.finish()
            raise
        finally:
            held.answer_timeout = self._answer_timeout
            await self._database.pool.putconn(held)

    async def _ready(self) -> AsyncConnection[DictRow]:
        if self._held is None:
            self._held = await self._database.pool.getconn()
            # Its statements are short, so a server that hangs can be noticed sooner.
            self._answer_timeout, self._held.answer_timeout = (
                self._held.answer_timeout,
                ANSWER_TIMEOUT_SHARE * self._database.settings.database_timeout,
            )
            if self._plans is not None:
                for name, value in GENERIC_PLANS.items():
                    await self._held.execute("SELECT set_config(%s, %s, false)", (name, value))
        if self._plans is not None:
            await self._plans.before_transaction(self._held)
        return self._held


async def _reset(connection: AsyncConnection[DictRow]) -> None:
    """Reset the settings of the session for the next user. Close the connection if that fails."""
    try:
        async with asyncio.timeout(RESET_TIMEOUT_SECONDS):
            for name in GENERIC_PLANS:
                await connection.execute(sql.SQL("RESET {}").format(sql.Identifier(name)))
    except (psycopg.Error, OSError):  # OSError includes TimeoutError.
        await connection.close()
