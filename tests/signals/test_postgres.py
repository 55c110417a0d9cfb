"""Signals over LISTEN/NOTIFY: behaviour that Redis does not share."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
import uvloop
from psycopg_pool import PoolTimeout
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.signals.postgres import PostgresSignals
from tests.signals.rig import process, signal_settings
from tests.support.postgres_proxy import PostgresProxy
from tests.support.records import query
from tests.support.waiting import until_true

TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ '^holdfast signals'
"""


async def test_terminated_listen_session_is_replaced(database: Database, database_url: str) -> None:
    with capture_logs() as logs:
        async with process(signal_settings(database_url)) as one:
            assert len(await query(database, TERMINATE)) == 1
            await until_true(lambda: one.missed >= 1, "listeners are told that hints may be lost")
            await until_true(lambda: not one.signals.degraded, "it is back")
            one.signals.publish("work", "after")
            await until_true(lambda: one.hints("work") == ["after"], "hints come again")
    events = [entry["event"] for entry in logs if entry["event"].startswith("signals.")]
    assert events == ["signals.degraded", "signals.restored"]


class ClosingSession:
    """Does what libpq does when the server closes the connection: closes its socket, then raises.

    A new connection of the same event loop, such as that of an HTTP client, gets the number of its descriptor at once.
    """

    def __init__(self) -> None:
        self._own, self._server = socket.socketpair()
        self.socket = self._own.fileno()
        self.successor: asyncio.Task[Any] | None = None

    def consume_input(self) -> None:
        self._own.close()
        client, _ = socket.socketpair()
        if client.fileno() != self.socket:
            os.dup2(client.fileno(), self.socket)
            client.close()
            client = socket.socket(fileno=self.socket)
        connect = asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=client)
        self.successor = asyncio.ensure_future(connect)
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    def shut_down(self) -> None:
        self._server.close()


def test_listener_survives_reuse_of_its_descriptor(database_url: str) -> None:
    async def listen() -> None:
        signals = PostgresSignals(Database(signal_settings(database_url), "test"))
        session = ClosingSession()
        reading = asyncio.ensure_future(signals._read_notifications(cast(Any, SimpleNamespace(pgconn=session)), {}))
        await asyncio.sleep(0)
        session.shut_down()
        with pytest.raises(psycopg.OperationalError):
            await reading
        assert session.successor is not None
        transport, _ = await session.successor
        transport.close()

    uvloop.run(listen())


KEPT = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ '^holdfast test' AND query ~ 'pg_notify'
  AND pid <> pg_backend_pid()
"""


async def test_sender_keeps_its_connection_and_replaces_a_broken_one(database: Database, database_url: str) -> None:
    async with process(signal_settings(database_url)) as one:
        [kept] = await query(database, KEPT)
        for number in range(20):
            one.signals.publish("work", f"{number}")
            await until_true(lambda: one.hints("work")[-1:] == [f"{number}"], "it arrives")  # noqa: B023
        assert [row["pid"] for row in await query(database, KEPT)] == [kept["pid"]]
        # The pool has two connections. One is kept, the other is free.
        pool = one.signals._database.pool  # type: ignore[attr-defined]
        async with pool.connection():
            with pytest.raises(PoolTimeout):
                await pool.getconn(timeout=0.2)
        await query(database, f"SELECT pg_terminate_backend({kept['pid']})")

        def received_again() -> bool:
            one.signals.publish("work", f"{len(one.hints('work'))}")
            return len(one.hints("work")) > 20

        await until_true(received_again, "hints come again")


async def test_sender_does_not_keep_the_only_connection_of_pool(database_url: str) -> None:
    async with process(signal_settings(database_url, pool_max=1)) as one:
        one.signals.publish("work", "hint")
        await until_true(lambda: one.hints("work") == ["hint"], "it arrives")
        pool = one.signals._database  # type: ignore[attr-defined]
        async with pool.connection() as connection:
            await connection.execute("SELECT 1")


async def test_process_listens_with_one_session_to_its_own_schema(database: Database, database_url: str) -> None:
    async with (
        process(signal_settings(database_url)) as one,
        process(signal_settings(database_url, db_schema="other")) as other,
    ):
        sessions = await query(
            database,
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name LIKE 'holdfast signals%%'",
        )
        assert len(sessions) == 2
        one.signals.publish("work", "mine")
        await until_true(lambda: one.hints("work") == ["mine"], "its own arrives")
        other.signals.publish("work", "other")
        await until_true(lambda: other.hints("work") == ["other"], "and only that")


async def test_process_without_listen_recovers_when_it_can_send(database_url: str) -> None:
    """Behind PgBouncer alone, LISTEN is not possible, so no echo can arrive."""
    async with PostgresProxy(database_url) as network:
        settings = signal_settings(network.url, pgbouncer=True, database_timeout=5)
        async with process(settings, wait=False) as one:

            def is_degraded(degraded: bool) -> bool:
                one.signals.publish("work", "hint")
                return one.signals.degraded is degraded

            network.cut()
            await until_true(lambda: is_degraded(True), "sending fails")
            network.restore()
            await until_true(lambda: is_degraded(False), "sending works")
            assert one.hints("work") == []


async def test_hint_that_arrives_with_answer_to_statement_is_received(database_url: str) -> None:
    """This happens with a hint that is sent while the process executes LISTEN for its second channel."""
    async with process(signal_settings(database_url)) as one:
        session = one.signals._session  # type: ignore[attr-defined]
        await session.execute("SELECT pg_notify(%s, 'hint')", (one.signals._channel("work"),))  # type: ignore[attr-defined]
        await until_true(lambda: one.hints("work") == ["hint"], "it arrives")
