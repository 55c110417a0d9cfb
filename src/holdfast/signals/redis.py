"""Signals over Redis pub/sub. A process has one connection to receive and one to send, for any number of watchers.

Each thread has a channel for its hints, so a web process receives only the hints of threads that it watches. On a
Cluster, all channels of an installation are in one slot. So one receiving connection is enough, and with sharded
pub/sub (Redis 7) the hints stay within one shard. Before Redis 7, the nodes forward all hints to each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import RedisError, ResponseError

from holdfast.db.connect import Database
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.cancelling import run_together
from holdfast.signals import Topic
from holdfast.signals.carrier import Carrier, Hint
from holdfast.signals.redis_nodes import open_connection
from holdfast.signals.redis_url import RedisTarget

# Identifies the database independent of its host name. Two installations may share a Redis, and if one was restored
# from a dump of the other, their threads have the same ids.
IDENTIFY = """
SELECT system_identifier || ' ' || (SELECT oid FROM pg_database WHERE datname = current_database()) AS identity
FROM pg_control_system()
"""
# For roles that may not execute pg_control_system, as at some providers.
IDENTIFY_BY_NAME = "SELECT datname || ' ' || oid AS identity FROM pg_database WHERE datname = current_database()"

TOPICS: tuple[Topic, ...] = ("work", "cancel", "events", "webhooks")
SUBSCRIBE_BATCH = 500
# OSError includes TimeoutError. The client raises AttributeError when a task sends on a connection that another task
# has just found closed.
FAILURES: tuple[type[BaseException], ...] = (RedisError, OSError, AttributeError)


def channel_prefix(schema: str, identity: str) -> str:
    """The prefix of the names of an installation's channels. `identity` is the result of IDENTIFY."""
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    # The braces put all channels into one slot of a Cluster.
    return f"{{holdfast:{schema}:{digest}}}:"


