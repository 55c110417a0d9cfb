"""Migrations are applied once each, also by concurrent processes, in a configurable schema."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from structlog.testing import capture_logs

from holdfast.cli.fleet import _migrate as migrate_in_a_process
from holdfast.db.connect import Database, open_session
from holdfast.db.long_statements import LongStatementConnection
from holdfast.db.migrate import (
    LOCK_TIMEOUT_SECONDS,
    SESSION_KEY,
    TRANSACTION_KEY,
    TRANSACTION_LIMITS,
    Migration,
    migrate,
    migrations,
)
from holdfast.errors import DatabaseError, DatabaseUnavailable
from holdfast.execution.checkpoints import PooledSaver
from holdfast.settings import Settings, load_settings
from tests.engine.scene import create
from tests.support.next_migration import applied_to, with_next
from tests.support.older_version import unpack_older_version
from tests.support.postgres_proxy import PostgresProxy
from tests.support.records import query, run_row
from tests.support.smoke import ended, post, working

TABLES = {"thread", "run", "event", "worker", "checkpoints", "checkpoint_blobs", "checkpoint_writes", "store"}


def tables(url: str, schema: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
    return {row[0] for row in rows}


def test_ten_concurrent_processes_apply_each_migration_once(empty_url: str) -> None:
    program = (
        "import sys; from holdfast.db.migrate import migrate; from holdfast.settings import load_settings; "
        "print(len(migrate(load_settings({}, database_url=sys.argv[1]))))"
    )

    def one(_: int) -> int:
        done = subprocess.run([sys.executable, "-c", program, empty_url], capture_output=True, text=True, check=True)
        return int(done.stdout.splitlines()[-1])  # A process that waits for long logs a line first.

    with ThreadPoolExecutor(10) as pool:
        counts = sorted(pool.map(one, range(10)))
    assert counts[:9] == [0] * 9
    assert counts[9] > 0
    assert tables(empty_url, "holdfast") >= TABLES


def test_migrations_use_configured_schema(empty_url: str) -> None:
    settings = load_settings({"HOLDFAST_DATABASE_SCHEMA": "elsewhere"}, database_url=empty_url)
    migrate(settings)
    assert tables(empty_url, "elsewhere") >= TABLES
    assert not tables(empty_url, "holdfast")


def test_failed_migration_leaves_earlier_ones_applied(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({}, database_url=empty_url)
    names = [migration.name for migration in migrations()]
    with monkeypatch.context() as later:
        with_next(later, "CREATE TABLE half_done (x integer); CREATE TABLE event (x integer)")
        with pytest.raises(DatabaseError, match='Migration 9999_next failed: relation "event" already exists'):
            migrate(settings)
    assert applied_to(empty_url) == names
    assert not tables(empty_url, "holdfast") & {"half_done", "store"}
    # The next start continues with the remaining migrations.
    assert [name.partition(" ")[0] for name in migrate(settings)] == ["langgraph", "langgraph"]
    assert migrate(settings) == []


def shorten_lock_timeout(monkeypatch: pytest.MonkeyPatch, timeout: str) -> None:
    """Replace only the value, so that the tests fail if migrations do not set a lock_timeout."""
    given = f"lock_timeout = '{LOCK_TIMEOUT_SECONDS:g}s'"
    assert given in TRANSACTION_LIMITS
    shorter = TRANSACTION_LIMITS.replace(given, f"lock_timeout = '{timeout}'")
    monkeypatch.setattr("holdfast.db.migrate.TRANSACTION_LIMITS", shorter)


def test_statements_do_not_queue_behind_waiting_migration(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({}, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, "ALTER TABLE thread ADD COLUMN more integer")
    shorten_lock_timeout(monkeypatch, "200ms")
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(empty_url) as long,
        psycopg.connect(empty_url, autocommit=True, options="-c statement_timeout=10s") as other,
    ):
        long.execute("SELECT FROM holdfast.thread")
        migrating = pool.submit(migrate, settings)
        waits = (
            "SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted AND query LIKE 'ALTER TABLE%'"
        )
        for _ in range(3):
            while other.execute(waits).fetchone() is None:
                assert not migrating.done(), migrating.result()
            other.execute("SELECT FROM holdfast.thread")
        long.rollback()
        assert migrating.result(timeout=60) == ["9999_next"]


def test_migration_without_its_locks_fails_after_timeout(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({}, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, "ALTER TABLE thread ADD COLUMN more integer")
    shorten_lock_timeout(monkeypatch, "50ms")
    monkeypatch.setattr("holdfast.db.migrate.LOCKING_TIMEOUT_SECONDS", 0.1)
    with psycopg.connect(empty_url) as long:
        long.execute("SELECT FROM holdfast.thread")
        with pytest.raises(DatabaseError, match=r"Migration 9999_next could not lock its tables within 0\.1 seconds"):
            migrate(settings)


@pytest.mark.parametrize("pgbouncer", ["0", "1"])
def test_timeouts_of_role_do_not_end_migration(empty_url: str, monkeypatch: pytest.MonkeyPatch, pgbouncer: str) -> None:
    settings = load_settings({"HOLDFAST_PGBOUNCER": pgbouncer}, database_url=empty_url)
    migrate(settings)
    with psycopg.connect(empty_url, autocommit=True) as connection:
        for limit in ("statement_timeout", "lock_timeout", "transaction_timeout"):
            if limit != "transaction_timeout" or connection.info.server_version >= 170000:
                connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {limit} = '300ms'".encode())
    with_next(monkeypatch, "SELECT pg_sleep(0.6)")
    assert migrate(settings) == ["9999_next"]


# With this timeout, the server is soon asked about a statement that takes long.
QUICK_CHECK = {"DATABASE_TIMEOUT": "1"}


@pytest.mark.parametrize("lost", ["fall_silent", "strand"])
async def test_migration_fails_when_server_hangs(database_url: str, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """`strand`: new connections reach another server, as after a fail-over."""
    with_next(monkeypatch, "SELECT pg_sleep(0.1)")
    async with PostgresProxy(database_url) as proxy:
        settings = load_settings(QUICK_CHECK, database_url=proxy.url)
        held = proxy.hold_answers_from("pg_sleep")
        migrating = asyncio.create_task(asyncio.to_thread(migrate, settings))
        async with asyncio.timeout(60):
            await held.wait()
            getattr(proxy, lost)()
            with pytest.raises(DatabaseUnavailable, match="Migration 9999_next failed: the server does not answer"):
                await migrating
        proxy.restore()


def test_migration_may_take_longer_than_check_interval(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(QUICK_CHECK, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, "SELECT pg_sleep(3)")
    is_at_work = LongStatementConnection._is_at_work
    asked = []

    def ask(connection: LongStatementConnection) -> bool:
        asked.append(is_at_work(connection))
        return asked[-1]

    monkeypatch.setattr(LongStatementConnection, "_is_at_work", ask)
    assert migrate(settings) == ["9999_next"]
    # The last check may come when the statement has just ended. It fails then, and is repeated.
    assert asked.count(True) > 1


@pytest.mark.parametrize("pgbouncer", ["0", "1"])
@pytest.mark.parametrize("key", [SESSION_KEY, TRANSACTION_KEY], ids=["session", "transaction"])
def test_migrate_reports_wait_for_another_process_once(
    empty_url: str, monkeypatch: pytest.MonkeyPatch, pgbouncer: str, key: str
) -> None:
    settings = load_settings({"HOLDFAST_PGBOUNCER": pgbouncer}, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, "SELECT 1")
    monkeypatch.setattr("holdfast.db.migrate.REPORT_WAIT_AFTER_SECONDS", 0.0)
    turns = 0
    waited = threading.Event()

    def sleep(_: float) -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            waited.set()

    monkeypatch.setattr("holdfast.db.migrate.time.sleep", sleep)
    with psycopg.connect(empty_url, autocommit=True) as other, ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        other.execute(f"SELECT pg_advisory_lock({key})", (settings.db_schema,))
        migrating = pool.submit(migrate, settings)
        assert waited.wait(60)
        other.execute(f"SELECT pg_advisory_unlock({key})", (settings.db_schema,))
        assert migrating.result(60) == ["9999_next"]
    assert [(line["event"], line["reason"]) for line in logs] == [("migration.waiting", "another process migrates")]


def test_migrate_reports_unreachable_direct_url(empty_url: str) -> None:
    nowhere = make_conninfo(empty_url, dbname="missing")
    with pytest.raises(DatabaseError, match="DIRECT_DATABASE_URL cannot be connected to"):
        migrate(load_settings({}, database_url=empty_url, direct_database_url=nowhere))


def test_migrate_reports_missing_database(server_url: str) -> None:
    with pytest.raises(DatabaseError, match="DATABASE_URL cannot be connected to"):
        migrate(load_settings({}, database_url=make_conninfo(server_url, dbname="missing")))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
@pytest.mark.parametrize("variable", ["DATABASE_URL", "DIRECT_DATABASE_URL"])
def test_migrate_refuses_database_without_utf8(server_url: str, empty_url: str, encoding: str, variable: str) -> None:
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
        url = make_conninfo(server_url, dbname=name)
        try:
            with pytest.raises(
                DatabaseError,
                match=f"^{variable} leads to a database whose encoding is {encoding}: Holdfast needs UTF8.* 'UTF8'",
            ):
                migrate(load_settings({"DATABASE_URL": empty_url, variable: url}))
            assert not tables(url, "holdfast")
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_session_ignores_pgclientencoding(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    async with await open_session(load_settings({}, database_url=database_url), "test") as connection:
        row = await (await connection.execute("SELECT %s::text AS text", ("ぁ",))).fetchone()
    assert row == {"text": "ぁ"}


def test_migration_numbers_are_unique_and_in_order() -> None:
    numbers = [migration.number for migration in migrations()]
    # Not every number is used: some migrations were withdrawn before a release.
    assert numbers == sorted(set(numbers))


# The last migration that was applied to databases in production before this rule existed.
LAST_BEFORE_RULE = 14
# One row for each tenant, so a statement on all rows is short.
SMALL_TABLES = {"tenant"}
TABLE = r"(?:ONLY )?(?P<table>\w+)"
# Each of these reads or writes the whole table while it is locked against writes.
LONG_LOCKS = {
    "builds an index": rf"CREATE (?:UNIQUE )?INDEX (?!CONCURRENTLY)(?:IF NOT EXISTS )?\w+ ON {TABLE}",
    "rebuilds an index": rf"REINDEX TABLE (?!CONCURRENTLY){TABLE}",
    "builds the index of a constraint": rf"ALTER TABLE {TABLE}[^;]*\b(?:UNIQUE|PRIMARY KEY|EXCLUDE)\b(?! USING INDEX)",
    "checks all rows": rf"ALTER TABLE {TABLE}[^;]*\b(?:CHECK|FOREIGN KEY|REFERENCES)\b(?![^;]*NOT VALID)",
    "looks for NULL in all rows": rf"ALTER TABLE {TABLE}[^;]*\bSET NOT NULL",
    "rewrites the table": rf"ALTER TABLE {TABLE}[^;]*\b(?:TYPE\b|DEFAULT (?!now\(\))[^,;]*\(|STORED|SERIAL)",
}
ALTERS = rf"ALTER TABLE {TABLE}"
CHANGES = r"(?:UPDATE (?!OF\b)|DELETE FROM )(?P<table>\w+)"


def long_locks(statements: str) -> list[str]:
    """The reasons why a migration would lock a table that may be large for long."""
    text = " ".join(re.sub("--.*", "", statements).split())
    # The body of a function is not executed by the migration.
    text = re.sub(r"AS \$\$.*?\$\$", "", text)
    new = set(re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", text))
    harmless = new | SMALL_TABLES
    found = [
        f"{reason}: {match['table']}"
        for reason, pattern in LONG_LOCKS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
        if match["table"] not in harmless
    ]
    altered = [(match["table"], match.start()) for match in re.finditer(ALTERS, text) if match["table"] not in new]
    changed = [(match["table"], match.start()) for match in re.finditer(CHANGES, text)]
    return found + [
        f"changes rows of {table} while it locks {locked}"
        for locked, since in altered
        for table, at in changed
        if at > since or table == locked
    ]


def test_supervisor_logs_wait_for_another_migrating_process(empty_url: str, tmp_path: Path) -> None:
    """The supervisor migrates in a separate process and must pass on the log lines of that process."""
    config = tmp_path / "langgraph.json"
    config.write_text('{"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}')
    with psycopg.connect(empty_url, autocommit=True) as other, ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        other.execute(f"SELECT pg_advisory_lock({SESSION_KEY})", ("holdfast",))
        migrating = pool.submit(migrate_in_a_process, config, {**os.environ, "DATABASE_URL": empty_url})
        deadline = time.monotonic() + 60
        while not logs and time.monotonic() < deadline:
            time.sleep(0.05)
        other.execute(f"SELECT pg_advisory_unlock({SESSION_KEY})", ("holdfast",))
        migrating.result(60)
    waiting, migrated = logs
    assert (waiting["event"], waiting["reason"]) == ("migration.waiting", "another process migrates")
    assert migrated["event"] == "schema.migrated"
    assert migrated["migrations"][: len(migrations())] == [migration.name for migration in migrations()]


@pytest.mark.servers
def test_lock_rule_covers_all_migrations_of_a_rolling_update(tmp_path: Path) -> None:
    unpack_older_version(tmp_path)
    older = [int(file.name[:4]) for file in (tmp_path / "src/holdfast/db/migrations").glob("*.sql")]
    assert max(older) >= LAST_BEFORE_RULE


@pytest.mark.parametrize(
    "migration", [one for one in migrations() if one.number > LAST_BEFORE_RULE], ids=lambda migration: migration.name
)
def test_migration_locks_no_existing_table_for_long(migration: Migration) -> None:
    """An index must be built in a separate file, `NNNN_name.concurrently.sql`. Rows must be changed in another
    migration than the one that alters their table, and before any table is altered."""
    assert long_locks(migration.statements) == []
    if migration.concurrently:
        text = re.sub("--.*", "", migration.statements).strip()
        assert text.startswith(("CREATE INDEX CONCURRENTLY", "CREATE UNIQUE INDEX CONCURRENTLY"))
        assert text.count(";") == 1


@pytest.mark.parametrize(
    ("statements", "reasons"),
    [
        ("CREATE INDEX i ON run (thread_id);", 1),
        ("CREATE UNIQUE INDEX IF NOT EXISTS i\n    ON run (thread_id);", 1),
        ("CREATE INDEX CONCURRENTLY i ON run (thread_id);", 0),
        ("CREATE TABLE later (x integer PRIMARY KEY CHECK (x > 0)); CREATE INDEX i ON later (x);", 0),
        ("ALTER TABLE run ADD COLUMN x integer NOT NULL DEFAULT 0;", 0),
        ("ALTER TABLE run ADD COLUMN x timestamptz NOT NULL DEFAULT now();", 0),
        ("ALTER TABLE run ADD COLUMN x uuid NOT NULL DEFAULT gen_random_uuid();", 1),
        ("ALTER TABLE run ADD COLUMN x integer; UPDATE run SET x = 1;", 1),
        ("ALTER TABLE tenant ADD COLUMN x integer; UPDATE run SET x = 1;", 1),
        ("UPDATE run SET x = 1; ALTER TABLE tenant ADD COLUMN x integer;", 0),
        ("UPDATE run SET x = 1;", 0),
        ("ALTER TABLE run ADD CONSTRAINT positive CHECK (x > 0);", 1),
        ("ALTER TABLE run ADD CONSTRAINT positive CHECK (x > 0) NOT VALID;", 0),
        ("ALTER TABLE run VALIDATE CONSTRAINT positive;", 0),
        ("ALTER TABLE run ADD CONSTRAINT one UNIQUE (x);", 1),
        ("ALTER TABLE run ALTER COLUMN x SET NOT NULL;", 1),
        ("ALTER TABLE run ALTER COLUMN x TYPE bigint;", 1),
    ],
)
def test_long_locks_finds_statements_that_lock_for_long(statements: str, reasons: int) -> None:
    assert len(long_locks(statements)) == reasons


async def test_migration_22_keeps_crash_counts_of_unfinished_runs(database: Database) -> None:
    [migration] = [one for one in migrations() if one.name == "0022_suspect_counts"]
    crashed, unharmed, ended = [(await create(database, uuid4())).run["run_id"] for _ in range(3)]
    await query(database, "UPDATE run SET crashes = 2 WHERE run_id = ANY(%s) RETURNING 1", [crashed, ended])
    await query(
        database,
        "UPDATE run SET status = 'error', finished_at = now(), ready_at = NULL WHERE run_id = %s RETURNING 1",
        ended,
    )
    async with database.transaction() as connection:
        await connection.execute(migration.statements.encode())
    counts = [(await run_row(database, run_id))["crashes_in_a_row"] for run_id in (crashed, unharmed, ended)]
    assert counts == [2, 0, 0]


def test_migration_15_limits_priorities_of_crons(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Checkpoints that LangGraph's own saver has written into `public` before are the history of the thread."""
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
    # The saver's tables existed already, the store's did not.
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
