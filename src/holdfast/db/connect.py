"""Connections to Postgres: how each kind is opened, and the pool of a process.

Three kinds exist. *Pooled* connections serve requests and reads. A *session* belongs to one part of
a process for as long as it lives (journal, LISTEN, heartbeat, leadership). Both find Holdfast's
tables by `search_path`, never by writing the schema into a statement, because the stock LangGraph
saver's statements name their tables bare.

Behind PgBouncer in transaction mode a session's settings do not stick to the client, so there
every use is a transaction that begins with SET LOCAL, and nothing is prepared.

Each wait for the server has a limit on this side (`db/bounded.py`). After an outage a process connects again within
RECONNECT_SECONDS of the server's return. When a server does not answer one connection, the others of the process are
looked at as well (`Database.suspect`).
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
from psycopg_pool.pool_async import AddConnection, MaintenanceTask

from holdfast.db.adapters import ADAPTERS
from holdfast.db.bounded import BoundedAsyncConnection, BoundedConnection
from holdfast.db.dsn import check_dsn
from holdfast.db.pipelines import gathered
from holdfast.db.plans import PLANNED_ONCE
from holdfast.db.session_names import application_name
from holdfast.db.session_options import BEGIN, session_statement, startup_options, transaction_options
from holdfast.db.time_limit import stopped_clock
from holdfast.db.unanswered import hang_up_unanswered
from holdfast.errors import DatabaseError, DatabaseUnavailable
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.settings import Settings
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

MINIMUM_SERVER = 140000
CREATE_DATABASE = "CREATE DATABASE holdfast TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C';"
# The name has the token of the process, so a pid that is used again is not mistaken.
END_SESSION = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE pid = %(pid)s AND application_name = %(name)s AND usename = current_user AND pid <> pg_backend_pid()
"""
# Of DATABASE_TIMEOUT: how long one attempt to connect may take. With the pause before the next it is five seconds.
CONNECT_SHARE = 0.4
# Of DATABASE_TIMEOUT: how long a statement of a session, or of a kept connection, may take. Less than all of it: tasks
# have DATABASE_TIMEOUT as their timeout, and to cancel a statement of a server that hangs takes ten seconds more.
ANSWER_SHARE = 0.8
# Seconds between two attempts of the pool to connect, at most.
RECONNECT_SECONDS = 1.0
# A pooled statement may take this many times DATABASE_TIMEOUT: some delete much, or wait for a lock.
STATEMENT_TIMES = 3
# Seconds for statements of commands that a person waits for, and for those that wait for a migration or make tables.
LONG_STATEMENT_SECONDS = 3600.0


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
        # PGCLIENTENCODING, or a setting of the role, would make text unwritable or read as something else.
        "client_encoding": "UTF8",
        # Shorter than the other waits: an attempt that hangs at the old primary delays the one at the new primary.
        "connect_timeout": max(2, round(CONNECT_SHARE * settings.database_timeout)),
        "keepalives_idle": timeout,
        "keepalives_interval": max(1, timeout // 3),
        "keepalives_count": 3,
        "tcp_user_timeout": timeout * 1000,
    }
    if not (settings.pgbouncer and not session):
        parameters["options"] = startup_options(settings, PLANNED_ONCE if planned_once else {})
    return make_conninfo(url, **parameters)


async def open_session(
    settings: Settings,
    role: str,
    *,
    planned_once: bool = False,
    answer_timeout: float | None = None,
    on_silence: Callable[[], Awaitable[None]] | None = None,
) -> BoundedAsyncConnection:
    """A connection of one's own, in autocommit. The caller closes it. `planned_once`: see `db/plans.py`.

    `answer_timeout`: seconds that a statement may take; ANSWER_SHARE of DATABASE_TIMEOUT if None. `on_silence`: see
    `db/bounded.py`.
    """
    direct = settings.session_url is not None
    connection = await BoundedAsyncConnection.connect(
        connection_parameters(settings, role, session=direct, planned_once=planned_once),
        autocommit=True,
        row_factory=dict_row,
        prepare_threshold=1 if direct else None,
        answer_timeout=answer_timeout or ANSWER_SHARE * settings.database_timeout,
        on_silence=on_silence,
        context=ADAPTERS,
    )
    try:
        await (_set_session if direct else _begin_explicitly)(connection)
    except BaseException:
        connection.pgconn.finish()
        raise
    return connection


