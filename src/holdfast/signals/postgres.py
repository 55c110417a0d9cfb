"""Signals over LISTEN/NOTIFY.

Hints are not sent in the transactions that they announce: a NOTIFY in a transaction makes all such commits of the
server queue behind one lock. One separate statement sends all unsent hints.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import DictRow

from holdfast.db.arrays import texts
from holdfast.db.connect import Database
from holdfast.db.kept_connection import KeptConnection
from holdfast.signals import Topic
from holdfast.signals.carrier import Carrier, Hint

NOTIFY = "SELECT pg_notify(hint.channel, hint.payload) FROM unnest(%b::text[], %b::text[]) AS hint(channel, payload)"
TOPICS: tuple[Topic, ...] = ("work", "cancel", "events", "webhooks")


class PostgresSignals(Carrier):
    """One listening session and one sending task for each process. Every process receives all hints."""

    # A little less than the maximum of NOTIFY, 7999 bytes.
    max_payload = 7900

    def __init__(self, database: Database) -> None:
        # A ping is a statement on the database, so idle processes should send few.
        super().__init__(database.settings, database.settings.signal_ping or 15.0)
        self._database = database
        self._session: AsyncConnection[DictRow] | None = None
        self._sender = KeptConnection(database, others=1)

    async def _run(self) -> None:
        try:
            await super()._run()
        finally:
            await self._sender.release()

    def _channel(self, topic: Topic | None) -> str:
        return f"{self._settings.db_schema}_{topic or self._name}"

    def follow(self, thread_id: UUID, on_subscribed: Callable[[], None]) -> None:
        """Does nothing: every process receives all hints."""

    def unfollow(self, thread_id: UUID) -> None:
        """Does nothing, see `follow`."""

    @property
    def _can_receive(self) -> bool:
        return self._settings.session_url is not None

    @property
    def _transport_errors(self) -> tuple[type[BaseException], ...]:
        return (psycopg.Error, OSError)  # OSError includes TimeoutError.

    @property
    def _send_timeout(self) -> float:
        # Other tasks may be waiting for the pool's connections.
        return self._settings.database_timeout

    async def _send(self, hints: list[Hint]) -> None:
        parameters = texts([self._channel(hint.topic) for hint in hints]), texts([hint.payload for hint in hints])
        async with self._sender.connection() as connection:
            await connection.execute(NOTIFY, parameters)

    async def _receive(self) -> None:
        topics: dict[str, Topic | None] = {
            self._channel(topic): topic for topic in (*TOPICS, None) if topic is None or topic in self._listeners
        }
        async with await self._database.session("signals") as connection:
            self._session = connection
            # Handles notifications that arrive together with the answer to a statement.
            connection.add_notify_handler(lambda notify: self._received(topics[notify.channel], notify.payload))
            try:
                for channel in topics:
                    await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                self._connected()
                await self._read_notifications(connection, topics)
            finally:
                self._session = None

    async def _read_notifications(self, connection: AsyncConnection[DictRow], topics: dict[str, Topic | None]) -> None:
        """Read notifications until the connection breaks.

        This keeps one reader on the socket. psycopg's `notifies` adds and removes a reader for each notification, which
        costs several times as much as the notification itself, and wakes up ten times a second.
        """
        received = connection.pgconn
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def read_available() -> None:
            if over.done():
                return
            try:
                received.consume_input()
                while (hint := received.notifies()) is not None:
                    self._received(topics[hint.relname.decode()], hint.extra)
            except Exception as error:
                over.set_exception(error)

        # libpq closes its descriptor as soon as the server closes the connection. The process may reuse its number for
        # another socket before this task runs again. The duplicate is closed only here.
        descriptor = os.dup(received.socket)
        loop.add_reader(descriptor, read_available)
        try:
            await over
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def _end_connection(self) -> None:
        # A cancel would send a request to the server, which does not answer. Shutting down the socket does not.
        if self._session is not None:
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self._session.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
