"""Opens connections to Postgres, and holds the pool of a process.

There are two kinds. *Pooled* connections serve requests and reads. A *session* belongs to one part of a process for as
long as that part runs (journal, LISTEN, heartbeat, leadership). Both find Holdfast's tables by `search_path`.
Statements never name the schema, because the statements of LangGraph's own saver do not name it either.

Behind PgBouncer in transaction mode, settings of a session do not stay with the client. There every use of a connection
is a transaction that begins with SET LOCAL, and no statement is prepared.

Each wait for the server has a timeout on the client's side (`db/answer_timeout.py`). After an outage a process connects
again within RECONNECT_MAX_PAUSE_SECONDS of the server's return. When a server does not answer one connection, the
process also checks its other connections (`Database.replace_connections`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from weakref import WeakSet

import psycopg
import structlog
from psycopg import AsyncConnection, Connection, ConnectionInfo, IsolationLevel
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from holdfast.db.adapters import ADAPTERS
from holdfast.db.answer_timeout import TimedAsyncConnection, TimedConnection
from holdfast.db.buffered_pipeline import buffered_pipeline
from holdfast.db.dead_connections import close_dead_connections
from holdfast.db.dsn import check_dsn
from holdfast.db.generic_plans import GENERIC_PLANS
from holdfast.db.reconnecting_pool import RECONNECT_MAX_PAUSE_SECONDS, ReconnectingPool
from holdfast.db.session_names import application_name
from holdfast.db.session_options import BEGIN, session_statement, startup_options, transaction_options
from holdfast.errors import DatabaseError, DatabaseUnavailable
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.settings import Settings

log = structlog.get_logger(__name__)

MINIMUM_SERVER = 140000
CREATE_DATABASE = "CREATE DATABASE holdfast TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';"
# The name contains the token of the process. So a pid that the system has used again does not match.
TERMINATE_SESSION = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE pid = %(pid)s AND application_name = %(name)s AND usename = current_user AND pid <> pg_backend_pid()
"""
# The share of DATABASE_TIMEOUT that one attempt to connect may take. By default an attempt and the pause after it take
# five seconds together.
CONNECT_TIMEOUT_SHARE = 0.4
# The share of DATABASE_TIMEOUT that a statement of a session, or of a kept connection, may take. It is less than 1
# because tasks have DATABASE_TIMEOUT as their own timeout, and cancelling a task that waits for a server that hangs
# takes ten seconds more.
ANSWER_TIMEOUT_SHARE = 0.8
# The timeout of a pooled statement, in multiples of DATABASE_TIMEOUT: some statements delete many rows, or wait for a
# lock.
POOLED_STATEMENT_TIMEOUT_FACTOR = 3
# The timeout of statements of interactive commands, and of those that wait for a migration or create tables.
LONG_STATEMENT_TIMEOUT_SECONDS = 3600.0


