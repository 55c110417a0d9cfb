"""The pool when tasks that use it are cancelled, and when the server does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus

from holdfast.db.answer_timeout import NoAnswer
from holdfast.db.connect import Database, open_blocking_session, open_session
from holdfast.db.reconnecting_pool import RECONNECT_MAX_PAUSE_SECONDS
from holdfast.settings import Settings
from tests.support.postgres_proxy import PostgresProxy
from tests.support.waiting import until, until_true


async def test_pool_keeps_connection_of_task_cancelled_while_returning_it(settings: Settings) -> None:
    """This happens when many readers of streams disconnect at the same time."""
    database = Database(settings.model_copy(update={"pool_max": 1, "database_timeout": 5.0}), "test")
    await database.open()
    done = asyncio.Event()

    async def use() -> None:
        async with database.connection() as connection:
            await connection.execute("SELECT 1")
            await done.wait()

    try:
        user = asyncio.create_task(use())
        while not database.pool.get_stats().get("requests_num"):
            await asyncio.sleep(0.01)
        async with database.pool._lock:  # As while another task takes or returns a connection.
            done.set()
            for _ in range(5):
                await asyncio.sleep(0)
            user.cancel()
            await asyncio.wait({user})
        async with database.connection() as connection:
            await connection.execute("SELECT 1")
    finally:
        await database.close()


async def test_pool_tries_to_connect_at_least_every_second(settings: Settings, tmp_path: Any) -> None:
    nowhere = make_conninfo(settings.database_url or "", host=str(tmp_path))
    database = Database(settings.model_copy(update={"database_url": nowhere}), "test")
    await database.pool.open()
    scheduler = database.pool._sched
    enter, pauses = scheduler.enter, []

    async def at_once(delay: float, action: Any) -> Any:
        if 0 < delay < 300:  # Longer delays belong to the task that closes idle connections.
            pauses.append(delay)
            delay = 0
        return await enter(delay, action)

    scheduler.enter = at_once  # type: ignore[method-assign]
    try:
        await until_true(lambda: len(pauses) > 12, "the pool has tried a dozen times")
    finally:
        await database.close()
    assert max(pauses) <= RECONNECT_MAX_PAUSE_SECONDS


async def test_pool_replaces_connections_that_hang(settings: Settings) -> None:
    async with PostgresProxy(settings.database_url or "") as proxy:
        quick = settings.model_copy(update={"database_url": proxy.url, "database_timeout": 1.0, "pool_min": 3})
        database = Database(quick, "test")
        # Wait long enough on a busy machine. `Database.open` would wait for a second only.
        database.pool.timeout = 30
        await database.pool.open(wait=True, timeout=30)
        try:
            proxy.strand()
            with pytest.raises(NoAnswer):
                async with database.connection() as connection:
                    await connection.execute("SELECT 1")
            for _ in range(3):
                async with database.connection() as connection:
                    await connection.execute("SELECT 1")
        finally:
            await database.close()


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
async def test_session_raises_no_answer_when_server_hangs(settings: Settings, blocking: bool) -> None:
    async with PostgresProxy(settings.database_url or "") as proxy:
        quick = settings.model_copy(update={"database_url": proxy.url, "database_timeout": 3.0})
        if blocking:
            session = await asyncio.to_thread(open_blocking_session, quick, "test")
            proxy.fall_silent()
            with pytest.raises(NoAnswer):
                await asyncio.to_thread(session.execute, "SELECT 1")
            assert session.closed
        else:
            other = await open_session(quick, "test")
            proxy.fall_silent()
            with pytest.raises(NoAnswer):
                await other.execute("SELECT 1")
            assert other.closed


async def test_statement_that_times_out_is_cancelled_on_server(settings: Settings, database: Database) -> None:
    """Otherwise it would keep its locks."""
    session = await open_session(settings.model_copy(update={"database_timeout": 2.0}), "slow")
    with pytest.raises(NoAnswer):
        await session.execute("SELECT pg_sleep(600)")

    async def over() -> bool:
        async with database.connection() as connection:
            cursor = await connection.execute(
                "SELECT count(*) AS sessions FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name ~ '^holdfast slow'"
            )
            row = await cursor.fetchone()
        return row is not None and row["sessions"] == 0

    await until(over, "the session is gone")


async def test_long_transaction_has_longer_timeout(settings: Settings) -> None:
    database = Database(settings.model_copy(update={"database_timeout": 0.1}), "test")
    database.pool.timeout = 30
    await database.pool.open()
    try:
        async with database.long_transaction() as connection:
            await connection.execute("SELECT pg_sleep(0.6)")
        with pytest.raises(NoAnswer):
            async with database.transaction() as connection:
                await connection.execute("SELECT pg_sleep(600)")
    finally:
        await database.close()


async def test_shut_down_ends_waiting_statement_at_once(settings: Settings) -> None:
    session = await open_session(settings, "test", answer_timeout=600.0)
    waiting = asyncio.create_task(session.execute("SELECT pg_sleep(600)"))
    await until_true(lambda: session.pgconn.transaction_status == TransactionStatus.ACTIVE, "the statement is sent")

    session.shut_down()

    with pytest.raises(psycopg.OperationalError):
        await waiting
    session.shut_down()  # A second call does nothing.
    assert session.closed
