"""After one connection was not answered, a process finds and closes the others that no server will answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from holdfast.db import dead_connections
from holdfast.db.answer_timeout import NoAnswer, TimedAsyncConnection
from holdfast.db.connect import Database, open_session
from holdfast.db.dead_connections import close_dead_connections
from holdfast.settings import Settings
from tests.support.postgres_proxy import PostgresProxy
from tests.support.waiting import until_true

LOCK = "SELECT pg_advisory_xact_lock(1)"


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[PostgresProxy]:
    async with PostgresProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
async def slow_database(settings: Settings, proxy: PostgresProxy) -> AsyncIterator[Database]:
    """A database behind the proxy, whose timeouts are longer than a test."""
    database = Database(settings.model_copy(update={"database_url": proxy.url, "database_timeout": 300.0}), "test")
    await database.open()
    yield database
    await database.close()


def is_sent(connection: psycopg.AsyncConnection[dict[str, object]]) -> bool:
    return connection.info.transaction_status == TransactionStatus.ACTIVE


async def test_lost_statement_fails_when_connections_are_replaced(
    slow_database: Database, proxy: PostgresProxy
) -> None:
    async with slow_database.connection() as stranded:
        proxy.strand()
        statement = asyncio.create_task(stranded.execute("SELECT 1"))
        await until_true(lambda: is_sent(stranded), "the statement is sent")
        await slow_database.replace_connections()
        with pytest.raises(psycopg.OperationalError) as failure:
            await statement
    assert not isinstance(failure.value, NoAnswer)


async def test_unanswered_session_makes_process_replace_other_connections(
    slow_database: Database, proxy: PostgresProxy
) -> None:
    session = await slow_database.session("test")
    session.answer_timeout = 0.5
    async with slow_database.connection() as stranded:
        proxy.strand()
        statement = asyncio.create_task(stranded.execute("SELECT 1"))
        with pytest.raises(NoAnswer):
            await session.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError) as failure:
            await statement
    assert not isinstance(failure.value, NoAnswer)


async def test_check_is_repeated_until_server_answers(slow_database: Database, proxy: PostgresProxy) -> None:
    async with slow_database.connection() as stranded:
        proxy.strand()
        statement = asyncio.create_task(stranded.execute("SELECT 1"))
        await until_true(lambda: is_sent(stranded), "the statement is sent")
        proxy.refuse()
        await slow_database.replace_connections()
        await until_true(lambda: proxy.refused >= 2, "two checks have failed")
        assert not statement.done()
        proxy.restore()
        with pytest.raises(psycopg.OperationalError):
            await statement


async def test_statement_that_server_executes_is_not_closed(
    slow_database: Database, database: Database, settings: Settings
) -> None:
    """The statement waits for a lock."""
    async with (
        slow_database.connection() as slow,
        await open_session(settings, "test") as asking,
    ):
        async with database.transaction() as holder:
            await holder.execute(LOCK)
            statement = asyncio.create_task(slow.execute(LOCK))
            await until_true(lambda: is_sent(slow), "the statement is sent")
            assert isinstance(slow, TimedAsyncConnection)
            assert await close_dead_connections([slow], asking) == []
        await statement


async def test_session_unknown_to_server_is_closed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a fail-over. Also if no statement waits on it: the next one would wait."""
    async with await open_session(settings, "test") as idle, await open_session(settings, "test") as asking:
        assert await close_dead_connections([idle], asking) == []
        monkeypatch.setattr(dead_connections, "process_token", lambda: "of another process")
        assert await close_dead_connections([idle], asking) == [idle]
        with pytest.raises(psycopg.OperationalError):
            await idle.execute("SELECT 1")


async def test_no_connection_is_closed_behind_pooler(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await open_session(settings, "test") as idle, await open_session(settings, "test") as asking:
        monkeypatch.setattr(dead_connections, "process_token", lambda: "of another process")
        monkeypatch.setattr(dead_connections, "SESSIONS", dead_connections.SESSIONS.replace("pg_backend_pid()", "0"))
        assert await close_dead_connections([idle], asking) == []