def connection_parameters(settings: Settings, role: str, *, session: bool = False, generic_plans: bool = False) -> str:
    """The connection string for `role`, a name that pg_stat_activity shows."""
    url = settings.session_url if session else settings.database_url
    if url is None:
        raise DatabaseError("DATABASE_URL is not set: there is no database to connect to.")
    direct = session and settings.direct_database_url is not None
    check_dsn("DIRECT_DATABASE_URL" if direct else "DATABASE_URL", url)
    timeout = max(2, round(settings.database_timeout))
    parameters: dict[str, Any] = {
        "application_name": application_name(settings, role),
        # With another encoding, from PGCLIENTENCODING or the role, text could be refused or misread.
        "client_encoding": "UTF8",
        # Shorter than the other timeouts: an attempt that hangs at the old primary delays the one at the new primary.
        "connect_timeout": max(2, round(CONNECT_TIMEOUT_SHARE * settings.database_timeout)),
        "keepalives_idle": timeout,
        "keepalives_interval": max(1, timeout // 3),
        "keepalives_count": 3,
        "tcp_user_timeout": timeout * 1000,
    }
    if not (settings.pgbouncer and not session):
        parameters["options"] = startup_options(settings, GENERIC_PLANS if generic_plans else {})
    return make_conninfo(url, **parameters)


async def open_session(
    settings: Settings,
    role: str,
    *,
    generic_plans: bool = False,
    answer_timeout: float | None = None,
    on_no_answer: Callable[[], Awaitable[None]] | None = None,
) -> TimedAsyncConnection:
    """Open a connection outside the pool, in autocommit. The caller closes it. `generic_plans`: see
    `db/generic_plans.py`.

    `answer_timeout`: seconds that a statement may take; ANSWER_TIMEOUT_SHARE of DATABASE_TIMEOUT if None.
    `on_no_answer`: see `db/answer_timeout.py`.
    """
    direct = settings.session_url is not None
    connection = await TimedAsyncConnection.connect(
        connection_parameters(settings, role, session=direct, generic_plans=generic_plans),
        autocommit=True,
        row_factory=dict_row,
        prepare_threshold=1 if direct else None,
        answer_timeout=answer_timeout or ANSWER_TIMEOUT_SHARE * settings.database_timeout,
        on_no_answer=on_no_answer,
        context=ADAPTERS,
    )
    try:
        await (_set_session if direct else _begin_explicitly)(connection)
    except BaseException:
        connection.pgconn.finish()
        raise
    return connection


async def terminate_session(connection: AsyncConnection[DictRow], pid: int, name: str) -> None:
    """Terminate an earlier session of this process, if it still exists. The server then rolls back a transaction that
    it has not begun to commit. Behind PgBouncer, and where the role may not do it, this does nothing."""
    with suppress(psycopg.errors.InsufficientPrivilege):
        await connection.execute(TERMINATE_SESSION, {"pid": pid, "name": name})


def open_blocking_session(settings: Settings, role: str) -> Connection[DictRow]:
    """Open a blocking connection, for a plain thread. Execute its statements inside `with_session_options`."""
    direct = settings.session_url is not None
    connection = TimedConnection.connect(
        connection_parameters(settings, role, session=direct),
        autocommit=True,
        row_factory=dict_row,
        prepare_threshold=1 if direct else None,
        answer_timeout=ANSWER_TIMEOUT_SHARE * settings.database_timeout,
        context=ADAPTERS,
    )
    try:
        if not direct:
            connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
        else:
            connection.execute(session_statement(connection.info.server_version))
    except BaseException:
        connection.pgconn.finish()
        raise
    return connection


@contextmanager
def with_session_options(connection: Connection[DictRow], settings: Settings) -> Iterator[None]:
    """Use a blocking session. Behind PgBouncer the block is one transaction that sets the options of a session."""
    if settings.session_url is not None:
        yield
        return
    with connection.transaction():
        connection.execute(transaction_options(settings))
        yield


def check_server(connection: Connection[Any], name: str) -> None:
    """Raise DatabaseError for a server that is older than Holdfast supports, and for a database whose encoding is not
    UTF-8. `name` is the variable that holds the URL."""
    if connection.info.server_version < MINIMUM_SERVER:
        version = connection.info.server_version // 10000
        raise DatabaseError(f"{name} leads to PostgreSQL {version}: Holdfast needs 14 or later.")
    if (problem := encoding_problem(connection.info)) is not None:
        raise DatabaseError(f"{name} leads to a database {problem} Create another: {CREATE_DATABASE}")


def encoding_problem(info: ConnectionInfo) -> str | None:
    """Describe the problem if the encoding of a database is not UTF8; else None. SQL_ASCII accepts bytes that are not
    text, and other encodings lack most characters. A pooler may not report the encoding: this is accepted."""
    encoding = info.parameter_status("server_encoding")
    if encoding in (None, "UTF8"):
        return None
    return f"whose encoding is {encoding}: Holdfast needs UTF8, for text is in every language."


async def _set_session(connection: AsyncConnection[Any]) -> None:
    await connection.execute(session_statement(connection.info.server_version))


async def _begin_explicitly(connection: AsyncConnection[Any]) -> None:
    """Name the isolation level in each BEGIN: behind PgBouncer the default of a session cannot be set."""
    await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)


async def _no_reset(_: AsyncConnection[Any]) -> None:
    """A reset hook that does nothing. With a hook, the pool takes connections back in a separate task. Without one, it
    does so in the task that used the connection. If that task is cancelled repeatedly, as anyio does with the stream of
    a client that has disconnected, the connection is lost, and the pool stays one smaller for ever."""


