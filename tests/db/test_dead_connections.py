"""Connections of a process that no server will ever answer, after one of them was not answered."""

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
async def patient(settings: Settings, proxy: PostgresProxy) -> AsyncIterator[Database]:
    """Behind the proxy. A statement ends neither by its own limit nor by that of its session while a test runs."""
    database = Database(settings.model_copy(update={"database_url": proxy.url, "database_timeout": 300.0}), "test")
    await database.open()
    yield database
    await database.close()


def sent(connection: psycopg.AsyncConnection[dict[str, object]]) -> bool:
    return connection.info.transaction_status == TransactionStatus.ACTIVE


async def test_a_statement_that_was_swallowed_fails_as_soon_as_the_server_is_suspected(
    patient: Database, proxy: PostgresProxy
) -> None:
    async with patient.connection() as stranded:
        proxy.strand()
        statement = asyncio.create_task(stranded.execute("SELECT 1"))
        await until_true(lambda: sent(stranded), "the statement is sent")
        await patient.replace_connections()
        with pytest.raises(psycopg.OperationalError) as failure:
            await statement
    assert not isinstance(failure.value, NoAnswer)


async def test_the_silence_of_a_session_of_the_process_makes_the_others_suspect(
    patient: Database, proxy: PostgresProxy
) -> None:
    session = await patient.session("test")
    session.answer_timeout = 0.5
    async with patient.connection() as stranded:
        proxy.strand()
        statement = asyncio.create_task(stranded.execute("SELECT 1"))
        with pytest.raises(NoAnswer):
            await session.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError) as failure:
            await statement
    assert not isinstance(failure.value, NoAnswer)


async def test_the_server_is_asked_until_it_answers(patient: Database, proxy: PostgresProxy) -> None:
    async with patient.connection() as stranded:
        proxy.strand()
        statement = asyncio.create_task(stranded.execute("SELECT 1"))
        await until_true(lambda: sent(stranded), "the statement is sent")
        proxy.refuse()
        await patient.replace_connections()
        await until_true(lambda: proxy.refused >= 2, "it has been asked in vain")
        assert not statement.done()
        proxy.restore()
        with pytest.raises(psycopg.OperationalError):
            await statement


async def test_a_statement_that_the_server_works_on_is_left_alone(
    patient: Database, database: Database, settings: Settings
) -> None:
    """It waits for a lock, for as long as it may."""
    async with (
        patient.connection() as slow,
        await open_session(settings, "test") as asking,
    ):
        async with database.transaction() as holder:
            await holder.execute(LOCK)
            statement = asyncio.create_task(slow.execute(LOCK))
            await until_true(lambda: sent(slow), "the statement is sent")
            assert isinstance(slow, TimedAsyncConnection)
            assert await close_dead_connections([slow], asking) == []
        await statement


async def test_a_session_that_the_server_does_not_have_is_hung_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a fail-over, also if nobody waits on it: the next who uses it would."""
    async with await open_session(settings, "test") as idle, await open_session(settings, "test") as asking:
        assert await close_dead_connections([idle], asking) == []
        monkeypatch.setattr(dead_connections, "process_token", lambda: "of another process")
        assert await close_dead_connections([idle], asking) == [idle]
        with pytest.raises(psycopg.OperationalError):
            await idle.execute("SELECT 1")


async def test_nothing_is_hung_up_where_process_ids_are_a_poolers(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_session(settings, "test") as idle, await open_session(settings, "test") as asking:
        monkeypatch.setattr(dead_connections, "process_token", lambda: "of another process")
        monkeypatch.setattr(dead_connections, "SESSIONS", dead_connections.SESSIONS.replace("pg_backend_pid()", "0"))
        assert await close_dead_connections([idle], asking) == []