async def end_session(connection: AsyncConnection[DictRow], pid: int, name: str) -> None:
    """End an earlier session of this process, if it is still there: whatever it has not begun to commit is not done.
    Behind PgBouncer, and where the server does not permit it, this does nothing."""
    with suppress(psycopg.errors.InsufficientPrivilege):
        await connection.execute(END_SESSION, {"pid": pid, "name": name})


def open_blocking_session(settings: Settings, role: str) -> Connection[DictRow]:
    """The same for a plain thread. Its statements belong into `scoped`."""
    direct = settings.session_url is not None
    connection = BoundedConnection.connect(
        connection_parameters(settings, role, session=direct),
        autocommit=True,
        row_factory=dict_row,
        prepare_threshold=1 if direct else None,
        answer_timeout=ANSWER_SHARE * settings.database_timeout,
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
def scoped(connection: Connection[DictRow], settings: Settings) -> Iterator[None]:
    """Use a blocking session. Behind PgBouncer it is one transaction, with the options that a session would have."""
    if settings.session_url is not None:
        yield
        return
    with connection.transaction():
        connection.execute(transaction_options(settings))
        yield


def check_server(connection: Connection[Any], name: str) -> None:
    """Refuse a server older than Holdfast supports, and a database that does not keep text as UTF-8. `name` is the
    variable that leads there."""
    if connection.info.server_version < MINIMUM_SERVER:
        version = connection.info.server_version // 10000
        raise DatabaseError(f"{name} leads to PostgreSQL {version}: Holdfast needs 14 or later.")
    if (problem := encoding_problem(connection.info)) is not None:
        raise DatabaseError(f"{name} leads to a database {problem} Create another: {CREATE_DATABASE}")


def encoding_problem(info: ConnectionInfo) -> str | None:
    """What is wrong with the encoding of a database, if it is not UTF8. SQL_ASCII takes any bytes and knows no
    characters; others lack most characters. Behind a pooler that does not tell, it is not known."""
    encoding = info.parameter_status("server_encoding")
    if encoding in (None, "UTF8"):
        return None
    return f"whose encoding is {encoding}: Holdfast needs UTF8, for text is in every language."


async def _set_session(connection: AsyncConnection[Any]) -> None:
    await connection.execute(session_statement(connection.info.server_version))


async def _begin_explicitly(connection: AsyncConnection[Any]) -> None:
    """Let each transaction say of which kind it is: behind PgBouncer a session's defaults cannot be set."""
    await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)


async def _as_it_is(_: AsyncConnection[Any]) -> None:
    """There is nothing to reset. But a pool with this hook takes connections back in a task of its own, and without it
    in that of whoever had one: when that is being cancelled, again and again as anyio does it to the stream of a client
    that has gone, the connection is lost, and its place in the pool for good."""


class _Pool(AsyncConnectionPool[BoundedAsyncConnection]):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # Since when somebody waits for a connection, the longest first. Read by other threads, too.
        self.waits_since: dict[object, float] = {}

    async def schedule_task(self, task: MaintenanceTask, delay: float) -> None:
        """psycopg doubles the pause after each attempt to connect that failed, and after an outage of 40 seconds the
        pool would stay empty for many more."""
        await super().schedule_task(task, min(delay, RECONNECT_SECONDS) if isinstance(task, AddConnection) else delay)

    async def getconn(self, timeout: float | None = None) -> BoundedAsyncConnection:
        request = object()
        self.waits_since[request] = time.monotonic()
        try:
            with stopped_clock():
                return await super().getconn(timeout)
        finally:
            del self.waits_since[request]