class Database:
    """The pool of one process."""

    def __init__(self, settings: Settings, role: str, *, long_statements: bool = False) -> None:
        """`long_statements`: statements may take an hour, for interactive commands."""
        self.settings = settings
        self._role = role
        # All open connections of the process, in use or idle, that this object has opened.
        self._opened: WeakSet[TimedAsyncConnection] = WeakSet()
        self._close_task: asyncio.Task[None] | None = None
        answer_timeout = POOLED_STATEMENT_TIMEOUT_FACTOR * settings.database_timeout
        if long_statements:
            answer_timeout = LONG_STATEMENT_TIMEOUT_SECONDS
        pool = ReconnectingPool(
            connection_parameters(settings, role),
            connection_class=TimedAsyncConnection,
            min_size=settings.pool_min,
            max_size=settings.pool_max,
            timeout=settings.database_timeout,
            # Never give up. Otherwise the pool would stay smaller after an outage.
            reconnect_timeout=math.inf,
            # One worker for each connection, because opening one may take DATABASE_TIMEOUT, and one that takes back
            # returned connections.
            num_workers=settings.pool_max + 1,
            kwargs={
                "autocommit": True,
                "row_factory": dict_row,
                "prepare_threshold": None if settings.pgbouncer else 2,
                "answer_timeout": answer_timeout,
                "on_no_answer": self.replace_connections,
                "context": ADAPTERS,
            },
            configure=self._configure,
            check=None,
            reset=_no_reset,
            open=False,
            name=role,
        )
        self._pool: AsyncConnectionPool[TimedAsyncConnection] = pool
        self._waits_since = pool.waits_since
        self._replaced_at = -math.inf
        self._scope = transaction_options(settings) if settings.pgbouncer else None

    async def open(self) -> None:
        """Open the pool. Raises DatabaseUnavailable if the server does not answer within DATABASE_TIMEOUT."""
        await self._pool.open()
        try:
            await self._pool.wait(timeout=self.settings.database_timeout)
        except PoolTimeout as error:
            await self._pool.close()
            raise DatabaseUnavailable(
                f"The database did not answer within DATABASE_TIMEOUT={self.settings.database_timeout:g} seconds."
            ) from error

    async def close(self) -> None:
        if self._close_task is not None:
            await cancel_all([self._close_task])
        await self._pool.close(timeout=5)

    @property
    def pool(self) -> AsyncConnectionPool[TimedAsyncConnection]:
        return self._pool

    def longest_wait(self) -> float:
        """The seconds that the longest waiting request has waited for a connection of the pool; 0 if none waits."""
        waiting = list(self._waits_since.values())
        return time.monotonic() - waiting[0] if waiting else 0.0

    async def session(self, role: str) -> TimedAsyncConnection:
        """Open a session with `open_session`. If the server does not answer a statement on it, the process replaces its
        other connections. `replace_connections` checks this session as well."""
        session = await open_session(self.settings, role, on_no_answer=self.replace_connections)
        self._opened.add(session)
        return session

    async def replace_connections(self) -> None:
        """Replace the connections of the process after the server has not answered one of them. The others may lead to
        the same server that hangs, and each would wait for its own timeout.

        The pool replaces idle connections at once, and those in use when they are returned. Meanwhile a task asks the
        server, until it answers, which of the connections it will never answer, and closes those."""
        now = time.monotonic()
        # This is the shortest timeout. If two timeouts are reported within less, the second wait began before the first
        # was reported, so its connection has been dealt with already.
        if now - self._replaced_at < ANSWER_TIMEOUT_SHARE * self.settings.database_timeout or self._pool.closed:
            return
        self._replaced_at = now
        if self._close_task is None or self._close_task.done():
            self._close_task = asyncio.create_task(self._close_dead_connections(), name="database.suspect")
        await self._pool.drain()

    async def _close_dead_connections(self) -> None:
        # Over a separate connection: statements that wait may be using the whole pool.
        backoff = Backoff(None, None, cap=RECONNECT_MAX_PAUSE_SECONDS)
        while True:
            try:
                async with await TimedAsyncConnection.connect(
                    connection_parameters(self.settings, self._role),
                    autocommit=True,
                    row_factory=dict_row,
                    answer_timeout=CONNECT_TIMEOUT_SHARE * self.settings.database_timeout,
                ) as asking:
                    closed = await close_dead_connections(list(self._opened), asking)
                break
            except (psycopg.Error, OSError) as error:
                await backoff.failed(error)
        if closed:
            log.warning("database.hung_up", connections=len(closed))

    async def _configure(self, connection: TimedAsyncConnection) -> None:
        self._opened.add(connection)
        await (_begin_explicitly if self.settings.pgbouncer else _set_session)(connection)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A connection for single statements, each its own transaction (one transaction behind PgBouncer).

        If the server has closed the connection, the first statement fails with psycopg.OperationalError, and the pool
        replaces the connection when it is returned. The caller decides whether the statement may be repeated.
        """
        async with self._pool.connection() as connection:
            if self._scope is None:
                yield connection
            else:
                async with connection.transaction():
                    await connection.execute(self._scope)
                    yield connection

    @asynccontextmanager
    async def pipelined_transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A transaction in one round trip, BEGIN and COMMIT included. It commits at the end of the block, and rolls
        back on any exception. The results of its statements can be read after the block."""
        async with self._pool.connection() as connection, buffered_pipeline(connection):
            await connection.execute("BEGIN" if self._scope is None else BEGIN)
            if self._scope is not None:
                await connection.execute(self._scope)
            yield connection
            await connection.execute("COMMIT")

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A connection inside a transaction, which commits at the end of the block, and rolls back on any exception."""
        async with self._pool.connection() as connection, connection.transaction():
            if self._scope is not None:
                await connection.execute(self._scope)
            yield connection

    @asynccontextmanager
    async def long_transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A transaction whose statements may take LONG_STATEMENT_TIMEOUT_SECONDS."""
        async with self._pool.connection() as connection:
            limit, connection.answer_timeout = connection.answer_timeout, LONG_STATEMENT_TIMEOUT_SECONDS
            try:
                async with connection.transaction():
                    if self._scope is not None:
                        await connection.execute(self._scope)
                    yield connection
            finally:
                connection.answer_timeout = limit
