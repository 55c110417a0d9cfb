"""Migrations: once each, whoever comes first, in a schema of one's own."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from holdfast.db.connect import Database
from holdfast.db.migrate import migrate, migrations
from holdfast.errors import DatabaseError
from holdfast.settings import Settings, load_settings
from holdfast.worker.checkpoints import PooledSaver
from tests.support.smoke import ended, post, working

TABLES = {"thread", "run", "event", "worker", "checkpoints", "checkpoint_blobs", "checkpoint_writes", "store"}


@pytest.fixture
def empty_url(server_url: str) -> Any:
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield make_conninfo(server_url, dbname=name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def tables(url: str, schema: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
    return {row[0] for row in rows}


def test_ten_processes_at_once_apply_each_migration_once(empty_url: str) -> None:
    program = (
        "import sys; from holdfast.db.migrate import migrate; from holdfast.settings import load_settings; "
        "print(len(migrate(load_settings({}, database_url=sys.argv[1]))))"
    )

    def one(_: int) -> int:
        done = subprocess.run([sys.executable, "-c", program, empty_url], capture_output=True, text=True, check=True)
        return int(done.stdout)

    with ThreadPoolExecutor(10) as pool:
        counts = sorted(pool.map(one, range(10)))
    assert counts[:9] == [0] * 9
    assert counts[9] > 0
    assert tables(empty_url, "holdfast") >= TABLES


def test_the_schema_is_configurable(empty_url: str) -> None:
    settings = load_settings({"HOLDFAST_DATABASE_SCHEMA": "elsewhere"}, database_url=empty_url)
    migrate(settings)
    assert tables(empty_url, "elsewhere") >= TABLES
    assert not tables(empty_url, "holdfast")


def test_a_failure_leaves_the_schema_as_it_was(empty_url: str) -> None:
    settings = load_settings({}, database_url=empty_url)
    with psycopg.connect(empty_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA holdfast")
        connection.execute("CREATE TABLE holdfast.event (other integer)")
    with pytest.raises(psycopg.errors.DuplicateTable):
        migrate(settings)
    assert tables(empty_url, "holdfast") == {"event"}


def test_a_database_that_is_not_there_is_the_operators_error(server_url: str) -> None:
    with pytest.raises(DatabaseError, match="DATABASE_URL cannot be connected to"):
        migrate(load_settings({}, database_url=make_conninfo(server_url, dbname="missing")))


def test_numbers_are_unique_and_in_order() -> None:
    numbers = [migration.number for migration in migrations()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_priorities_of_crons_come_into_range(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({}, database_url=empty_url)
    everything = migrations()
    with monkeypatch.context() as before:
        before.setattr("holdfast.db.migrate.migrations", lambda: [one for one in everything if one.number < 15])
        migrate(settings)
    with psycopg.connect(empty_url, autocommit=True, options="-c search_path=holdfast") as connection:
        connection.execute(
            "INSERT INTO assistant (assistant_id, graph_id, name) VALUES (gen_random_uuid(), 'graph', 'graph')"
        )
        for priority in (-1_000_000, -100, 0, 7, 5_000):
            connection.execute(
                "INSERT INTO cron (cron_id, assistant_id, schedule, on_run_completed, payload, template) "
                "SELECT gen_random_uuid(), assistant_id, '@daily', 'keep', %s, %s FROM assistant",
                (Jsonb({"priority": priority} if priority != 7 else {}), Jsonb({"priority": priority, "kwargs": {}})),
            )
        unreadable = ['{"priority": 5000, "input": "\\u0000"}', '{"priority": 5000, "input": "\\ud800"}']
        for stored in unreadable:
            connection.execute(
                "INSERT INTO cron (cron_id, assistant_id, schedule, on_run_completed, payload, template) "
                "SELECT gen_random_uuid(), assistant_id, '@daily', 'delete', %(stored)s::json, %(stored)s::json "
                "FROM assistant",
                {"stored": stored},
            )
        migrate(settings)
        kept = connection.execute("SELECT template::text FROM cron WHERE on_run_completed = 'delete'").fetchall()
        rows = connection.execute(
            "SELECT template ->> 'priority', payload ->> 'priority' FROM cron WHERE on_run_completed = 'keep'"
        ).fetchall()
    assert sorted(text for (text,) in kept) == unreadable
    assert sorted(rows, key=str) == sorted(
        [("-100", "-100"), ("-100", "-100"), ("0", "0"), ("7", None), ("100", "100")], key=str
    )


async def test_existing_langgraph_tables_keep_working(empty_url: str) -> None:
    """Checkpoints written by the stock saver into `public` before Holdfast came are the thread's history after."""
    thread_id = str(uuid4())
    with psycopg.connect(empty_url, autocommit=True, row_factory=dict_row) as connection:
        stock = PostgresSaver(connection)
        stock.setup()
        config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"done": ["before"]}
        checkpoint["channel_versions"] = {"done": "1"}
        stock.put(config, checkpoint, {"source": "input", "step": -1, "parents": {}}, {"done": "1"})
    settings: Settings = load_settings({"HOLDFAST_DATABASE_SCHEMA": "public"}, database_url=empty_url)
    applied = migrate(settings)
    # The saver's tables are there already; the store's were not.
    assert applied[:-1] == [migration.name for migration in migrations()]
    assert applied[-1].startswith("langgraph store 0 to ")
    database = Database(settings, "test")
    await database.open()
    try:
        found = await PooledSaver(database).aget_tuple(config)
        assert found is not None
        assert found.checkpoint["channel_values"] == {"done": ["before"]}
        async with working(settings):
            run = await ended(database, await post(database, "steps", {"seconds": 0}, UUID(thread_id)))
        assert run["status"] == "success"
        async with database.connection() as connection:
            cursor = await connection.execute("SELECT values FROM thread WHERE thread_id = %s", (thread_id,))
            row = await cursor.fetchone()
        assert row is not None
        assert row["values"]["done"] == ["before", "s1", "s2", "s3", "s4", "s5"]
    finally:
        await database.close()
