"""Indexes on existing tables are built without locking out writes, and never stay invalid."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg import Connection
from structlog.testing import capture_logs

from holdfast.db.migrate import IS_VALID, SESSION_KEY, migrate
from holdfast.errors import DatabaseError
from holdfast.settings import load_settings
from tests.support.next_migration import applied_to, with_next
from tests.support.older_version import unpack_older_version

# Finds the connection of a migration that waits for other transactions while it builds an index.
BUILD_WAITS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%CREATE INDEX CONCURRENTLY%'
"""
NEXT_INDEX = "CREATE INDEX CONCURRENTLY next_index ON tenant (weight);"
INVALID_INDEXES = "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid"


def wait_for(connection: Connection, statement: str) -> int:
    """Repeat the statement until it returns a row; return its first column."""
    deadline = time.monotonic() + 60
    while (row := connection.execute(statement.encode()).fetchone()) is None:
        assert time.monotonic() < deadline, statement
        connection.execute("SELECT pg_sleep(0.02)")
    return int(row[0])


def validity(url: str, index: str) -> bool | None:
    """Whether the index is valid; None: it does not exist."""
    with psycopg.connect(url, options="-c search_path=holdfast") as connection:
        row = connection.execute(IS_VALID, (index,)).fetchone()
    return None if row is None else bool(row[0])


@contextmanager
def snapshot_held(url: str) -> Iterator[None]:
    """Hold a transaction with a snapshot, for which the build of an index waits."""
    with psycopg.connect(url, options="-c default_transaction_isolation=repeatable\\ read") as connection:
        connection.execute("SELECT 1")
        yield