class RedisSignals(Carrier):
    """Signals over Redis. An unavailable Redis is not an error: processes poll until it is back."""

    max_payload = 256 * 1024

    def __init__(self, database: Database, target: RedisTarget) -> None:
        super().__init__(database.settings, database.settings.signal_ping or 5.0)
        self._database = database
        self._target = target
        self._sharded = target.mode == "cluster"
        self._prefix = ""
        self._sender: AbstractConnection | None = None
        self._unresponsive = asyncio.Event()
        self._sender_is_stale = False
        # The followed threads with their callbacks; the subscribed threads; and those whose subscription may have to
        # change.
        self._followed: dict[str, Callable[[], None]] = {}
        self._subscribed: set[str] = set()
        self._changed: set[str] = set()
        self._change = asyncio.Event()

    # --- the interface ----------------------------------------------------------------------------

    def follow(self, thread_id: UUID, on_subscribed: Callable[[], None]) -> None:
        self._followed[str(thread_id)] = on_subscribed
        self._changed.add(str(thread_id))
        self._change.set()

    def unfollow(self, thread_id: UUID) -> None:
        del self._followed[str(thread_id)]
        self._changed.add(str(thread_id))
        self._change.set()

    async def _run(self) -> None:
        await self._read_identity()
        try:
            await super()._run()
        finally:
            await self._drop_sender()

    # --- the carrier's part -----------------------------------------------------------------------

    @property
    def _transport_errors(self) -> tuple[type[BaseException], ...]:
        return FAILURES

    @property
    def _log_fields(self) -> dict[str, Any]:
        return {"redis": self._target.shown}

    async def _read_identity(self) -> None:
        backoff = Backoff("signals.outage", "signals.recovered")
        while not self._prefix:
            try:
                try:
                    identity = await self._ask_database(IDENTIFY)
                except psycopg.errors.InsufficientPrivilege:
                    identity = await self._ask_database(IDENTIFY_BY_NAME)
            except (psycopg.Error, OSError) as error:
                await backoff.failed(error)
                continue
            self._prefix = channel_prefix(self._settings.db_schema, identity)
            backoff.succeeded()

    async def _ask_database(self, statement: LiteralString) -> str:
        async with self._database.connection() as connection:
            row = await (await connection.execute(statement)).fetchone()
        assert row is not None
        return str(row["identity"])

    def _channel(self, hint: Hint) -> str:
        if hint.topic is None:
            return f"{self._prefix}ping:{self._name}"
        return f"{self._prefix}{hint.topic}" if hint.thread_id is None else f"{self._prefix}events:{hint.thread_id}"

    async def _send(self, hints: list[Hint]) -> None:
        command = "SPUBLISH" if self._sharded else "PUBLISH"
        commands = [(command, self._channel(hint), hint.payload) for hint in hints]
        if self._sender_is_stale:
            await self._drop_sender()
        if self._sender is not None:
            try:
                await self._publish(self._sender, commands)
                return
            except (NotConnected, ResponseError, OSError, AttributeError):
                # The server may have closed the connection long ago, or the slot may have moved. Try a new connection
                # before this counts as an outage.
                await self._drop_sender()
        self._sender = await open_connection(self._target, self._prefix)
        await self._publish(self._sender, commands)

    async def _publish(self, connection: AbstractConnection, commands: list[tuple[str, str, str]]) -> None:
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                await connection.read_response()
        except BaseException:
            self._sender_is_stale = True  # Unread answers may be left on the connection.
            raise

    async def _drop_sender(self) -> None:
        sender, self._sender, self._sender_is_stale = self._sender, None, False
        if sender is not None:
            await sender.disconnect(nowait=True)

    async def _receive(self) -> None:
        connection = await open_connection(self._target, self._prefix)
        self._unresponsive.clear()
        topics: dict[str, Topic | None] = {
            f"{self._prefix}{topic}": topic for topic in TOPICS if topic in self._listeners
        }
        topics[f"{self._prefix}ping:{self._name}"] = None
        try:
            await run_together(
                subscribing=self._subscribe(connection, list(topics)),
                watching=self._fail_when_unresponsive(),
                reading=self._read(connection, topics),
            )
        finally:
            await connection.disconnect(nowait=True)

    async def _fail_when_unresponsive(self) -> None:
        await self._unresponsive.wait()
        raise NotConnected("the server does not answer")

    async def _subscribe(self, connection: AbstractConnection, channels: list[str]) -> None:
        """Keep the subscriptions up to date. Several changes at once become one command."""
        verb = "S" if self._sharded else ""
        self._subscribed, self._changed = set(), set(self._followed)
        while True:
            changed, self._changed = list(self._changed), set()
            self._change.clear()
            for start in range(0, len(changed), SUBSCRIBE_BATCH):
                batch = changed[start : start + SUBSCRIBE_BATCH]
                added = [name for name in batch if name in self._followed and name not in self._subscribed]
                removed = [name for name in batch if name not in self._followed and name in self._subscribed]
                self._subscribed.update(added)
                self._subscribed.difference_update(removed)
                for word, names in (("SUBSCRIBE", added), ("UNSUBSCRIBE", removed)):
                    if names:
                        await connection.send_command(verb + word, *(f"{self._prefix}events:{name}" for name in names))
            if channels:
                # These are the last ones: when Redis confirms them, it has confirmed all followed threads, too.
                await connection.send_command(f"{verb}SUBSCRIBE", *channels)
                channels = []
            await self._change.wait()

    async def _read(self, connection: AbstractConnection, topics: dict[str, Topic | None]) -> None:
        threads = f"{self._prefix}events:"
        last = list(topics)[-1]
        joined = False
        while True:
            try:
                message = await connection.read_response(timeout=math.inf)
            except ResponseError as error:
                if self._sharded and "unknown command" in str(error).lower():
                    self._sharded = False  # A Cluster before Redis 7.
                raise
            kind, channel, payload = message[0], message[1].decode(), message[2]
            name = channel.removeprefix(threads)
            if kind in (b"message", b"smessage"):
                self._received(topics.get(channel, "events"), payload)
            elif kind in (b"subscribe", b"ssubscribe"):
                if channel == last:
                    joined = True
                    self._connected()
                elif joined and (on_subscribed := self._followed.get(name)) is not None:
                    on_subscribed()
            elif kind == b"sunsubscribe" and (channel in topics or name in self._subscribed):
                raise NotConnected("the channels have moved to another node of the Cluster")

    def _end_connection(self) -> None:
        # Replaces both connections: the ping may have been lost on the sending one.
        self._unresponsive.set()
        self._sender_is_stale = True
