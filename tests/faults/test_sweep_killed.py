"""The leader dies in the middle of a sweep: what it swept is there as a whole, and goes as a whole with the next."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest

from holdfast.db.connect import Database
from holdfast.settings import Settings
from tests.support.ageing import age_thread
from tests.support.fleet import Fleet
from tests.support.smoke import ended, post, working
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TABLES = ("thread", "run", "event", "checkpoints", "checkpoint_blobs", "checkpoint_writes")
SWEEPS = {"threads": "THREAD_TTL_SECONDS", "checkpoints": "CHECKPOINT_TTL_SECONDS"}
SWEEPING = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
    "AND query LIKE '%%checkpoint_blobs%%'"
)


@asynccontextmanager
async def in_the_way(database_url: str, thread_id: UUID) -> AsyncIterator[None]:
    """Somebody holds a row that the sweep will come to after it has deleted others."""
    async with (
        await psycopg.AsyncConnection.connect(database_url, options="-c search_path=holdfast,public") as connection,
        connection.transaction(),
    ):
        await connection.execute("SELECT FROM checkpoint_blobs WHERE thread_id = %s FOR UPDATE", (str(thread_id),))
        yield


async def held(database: Database, thread_id: UUID) -> dict[str, int]:
    """How many rows of a thread each table has, all at one moment."""
    counts = ", ".join(f"(SELECT count(*) FROM {table} WHERE thread_id::text = %(id)s) AS {table}" for table in TABLES)
    async with database.connection() as connection:
        row = await (await connection.execute(f"SELECT {counts}".encode(), {"id": str(thread_id)})).fetchone()
    assert row is not None
    return dict(row)


@pytest.mark.parametrize(("what", "how"), [("threads", "terminate"), ("checkpoints", "kill")])
async def test_nothing_is_half_deleted(
    fleet: Fleet, settings: Settings, database: Database, database_url: str, what: str, how: str
) -> None:
    async with working(settings):
        run = await ended(database, await post(database, "steps", {"seconds": 0}))
    thread_id: UUID = run["thread_id"]
    # Not so old that its events would go before.
    await age_thread(database, thread_id, hours=2)
    whole = await held(database, thread_id)
    assert all(whole.values())
    environ = {SWEEPS[what]: "3600"}
    async with in_the_way(database_url, thread_id):
        leader = await fleet.start_worker(environ)

        async def sweeping() -> list[int]:
            return [row["pid"] for row in await fleet.query(SWEEPING)]

        [backend] = await until(sweeping, "the leader is in the middle of it")
        if how == "kill":
            leader.kill()
        else:
            await fleet.query("SELECT pg_terminate_backend(%s)", (backend,))
        assert await held(database, thread_id) == whole
    if how == "kill":
        await fleet.start_worker(environ)

    async def swept() -> bool:
        left = await held(database, thread_id)
        # Whenever it is looked at, it is whole or done.
        assert left in (whole, done(what, whole, left))
        return left != whole

    await until(swept, "somebody finishes the work")
    if what == "checkpoints":
        again = await ended(database, await post(database, "steps", {"hold": None}, thread_id))
        assert again["status"] == "success"


def done(what: str, whole: dict[str, int], left: dict[str, int]) -> dict[str, int]:
    if what == "threads":
        return dict.fromkeys(TABLES, 0)
    # The latest state, what it refers to, and nothing else.
    fewer = {table: left[table] for table in ("checkpoint_blobs", "checkpoint_writes") if left[table] < whole[table]}
    return {**whole, **fewer, "checkpoints": 1}
