"""The same engine on an older Postgres, and behind PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from holdfast.db.connect import Database
from holdfast.db.migrate import migrate
from holdfast.engine.cancel import cancel_runs
from holdfast.settings import Settings, load_settings
from tests.support.servers import older_postgres, pgbouncer
from tests.support.smoke import ended, events_of, post, working

QUICK = {
    "POSTGRES_POLL_INTERVAL_SECONDS": "0.2",
    "HEARTBEAT_INTERVAL_SECONDS": "0.3",
    "LEASE_DURATION_SECONDS": "15",
    "REAPER_INTERVAL_SECONDS": "0.1",
}


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory for sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="hf") as name:
        yield Path(name)


async def exercise(settings: Settings) -> None:
    """Execute runs, queue one behind another on a thread, cancel one, and check that events have no gaps."""
    database = Database(settings, "test")
    await database.open()
    try:
        async with working(settings):
            first = await ended(database, await post(database, "steps", {"seconds": 0.01}))
            assert first["status"] == "success"
            events = await events_of(database, first)
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert [event.kind for event in events] == ["metadata", *["values"] * 6, "end"]
            long = await post(database, "steps", {"seconds": 60}, first["thread_id"])
            after = await post(database, "steps", {"seconds": 0}, first["thread_id"])
            await running(database, long)
            await cancel_runs(database, first["thread_id"], [long], "interrupt")
            assert (await ended(database, long))["status"] == "interrupted"
            assert (await ended(database, after))["status"] == "success"
    finally:
        await database.close()


async def running(database: Database, run_id: object) -> None:
    async with asyncio.timeout(60):
        while True:
            async with database.connection() as connection:
                cursor = await connection.execute("SELECT status FROM run WHERE run_id = %s", (run_id,))
                row = await cursor.fetchone()
            if row is not None and row["status"] == "running":
                return
            await asyncio.sleep(0.02)


@pytest.mark.servers
async def test_engine_on_postgres_16(short_directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The package warns about the runtime directory it falls back to.
        with older_postgres(short_directory, 16) as url:
            settings = load_settings(QUICK, database_url=url)
            migrate(settings)
            with psycopg.connect(url) as connection:
                assert connection.info.server_version // 10000 == 16
            await exercise(settings)


async def test_engine_behind_pgbouncer_with_direct_url(database_url: str, short_directory: Path) -> None:
    with pgbouncer(database_url, short_directory) as url:
        environ = QUICK | {"HOLDFAST_PGBOUNCER": "1", "HOLDFAST_DIRECT_DATABASE_URL": database_url}
        await exercise(load_settings(environ, database_url=url))


async def test_engine_behind_pgbouncer_alone(database_url: str, short_directory: Path) -> None:
    with pgbouncer(database_url, short_directory) as url:
        settings = load_settings(QUICK | {"HOLDFAST_PGBOUNCER": "1"}, database_url=url)
        migrate(settings)
        await exercise(settings)
