"""The journal's session with Postgres: opened when it is needed, closed after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.answer_timeout import TimedAsyncConnection
from holdfast.db.connect import open_session, terminate_session
from holdfast.db.session_names import application_name
from holdfast.settings import Settings

# How long a commit may take, as a part of the lease.
COMMIT_TIMEOUT_LEASE_SHARE = 0.9
# How long a group may wait for a lock. Behind PgBouncer, where a session has no settings, a group may wait for as long
# as a commit may take.
SET_GROUP_LOCK_TIMEOUT = "SET lock_timeout = '2s'"


class JournalSession:
    """At most one connection at a time."""

    def __init__(self, settings: Settings) -> None:
        self.unavailable = True
        """Whether no session was opened yet, or the last attempt to open one failed."""
        self.on_available: Callable[[], None] = lambda: None
        """Called when a session was opened after none was available."""
        self._settings = settings
        self._connection: TimedAsyncConnection | None = None
        # The server process of the last session.
        self._backend_pid: int | None = None

    async def connection(self) -> AsyncConnection[DictRow]:
        """The session that is open, or a new one."""
        if self._connection is None or self._connection.closed:
            # Less than the timeout of a commit: if that is reached, psycopg cancels the statement, which takes ten
            # seconds more on a server that hangs.
            limit = COMMIT_TIMEOUT_LEASE_SHARE * self._settings.lease
            try:
                connection = await open_session(self._settings, "journal", generic_plans=True, answer_timeout=limit)
            except BaseException:
                self.unavailable = True
                raise
            if self._backend_pid is not None:
                # The last session may still get a commit that the network delivers late. It would overwrite what is
                # written meanwhile.
                try:
                    await terminate_session(connection, self._backend_pid, application_name(self._settings, "journal"))
                except BaseException:
                    await connection.close()
                    raise
            self._connection, self._backend_pid = connection, connection.info.backend_pid
            if self._settings.session_url is not None:
                await connection.execute(SET_GROUP_LOCK_TIMEOUT)
            if self.unavailable:
                self.unavailable = False
                self.on_available()
        return self._connection

    async def server_answers(self) -> bool:
        """Whether the server answers on a new connection."""
        try:
            async with asyncio.timeout(self._settings.database_timeout):
                await (await self.connection()).execute("SELECT 1")
        except (psycopg.Error, OSError, TimeoutError):
            await self.close()
            return False
        return True

    async def rollback(self) -> None:
        if self._connection is not None:
            try:
                # Not a plain ROLLBACK: after a broken pipeline psycopg assumes prepared statements that the server has
                # never received. This method forgets them, too.
                await self._connection.rollback()
            except (psycopg.Error, OSError):
                await self.close()

    def shut_down(self) -> None:
        """Break the connection, because the server did not answer on another one. After a fail-over this connection
        may lead to the old server, and waiting for it would take until the timeout."""
        if self._connection is not None:
            self._connection.shut_down()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()
