"""KeptConnection: a pooled connection that one part of a process keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.kept_connection import KeptConnection
from holdfast.settings import Settings

MODE = "SELECT pg_backend_pid() AS pid, current_setting('plan_cache_mode') AS mode"

Pool = Callable[..., Any]


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:

        async def opened(**changes: Any) -> Database:
            database = Database(settings.model_copy(update=changes), "test")
            await database.open()
            stack.push_async_callback(database.close)
            return database

        yield opened


async def plan_mode_of(connection: AsyncConnection[DictRow]) -> DictRow:
    row = await (await connection.execute(MODE)).fetchone()
    assert row is not None
    return row


async def use(kept: KeptConnection) -> DictRow:
    async with kept.connection() as connection:
        return await plan_mode_of(connection)


async def test_kept_connection_is_reused(pool: Pool) -> None:
    database = await pool(pool_min=2, pool_max=3)
    kept = KeptConnection(database, others=1)
    assert len({(await use(kept))["pid"] for _ in range(5)}) == 1
    assert (await use(kept))["mode"] == "auto"
    await kept.release()


async def test_kept_connection_uses_generic_plans(pool: Pool) -> None:
    kept = KeptConnection(await pool(pool_max=2), others=1, generic_plans=True)
    for _ in range(10):
        async with kept.connection() as connection:
            await connection.execute("SELECT 1 FROM run WHERE run_id = ANY(%s::uuid[])", ([uuid4()],))
    async with kept.connection() as connection:
        cursor = await connection.execute(
            "SELECT custom_plans FROM pg_prepared_statements WHERE statement LIKE 'SELECT 1 FROM run WHERE%'"
        )
        assert await cursor.fetchall() == [{"custom_plans": 0}]
    await kept.release()


async def test_released_connection_has_default_plan_cache_mode(pool: Pool) -> None:
    database = await pool(pool_min=1, pool_max=2)
    kept = KeptConnection(database, others=1, generic_plans=True)
    assert (await use(kept))["mode"] == "force_generic_plan"
    await kept.release()
    async with database.connection() as one, database.connection() as other:
        assert {(await plan_mode_of(connection))["mode"] for connection in (one, other)} == {"auto"}


async def test_connection_that_cannot_be_reset_is_closed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    database = await pool(pool_min=1, pool_max=2)
    kept = KeptConnection(database, others=1, generic_plans=True)
    first = await use(kept)
    async with kept.connection() as connection:

        async def silent(*_: object) -> None:
            await asyncio.sleep(3600)

        monkeypatch.setattr(connection, "execute", silent)
    monkeypatch.setattr("holdfast.db.kept_connection.RESET_TIMEOUT_SECONDS", 0.05)
    await kept.release()
    async with asyncio.timeout(30), database.connection() as one, database.connection() as other:
        found = [await plan_mode_of(connection) for connection in (one, other)]
    assert {row["mode"] for row in found} == {"auto"}
    assert first["pid"] not in {row["pid"] for row in found}


async def test_pool_keeps_its_size_when_release_is_cancelled(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first cancel makes the task return its connection; a second one may arrive while it does so."""
    database = await pool(pool_min=1, pool_max=2)
    kept = KeptConnection(database, others=1, generic_plans=True)
    first = await use(kept)
    resetting = asyncio.Event()
    async with kept.connection() as connection:

        async def silent(*_: object) -> None:
            resetting.set()
            await asyncio.sleep(3600)

        monkeypatch.setattr(connection, "execute", silent)
    returning = asyncio.create_task(kept.release())
    await resetting.wait()
    returning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await returning
    async with asyncio.timeout(30), database.connection() as one, database.connection() as other:
        found = [await plan_mode_of(connection) for connection in (one, other)]
    assert {row["mode"] for row in found} == {"auto"}
    assert first["pid"] not in {row["pid"] for row in found}


@pytest.mark.parametrize("generic_plans", [False, True])
async def test_failed_kept_connection_is_replaced(pool: Pool, generic_plans: bool) -> None:
    database = await pool(pool_max=2, pool_min=1)
    kept = KeptConnection(database, others=1, generic_plans=generic_plans)
    first = await use(kept)
    async with database.connection() as other:
        await other.execute("SELECT pg_terminate_backend(%s)", (first["pid"],))
    with pytest.raises(psycopg.OperationalError):
        await use(kept)
    assert (await use(kept))["pid"] != first["pid"]
    # The pool has lost no connection.
    async with database.connection() as connection:
        await plan_mode_of(connection)
    await kept.release()


async def test_small_pool_lends_connection_for_each_use(pool: Pool) -> None:
    database = await pool(pool_min=1, pool_max=2)
    kept = KeptConnection(database, others=2, generic_plans=True)
    assert (await use(kept))["mode"] == "auto"
    async with database.connection(), database.connection():
        pass


async def test_kept_connection_sets_no_session_settings_behind_pgbouncer(pool: Pool) -> None:
    """A session setting would stay on the server's connection, which another client gets next."""
    database = await pool(pool_max=5, pgbouncer=True)
    kept = KeptConnection(database, others=1, generic_plans=True)
    assert (await use(kept))["mode"] == "auto"
    async with kept.connection() as connection:
        row = await (await connection.execute("SELECT current_setting('search_path') AS path")).fetchone()
        assert row == {"path": database.settings.db_schema}