class Database:
    """The pool of one process."""

    def __init__(self, settings: Settings, role: str, *, long: bool = False) -> None:
        """`long`: statements may take an hour, for commands that a person waits for."""
        self.settings = settings
        self._role = role
        # All connections of the process that were opened here and are not closed, those in use among them.
        self._opened: WeakSet[BoundedAsyncConnection] = WeakSet()
        self._search: asyncio.Task[None] | None = None
        # What the process counts. Here because every part of a process has its database at hand, and there is one.
        self.metrics = Metrics(enabled=settings.metrics)
        pool = _Pool(
            connection_parameters(settings, role),
            connection_class=BoundedAsyncConnection,
            min_size=settings.pool_min,
            max_size=settings.pool_max,
            timeout=settings.database_timeout,
            # Never give up: the pool would stay smaller.
            reconnect_timeout=math.inf,
            # One for each connection, because opening one may take DATABASE_TIMEOUT, and one for those given back.
            num_workers=settings.pool_max + 1,
            kwargs={
                "autocommit": True,
                "row_factory": dict_row,
                "prepare_threshold": None if settings.pgbouncer else 2,
                "answer_timeout": LONG_STATEMENT_SECONDS if long else STATEMENT_TIMES * settings.database_timeout,
                "on_silence": self.suspect,
                "context": ADAPTERS,
            },
            configure=self._configure,
            check=None,
            reset=_as_it_is,
            open=False,
            name=role,
        )
        self._pool: AsyncConnectionPool[BoundedAsyncConnection] = pool
        self._waits_since = pool.waits_since
        self._suspected_at = -math.inf
        self._scope = transaction_options(settings) if settings.pgbouncer else None

    async def open(self) -> None:
        """Connect. Raises DatabaseUnavailable when the server cannot be reached in time."""
        await self._pool.open()
        try:
            await self._pool.wait(timeout=self.settings.database_timeout)
        except PoolTimeout as error:
            await self._pool.close()
            raise DatabaseUnavailable(
                f"The database did not answer within DATABASE_TIMEOUT={self.settings.database_timeout:g} seconds."
            ) from error

    async def close(self) -> None:
        if self._search is not None:
            await cancel_all([self._search])
        await self._pool.close(timeout=5)

    @property
    def pool(self) -> AsyncConnectionPool[BoundedAsyncConnection]:
        return self._pool

    def longest_wait(self) -> float:
        """For how many seconds somebody has waited for a connection of the pool; 0 if nobody does."""
        waiting = list(self._waits_since.values())
        return time.monotonic() - waiting[0] if waiting else 0.0

    async def session(self, role: str) -> BoundedAsyncConnection:
        """A session of this process, as `open_session` opens one. If a statement on it is not answered, the server is
        suspected, and if another statement is not answered, the session is looked at as well."""
        session = await open_session(self.settings, role, on_silence=self.suspect)
        self._opened.add(session)
        return session

    async def suspect(self) -> None:
        """A connection of the process was not answered, so that others may lead to a server that hangs, too. Each would
        cost somebody the time to notice. Idle connections of the pool are replaced at once, the others when they are
        returned. Meanwhile the server is asked, until it answers, which of them it will never answer; those are hung
        up."""
        now = time.monotonic()
        # No silence is noticed sooner. If two are noticed within less, the second began before the first was noticed.
        if now - self._suspected_at < ANSWER_SHARE * self.settings.database_timeout or self._pool.closed:
            return
        self._suspected_at = now
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._hang_up_unanswered(), name="database.suspect")
        await self._pool.drain()

    async def _hang_up_unanswered(self) -> None:
        # By a connection of its own: all of the pool may be in use by those that wait.
        backoff = Backoff(None, None, cap=RECONNECT_SECONDS)
        while True:
            try:
                async with await BoundedAsyncConnection.connect(
                    connection_parameters(self.settings, self._role),
                    autocommit=True,
                    row_factory=dict_row,
                    answer_timeout=CONNECT_SHARE * self.settings.database_timeout,
                ) as asking:
                    found = await hang_up_unanswered(list(self._opened), asking)
                break
            except (psycopg.Error, OSError) as error:
                await backoff.failed(error)
        if found:
            log.warning("database.hung_up", connections=len(found))

    async def _configure(self, connection: BoundedAsyncConnection) -> None:
        self._opened.add(connection)
        await (_begin_explicitly if self.settings.pgbouncer else _set_session)(connection)

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
            await connection.execute("BEGIN" if self._scope is None else BEGIN)
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

    @asynccontextmanager
    async def long_transaction(self) -> AsyncIterator[AsyncConnection[DictRow]]:
        """The same, and its statements may take an hour."""
        async with self._pool.connection() as connection:
            limit, connection.answer_timeout = connection.answer_timeout, LONG_STATEMENT_SECONDS
            try:
                async with connection.transaction():
                    if self._scope is not None:
                        await connection.execute(self._scope)
                    yield connection
            finally:
                connection.answer_timeout = limit
