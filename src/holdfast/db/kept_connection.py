"""A connection of the pool that one part of a process keeps.

For what is short and frequent: to take a connection for each statement, and to give it back, costs more than many of
them, and each connection that is taken in turn has plans of its own to make.
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

# Seconds that giving back a connection may take.
PATIENCE = 1.0


class KeptConnection:
    """Taken when it is first used, and given back when something fails on it; then the next use takes another. For one
    user at a time.

    `others`: how many more the pool must have, or else one is taken for each use. `generic_plans`: its statements are,
    see `db/generic_plans.py`, unless PgBouncer lies in between, where nothing is.
    """

    def __init__(self, database: Database, *, others: int, generic_plans: bool = False) -> None:
        self._database = database
        self._plans = PlanRefresh() if generic_plans else None
        behind_bouncer = generic_plans and database.settings.pgbouncer
        self._keeps = database.settings.pool_max > others and not behind_bouncer
        self._held: TimedAsyncConnection | None = None
        # As the pool has set it.
        self._answer_timeout: float | None = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """For single statements, as `Database.connection`."""
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
        """Return the connection to the pool, also if the task is cancelled meanwhile. The pool replaces it if it is
        broken."""
        held, self._held = self._held, None
        if held is None:
            return
        try:
            if self._plans is not None and not held.closed:
                await _restore(held)
        except BaseException:
            # Not set back: nobody else may have it.
            held.pgconn.finish()
            raise
        finally:
            held.answer_timeout = self._answer_timeout
            await self._database.pool.putconn(held)

    async def _ready(self) -> AsyncConnection[DictRow]:
        if self._held is None:
            self._held = await self._database.pool.getconn()
            # Its statements are short. Whoever keeps it must notice soon that the server hangs.
            self._answer_timeout, self._held.answer_timeout = (
                self._held.answer_timeout,
                ANSWER_TIMEOUT_SHARE * self._database.settings.database_timeout,
            )
            if self._plans is not None:
                for name, value in GENERIC_PLANS.items():
                    await self._held.execute("SELECT set_config(%s, %s, false)", (name, value))
        if self._plans is not None:
            await self._plans.use(self._held)
        return self._held


async def _restore(connection: AsyncConnection[DictRow]) -> None:
    """Nobody else is to find it set as it is, and sooner nobody at all."""
    try:
        async with asyncio.timeout(PATIENCE):
            for name in GENERIC_PLANS:
                await connection.execute(sql.SQL("RESET {}").format(sql.Identifier(name)))
    except (psycopg.Error, OSError):  # Which TimeoutError is one of.
        await connection.close()
