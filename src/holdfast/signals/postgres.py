"""Signals over LISTEN/NOTIFY.

Hints are sent apart from the transactions they announce: a NOTIFY inside a transaction makes every commit of the
whole server queue behind one lock. One statement sends all that wait.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

import psycopg
import structlog
from psycopg import AsyncConnection, sql
from psycopg.rows import DictRow

from holdfast.db.connect import Database, open_session
from holdfast.signals import Listener, Topic
from holdfast.telemetry.backoff import Backoff

log = structlog.get_logger(__name__)

NOTIFY = "SELECT pg_notify(hint.channel, hint.payload) FROM unnest(%s::text[], %s::text[]) AS hint(channel, payload)"
TOPICS: tuple[Topic, ...] = ("work", "cancel", "events")
# What NOTIFY takes, less a little.
MAX_PAYLOAD = 7900


class PostgresSignals:
    """One listening session and one sending task per process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._settings = database.settings
        self._listeners: dict[Topic, list[Listener]] = defaultdict(list)
        self._waiting: list[tuple[str, str]] = []
        self._wake = asyncio.Event()

    def listen(self, topic: Topic, listener: Listener) -> None:
        self._listeners[topic].append(listener)

    def publish(self, topic: Topic, payload: str) -> None:
        hint = (self._channel(topic), payload)
        if len(payload.encode()) > MAX_PAYLOAD or hint in self._waiting[-8:]:
            return
        self._waiting.append(hint)
        self._wake.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(), name="signals.send")
            if self._settings.session_url is not None and self._listeners:
                tasks.create_task(self._receive(), name="signals.receive")

    def _channel(self, topic: Topic) -> str:
        return f"{self._settings.db_schema}_{topic}"

    def _missed(self) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener(None)

    async def _send(self) -> None:
        backoff = Backoff("signals.outage", "signals.recovered")
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            try:
                async with self._database.connection() as connection:
                    await connection.execute(NOTIFY, ([hint[0] for hint in waiting], [hint[1] for hint in waiting]))
            except (psycopg.Error, OSError) as error:
                # The hints are lost, which they may be. What they announced is found by polling.
                await backoff.failed(error)
            else:
                backoff.succeeded()

    async def _receive(self) -> None:
        backoff = Backoff("signals.degraded", "signals.restored")
        while True:
            try:
                async with await open_session(self._settings, "signals") as connection:
                    await self._follow(connection, backoff)
            except (psycopg.Error, OSError) as error:
                await backoff.failed(error)

    async def _follow(self, connection: AsyncConnection[DictRow], backoff: Backoff) -> None:
        topics = {self._channel(topic): topic for topic in TOPICS if topic in self._listeners}
        for channel in topics:
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        backoff.succeeded()
        self._missed()
        async for notify in connection.notifies():
            for listener in self._listeners[topics[notify.channel]]:
                listener(notify.payload)
        raise psycopg.OperationalError("the listening session has ended")