def test_index_is_built_concurrently_outside_transactions(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent processes build it once. After a failed build it is built again."""
    settings = load_settings({}, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, "CREATE UNIQUE INDEX CONCURRENTLY next_index ON tenant (weight);", concurrently=True)
    with psycopg.connect(empty_url, autocommit=True, options="-c search_path=holdfast") as connection:
        connection.execute("INSERT INTO tenant (tenant_id) VALUES ('a'), ('b')")
        with pytest.raises(DatabaseError, match="Migration 9999_next failed: could not create unique index"):
            migrate(settings)
        assert validity(empty_url, "next_index") is False
        connection.execute("DELETE FROM tenant WHERE tenant_id = 'b'")
        with ThreadPoolExecutor(4) as pool:
            applied = [future.result(timeout=60) for future in [pool.submit(migrate, settings) for _ in range(4)]]
        assert sorted(applied) == [[], [], [], ["9999_next"]]
        assert validity(empty_url, "next_index") is True


def test_index_is_built_in_transaction_behind_pgbouncer(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({"HOLDFAST_PGBOUNCER": "1"}, database_url=empty_url)
    assert settings.session_url is None
    with_next(monkeypatch, "CREATE INDEX CONCURRENTLY next_index ON tenant (weight);", concurrently=True)
    with ThreadPoolExecutor(3) as pool:
        applied = [future.result(timeout=60) for future in [pool.submit(migrate, settings) for _ in range(3)]]
    own = sorted(name for names in applied for name in names if not name.startswith("langgraph"))
    assert own == applied_to(empty_url)
    assert own[-1] == "9999_next"
    assert migrate(settings) == []


@pytest.mark.parametrize("pgbouncer", ["0", "1"])
def test_index_that_langgraph_adds_later_is_built(empty_url: str, pgbouncer: str) -> None:
    """Behind PgBouncer alone it is built in a transaction, otherwise without one."""
    settings = load_settings({"HOLDFAST_PGBOUNCER": pgbouncer}, database_url=empty_url)
    migrate(settings)
    with psycopg.connect(empty_url, autocommit=True, options="-c search_path=holdfast") as connection:
        connection.execute("DROP INDEX checkpoints_thread_id_idx; DELETE FROM checkpoint_migrations WHERE v > 5")
        assert migrate(settings) == ["langgraph checkpoints 6 to 9"]
        built = connection.execute("SELECT to_regclass('checkpoints_thread_id_idx') IS NOT NULL").fetchone()
        assert built == (True,)
        assert connection.execute("SELECT max(v) FROM checkpoint_migrations").fetchone() == (9,)
    assert migrate(settings) == []


def test_older_version_starts_while_index_is_built(
    empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version waits for its lock inside a statement, with a snapshot. The build would wait for the
    snapshot."""
    older = unpack_older_version(tmp_path)
    settings = load_settings({}, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, NEXT_INDEX, concurrently=True)
    with ThreadPoolExecutor(1) as pool, psycopg.connect(empty_url, autocommit=True) as other:
        with snapshot_held(empty_url):
            building = pool.submit(migrate, settings)
            wait_for(other, BUILD_WAITS)
            subprocess.run(
                [sys.executable, "-m", "holdfast", "migrate"],
                env={**os.environ, **older, "DATABASE_URL": empty_url},
                cwd=tmp_path,
                check=True,
                timeout=30,
            )
            assert not building.done()
        assert building.result(timeout=60) == ["9999_next"]
        assert other.execute(INVALID_INDEXES).fetchall() == []


@contextmanager
def deadlock(url: str) -> Iterator[Callable[[], None]]:
    """The next build waits for another session, which waits for the migrating process. Postgres ends the build.

    Yields a function that ends the other session's wait.
    """
    with (
        psycopg.connect(url, autocommit=True) as look,
        psycopg.connect(url, options="-c search_path=holdfast") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        # Postgres ends the session that detects the deadlock: the build, because its deadlock_timeout is shorter.
        look.execute(f"ALTER DATABASE {look.info.dbname} SET deadlock_timeout = '3s'".encode())
        other.execute("SET deadlock_timeout = '1h'")
        other.execute("INSERT INTO tenant (tenant_id) VALUES ('a')")

        def wait_for_the_process() -> None:
            wait_for(look, BUILD_WAITS)
            with suppress(psycopg.errors.QueryCanceled):
                other.execute(f"SELECT pg_advisory_xact_lock({SESSION_KEY})", ("holdfast",))
            other.rollback()

        waiting = pool.submit(wait_for_the_process)

        def end() -> None:
            other.cancel_safe()
            waiting.result(timeout=60)

        yield end
        end()


def test_index_build_is_repeated_after_deadlock(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({}, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, NEXT_INDEX, concurrently=True)
    with deadlock(empty_url) as end, capture_logs() as logs, psycopg.connect(empty_url) as other:
        monkeypatch.setattr("holdfast.db.migrate.time.sleep", lambda _: end())
        assert migrate(settings) == ["9999_next"]
        assert other.execute(INVALID_INDEXES).fetchall() == []
    assert [(line["event"], line["migration"]) for line in logs] == [("migration.waiting", "Migration 9999_next")]
    assert "deadlock" in logs[0]["reason"]


def test_migration_fails_by_name_after_repeated_deadlocks(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({}, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, NEXT_INDEX, concurrently=True)
    monkeypatch.setattr("holdfast.db.migrate.BUILD_ATTEMPTS", 1)
    with deadlock(empty_url), pytest.raises(DatabaseError, match="Migration 9999_next failed: deadlock detected"):
        migrate(settings)
    assert migrate(settings) == ["9999_next"]


def interrupt_a_build(url: str, statement: str) -> None:
    """Cancel the build of an index, which leaves an invalid index behind."""
    with (
        psycopg.connect(url, autocommit=True, options="-c search_path=holdfast") as building,
        psycopg.connect(url, autocommit=True) as look,
        ThreadPoolExecutor(1) as pool,
        snapshot_held(url),
    ):
        interrupted = pool.submit(building.execute, statement.encode())
        wait_for(look, BUILD_WAITS)
        building.cancel_safe()
        with pytest.raises(psycopg.errors.QueryCanceled):
            interrupted.result(timeout=60)
        assert len(look.execute(INVALID_INDEXES).fetchall()) == 1


@pytest.mark.parametrize("condition", ["", "IF NOT EXISTS "])
@pytest.mark.parametrize("pgbouncer", ["0", "1"])
def test_invalid_index_is_rebuilt(
    empty_url: str, monkeypatch: pytest.MonkeyPatch, pgbouncer: str, condition: str
) -> None:
    settings = load_settings({"HOLDFAST_PGBOUNCER": pgbouncer}, database_url=empty_url)
    migrate(settings)
    statement = f"CREATE INDEX CONCURRENTLY {condition}next_index ON tenant (weight);"
    with_next(monkeypatch, statement, concurrently=True)
    interrupt_a_build(empty_url, statement)
    assert migrate(settings) == ["9999_next"]
    assert validity(empty_url, "next_index") is True


@pytest.mark.parametrize("pgbouncer", ["0", "1"])
def test_valid_unrecorded_index_is_kept(empty_url: str, monkeypatch: pytest.MonkeyPatch, pgbouncer: str) -> None:
    """A process may end between the build of an index and its record."""
    settings = load_settings({"HOLDFAST_PGBOUNCER": pgbouncer}, database_url=empty_url)
    migrate(settings)
    with_next(monkeypatch, NEXT_INDEX, concurrently=True)
    with psycopg.connect(empty_url, autocommit=True, options="-c search_path=holdfast") as connection:
        connection.execute(NEXT_INDEX.encode())
    assert migrate(settings) == ["9999_next"]
    assert validity(empty_url, "next_index") is True


@pytest.mark.parametrize("pgbouncer", ["0", "1"])
def test_invalid_index_of_langgraph_is_rebuilt(empty_url: str, pgbouncer: str) -> None:
    settings = load_settings({"HOLDFAST_PGBOUNCER": pgbouncer}, database_url=empty_url)
    migrate(settings)
    name = "checkpoints_thread_id_idx"
    with psycopg.connect(empty_url, autocommit=True, options="-c search_path=holdfast") as connection:
        connection.execute(f"DROP INDEX {name}; DELETE FROM checkpoint_migrations WHERE v > 5".encode())
    interrupt_a_build(empty_url, f"CREATE INDEX CONCURRENTLY {name} ON checkpoints (thread_id)")
    assert migrate(settings) == ["langgraph checkpoints 6 to 9"]
    assert validity(empty_url, name) is True
