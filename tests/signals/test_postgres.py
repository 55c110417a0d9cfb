"""What is particular to LISTEN/NOTIFY."""

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


async def test_a_terminated_session_is_replaced(database: Database, database_url: str) -> None:
    with capture_logs() as logs:
        async with process(signal_settings(database_url)) as one:
            assert len(await query(database, TERMINATE)) == 1
            await until_true(lambda: one.missed >= 1, "it is told to look for itself")
            await until_true(lambda: not one.signals.degraded, "it is back")
            one.signals.publish("work", "after")
            await until_true(lambda: one.hints("work") == ["after"], "hints come again")
    told = [entry["event"] for entry in logs if entry["event"].startswith("signals.")]
    assert told == ["signals.degraded", "signals.restored"]


class ClosingSession:
    """Does what libpq does when the server is gone: closes its socket, then raises.

    At once the number of its descriptor belongs to a connection of the same event loop, as that of an HTTP client.
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


def test_descriptor_that_another_connection_got_does_not_end_the_process(database_url: str) -> None:
    async def listen() -> None:
        signals = PostgresSignals(Database(signal_settings(database_url), "test"))
        session = ClosingSession()
        hearing = asyncio.ensure_future(signals._hear(cast(Any, SimpleNamespace(pgconn=session)), {}))
        await asyncio.sleep(0)
        session.shut_down()
        with pytest.raises(psycopg.OperationalError):
            await hearing
        assert session.successor is not None
        transport, _ = await session.successor
        transport.close()

    uvloop.run(listen())


KEPT = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ '^holdfast test' AND query ~ 'pg_notify'
  AND pid <> pg_backend_pid()
"""


async def test_hints_are_sent_by_a_connection_that_is_kept_and_replaced(database: Database, database_url: str) -> None:
    async with process(signal_settings(database_url)) as one:
        [kept] = await query(database, KEPT)
        for number in range(20):
            one.signals.publish("work", f"{number}")
            await until_true(lambda: one.hints("work")[-1:] == [f"{number}"], "it arrives")  # noqa: B023
        assert [row["pid"] for row in await query(database, KEPT)] == [kept["pid"]]
        # Of the two that its pool may have one is left for the others.
        pool = one.signals._database.pool  # type: ignore[attr-defined]
        async with pool.connection():
            with pytest.raises(PoolTimeout):
                await pool.getconn(timeout=0.2)
        await query(database, f"SELECT pg_terminate_backend({kept['pid']})")

        def comes_again() -> bool:
            one.signals.publish("work", f"{len(one.hints('work'))}")
            return len(one.hints("work")) > 20

        await until_true(comes_again, "hints come again")


async def test_the_only_connection_of_a_pool_is_not_kept(database_url: str) -> None:
    async with process(signal_settings(database_url, pool_max=1)) as one:
        one.signals.publish("work", "heard")
        await until_true(lambda: one.hints("work") == ["heard"], "it arrives")
        pool = one.signals._database  # type: ignore[attr-defined]
        async with pool.connection() as connection:
            await connection.execute("SELECT 1")


async def test_a_process_listens_with_one_session_and_to_its_own_schema(database: Database, database_url: str) -> None:
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


async def test_without_a_session_to_listen_with_it_recovers_when_it_can_send(database_url: str) -> None:
    """Behind PgBouncer nobody listens, so there is no echo to wait for."""
    async with PostgresProxy(database_url) as network:
        settings = signal_settings(network.url, pgbouncer=True, database_timeout=5)
        async with process(settings, joined=False) as one:

            def tells(degraded: bool) -> bool:
                one.signals.publish("work", "hint")
                return one.signals.degraded is degraded

            network.cut()
            await until_true(lambda: tells(True), "sending fails")
            network.restore()
            await until_true(lambda: tells(False), "sending works")
            assert one.hints("work") == []


async def test_a_hint_that_comes_with_the_answer_to_a_statement_is_heard(database_url: str) -> None:
    """As one does that is sent while a process is about to listen to its second channel."""
    async with process(signal_settings(database_url)) as one:
        session = one.signals._session  # type: ignore[attr-defined]
        await session.execute("SELECT pg_notify(%s, 'heard')", (one.signals._channel("work"),))  # type: ignore[attr-defined]
        await until_true(lambda: one.hints("work") == ["heard"], "it arrives")
