"""The journal's session with Postgres: opened when it is needed, and closed after a failure."""

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

# Of the lease: how long a commit may take.
COMMIT_TIMEOUT_LEASE_SHARE = 0.9
# How long a group may wait for a lock. Behind PgBouncer, where a session cannot be set, it may for as long as a commit
# may take.
SET_GROUP_LOCK_TIMEOUT = "SET lock_timeout = '2s'"


class JournalSession:
    """At most one connection at a time."""

    def __init__(self, settings: Settings) -> None:
        self.missing = True
        """Whether there has been no session yet, or the last attempt to open one failed."""
        self.on_found: Callable[[], None] = lambda: None
        """Called when it is no longer `missing`."""
        self._settings = settings
        self._connection: TimedAsyncConnection | None = None
        # Of the last session there was.
        self._backend_pid: int | None = None

    async def connection(self) -> AsyncConnection[DictRow]:
        """The session that is open, or a new one."""
        if self._connection is None or self._connection.closed:
            # Before the timeout of a commit: cancelling a statement of a server that hangs takes ten seconds more.
            limit = COMMIT_TIMEOUT_LEASE_SHARE * self._settings.lease
            try:
                connection = await open_session(self._settings, "journal", generic_plans=True, answer_timeout=limit)
            except BaseException:
                self.missing = True
                raise
            if self._backend_pid is not None:
                # The session before this one may have a commit still to do, such as one that a network delivers late.
                # It would undo what is written meanwhile.
                try:
                    await terminate_session(connection, self._backend_pid, application_name(self._settings, "journal"))
                except BaseException:
                    await connection.close()
                    raise
            self._connection, self._backend_pid = connection, connection.info.backend_pid
            if self._settings.session_url is not None:
                await connection.execute(SET_GROUP_LOCK_TIMEOUT)
            if self.missing:
                self.missing = False
                self.on_found()
        return self._connection

    async def answers(self) -> bool:
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
                # Not a plain ROLLBACK: after a pipeline was cut short, psycopg believes in prepared statements that the
                # server has never seen. This forgets them, too.
                await self._connection.rollback()
            except (psycopg.Error, OSError):
                await self.close()

    def shut_down(self) -> None:
        """The server did not answer somebody else. Do not wait for it on this connection: after a fail-over it leads to
        the old server."""
        if self._connection is not None:
            self._connection.shut_down()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()
