"""Connections to Postgres: how each kind is opened, and the pool of a process.

Three kinds exist. *Pooled* connections serve requests and reads. A *session* belongs to one part of
a process for as long as it lives (journal, LISTEN, heartbeat, leadership). Both find Holdfast's
tables by `search_path`, never by writing the schema into a statement, because the stock LangGraph
saver's statements name their tables bare.

Behind PgBouncer in transaction mode a session's settings do not stick to the client, so there
every use is a transaction that begins with SET LOCAL, and nothing is prepared.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import AsyncConnection, Connection
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from holdfast.db.dsn import check_dsn
from holdfast.db.pipelines import gathered
from holdfast.db.plans import PLANNED_ONCE
from holdfast.errors import DatabaseError
from holdfast.settings import Settings
from holdfast.telemetry.metrics import Metrics

MINIMUM_SERVER = 140000
# Postgres cuts off what is longer.
LONGEST_APPLICATION_NAME = 63


def application_name(settings: Settings, role: str) -> str:
    """How the sessions of a role appear in pg_stat_activity: with their schema, unless it is the default one, because a
    database may hold several installations."""
    default = Settings.model_fields["db_schema"].default
    name = f"holdfast {role}" if settings.db_schema == default else f"holdfast {role} of {settings.db_schema}"
    return name[:LONGEST_APPLICATION_NAME]


def connection_parameters(settings: Settings, role: str, *, session: bool = False, planned_once: bool = False) -> str:
    """The connection string for `role` (it shows in pg_stat_activity)."""
    url = settings.session_url if session else settings.database_url
    if url is None:
        raise DatabaseError("DATABASE_URL is not set: there is no database to connect to.")
    direct = session and settings.direct_database_url is not None
    check_dsn("DIRECT_DATABASE_URL" if direct else "DATABASE_URL", url)
    timeout = max(2, round(settings.database_timeout))
    parameters: dict[str, Any] = {
        "application_name": application_name(settings, role),
        "connect_timeout": timeout,
        "keepalives_idle": timeout,
        "keepalives_interval": max(1, timeout // 3),
        "keepalives_count": 3,
        "tcp_user_timeout": timeout * 1000,
    }
    if not (settings.pgbouncer and not session):
        options = {
            "search_path": settings.db_schema,
            # All hot statements have an index to use. A plan made while a table was still empty would read it whole,
            # and stay cached after it has grown.
            "enable_seqscan": "off",
            # A process that is stopped in the middle of a transaction must not keep its locks: whoever takes over
            # its runs waits for them.
            "idle_in_transaction_session_timeout": f"{settings.lease * 1000:.0f}",
            **(PLANNED_ONCE if planned_once else {}),
        }
        parameters["options"] = " ".join(f"-c {name}={value}" for name, value in options.items())
    return make_conninfo(url, **parameters)


async def open_session(settings: Settings, role: str, *, planned_once: bool = False) -> AsyncConnection[DictRow]:
    """A connection of one's own, in autocommit. The caller closes it. `planned_once`: see `db/plans.py`."""
    direct = settings.session_url is not None
    return await AsyncConnection.connect(
        connection_parameters(settings, role, session=direct, planned_once=planned_once),
        autocommit=True,
        row_factory=dict_row,
        prepare_threshold=1 if direct else None,
    )


def open_blocking_session(settings: Settings, role: str) -> Connection[DictRow]:
    """The same for a plain thread."""
    direct = settings.session_url is not None
    return Connection.connect(
        connection_parameters(settings, role, session=direct),
        autocommit=True,
        row_factory=dict_row,
        prepare_threshold=1 if direct else None,
    )


def check_server(connection: Connection[Any]) -> None:
    """Refuse a server older than Holdfast supports."""
    if connection.info.server_version < MINIMUM_SERVER:
        version = connection.info.server_version // 10000
        raise DatabaseError(f"DATABASE_URL leads to PostgreSQL {version}: Holdfast needs 14 or later.")


async def _as_it_is(_: AsyncConnection[Any]) -> None:
    """There is nothing to reset. But a pool with this hook takes connections back in a task of its own, and without it
    in that of whoever had one: when that is being cancelled, again and again as anyio does it to the stream of a client
    that has gone, the connection is lost, and its place in the pool for good."""


class Database:
    """The pool of one process."""

    def __init__(self, settings: Settings, role: str) -> None:
        self.settings = settings
        # What the process counts. Here because every part of a process has its database at hand, and there is one.
        self.metrics = Metrics(enabled=settings.metrics)
        self._pool: AsyncConnectionPool[AsyncConnection[DictRow]] = AsyncConnectionPool(
            connection_parameters(settings, role),
            min_size=settings.pool_min,
            max_size=settings.pool_max,
            timeout=settings.database_timeout,
            kwargs={
                "autocommit": True,
                "row_factory": dict_row,
                "prepare_threshold": None if settings.pgbouncer else 2,
            },
            check=None,
            reset=_as_it_is,
            open=False,
            name=role,
        )
        self._scope = f"SET LOCAL search_path TO {settings.db_schema}".encode() if settings.pgbouncer else None

    async def open(self) -> None:
        """Connect. Raises DatabaseError when the server cannot be reached in time."""
        await self._pool.open()
        try:
            await self._pool.wait(timeout=self.settings.database_timeout)
        except PoolTimeout as error:
            await self._pool.close()
            raise DatabaseError(
                f"The database did not answer within DATABASE_TIMEOUT={self.settings.database_timeout:g} seconds."
            ) from error

    async def close(self) -> None:
        await self._pool.close(timeout=5)

    @property
    def pool(self) -> AsyncConnectionPool[AsyncConnection[DictRow]]:
        return self._pool

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A connection for single statements, each its own transaction (one transaction behind PgBouncer).

        A connection that the server has closed meanwhile is replaced by the pool when it comes back broken;
        the statement that found out fails with psycopg.OperationalError, and the caller decides whether it may
        be repeated.
        """
        async with self._pool.connection() as connection:
            if self._scope is None:
                yield connection
            else:
                async with connection.transaction():
                    await connection.execute(self._scope)
                    yield connection

    @asynccontextmanager
    async def pipelined(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A transaction that costs one round trip, its beginning and its end included, and commits at the end of the
        block. What the statements have said can be read after that. Rolls back on any exception."""
        async with self._pool.connection() as connection, gathered(connection):
            await connection.execute("BEGIN")
            if self._scope is not None:
                await connection.execute(self._scope)
            yield connection
            await connection.execute("COMMIT")

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A connection inside a transaction: commits at the end, rolls back on any exception."""
        async with self._pool.connection() as connection, connection.transaction():
            if self._scope is not None:
                await connection.execute(self._scope)
            yield connection
