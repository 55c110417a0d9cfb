"""Signals over LISTEN/NOTIFY.

Hints are sent apart from the transactions they announce: a NOTIFY inside a transaction makes every commit of the
whole server queue behind one lock. One statement sends all that wait.
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
    """One listening session and one sending task per process. Every process has every hint."""

    # What NOTIFY takes, less a little.
    max_payload = 7900

    def __init__(self, database: Database) -> None:
        # A ping is a statement, and an idle process sends few.
        super().__init__(database.settings, database.settings.signal_ping or 15.0)
        self._database = database
        self._session: AsyncConnection[DictRow] | None = None
        self._sender = KeptConnection(database, others=1)

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            await self._sender.release()

    def _channel(self, topic: Topic | None) -> str:
        return f"{self._settings.db_schema}_{topic or self._name}"

    def follow(self, thread_id: UUID, joined: Callable[[], None]) -> None:
        """All hints come anyway."""

    def unfollow(self, thread_id: UUID) -> None:
        """See `follow`."""

    @property
    def _can_receive(self) -> bool:
        return self._settings.session_url is not None

    @property
    def _failures(self) -> tuple[type[BaseException], ...]:
        return (psycopg.Error, OSError)  # Which TimeoutError is one of.

    @property
    def _send_patience(self) -> float:
        # There may be a queue for the pool's connections.
        return self._settings.database_timeout

    async def _send(self, hints: list[Hint]) -> None:
        told = texts([self._channel(hint.topic) for hint in hints]), texts([hint.payload for hint in hints])
        async with self._sender.connection() as connection:
            await connection.execute(NOTIFY, told)

    async def _receive(self) -> None:
        topics: dict[str, Topic | None] = {
            self._channel(topic): topic for topic in (*TOPICS, None) if topic is None or topic in self._listeners
        }
        async with await self._database.session("signals") as connection:
            self._session = connection
            # What comes together with the answer to a statement.
            connection.add_notify_handler(lambda notify: self._received(topics[notify.channel], notify.payload))
            try:
                for channel in topics:
                    await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                self._joined()
                await self._hear(connection, topics)
            finally:
                self._session = None

    async def _hear(self, connection: AsyncConnection[DictRow], topics: dict[str, Topic | None]) -> None:
        """Take in what comes until the connection breaks.

        The connection is watched all the time. psycopg's `notifies` begins to watch it for each hint and ends it
        afterwards, which costs several times as much as the hint, and looks ten times a second whether it should go on.
        """
        received = connection.pgconn
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def take_in() -> None:
            if over.done():
                return
            try:
                received.consume_input()
                while (hint := received.notifies()) is not None:
                    self._received(topics[hint.relname.decode()], hint.extra)
            except Exception as error:
                over.set_exception(error)

        # libpq closes its descriptor as soon as the server is gone, and the process may give the number to another
        # socket before this task runs again. The duplicate is closed here alone.
        descriptor = os.dup(received.socket)
        loop.add_reader(descriptor, take_in)
        try:
            await over
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def _hang_up(self) -> None:
        # Cancelling would ask the server first, and it does not answer. This is as if it had hung up.
        if self._session is not None:
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self._session.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
