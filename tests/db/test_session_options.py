"""Sessions set the options that Holdfast depends on, independent of the defaults of the role and the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest

from holdfast.cli.ended_processes import EndedProcessReporter
from holdfast.db.connect import Database, open_blocking_session, open_session, with_session_options
from holdfast.settings import Settings
from holdfast.worker.replacement import _hand_over
from tests.engine.scene import REGISTER
from tests.support.live_worker import quick_settings

HARMFUL = {
    "statement_timeout": "1500",
    "lock_timeout": "1500",
    "idle_in_transaction_session_timeout": "1500",
    "default_transaction_isolation": "serializable",
    "standard_conforming_strings": "off",
    "search_path": "nowhere",
    "TimeZone": "Pacific/Auckland",
    "DateStyle": "German",
    "synchronous_commit": "off",
}
# Known to Postgres 17 and later.
HARMFUL_SINCE_17 = {"transaction_timeout": "1500"}
LIMITS = ["lock_timeout", "transaction_timeout"]
NAMES = ["statement_timeout", "lock_timeout", "transaction_isolation", "TimeZone", "DateStyle", "synchronous_commit"]
EXPECTED = ["0", "0", "read committed", "UTC", "ISO, MDY", "on"]
READ = "SELECT " + ", ".join(f"current_setting('{name}') AS \"{name}\"" for name in NAMES)


@pytest.fixture
def harmed_url(database_url: str) -> str:
    with psycopg.connect(database_url, autocommit=True) as connection:
        name = connection.info.dbname
        known = connection.info.server_version >= 170000
        for setting, value in {**HARMFUL, **(HARMFUL_SINCE_17 if known else {})}.items():
            connection.execute(f"ALTER DATABASE {name} SET {setting} = '{value}'".encode())
    return database_url


def given(row: Any) -> list[str]:
    return [row[name] for name in NAMES]


@pytest.mark.parametrize("pgbouncer", [False, True])
async def test_pool_overrides_defaults_of_database(harmed_url: str, pgbouncer: bool) -> None:
    settings = quick_settings(harmed_url).model_copy(update={"pgbouncer": pgbouncer})
    database = Database(settings, "test")
    await database.open()
    try:
        async with database.connection() as connection:
            assert given(await (await connection.execute(READ)).fetchone()) == EXPECTED
            await connection.execute("SELECT pg_sleep(2)")
        async with database.transaction() as connection:
            assert given(await (await connection.execute(READ)).fetchone()) == EXPECTED
            await connection.execute("SELECT pg_sleep(2)")
            await connection.execute("CREATE TABLE written (n integer)")
        async with database.pipelined_transaction() as connection:
            cursor = await connection.execute(READ)
            await connection.execute("INSERT INTO written VALUES (1)")
        assert given(await cursor.fetchone()) == EXPECTED
    finally:
        await database.close()


async def test_session_overrides_defaults_of_database(harmed_url: str) -> None:
    settings: Settings = quick_settings(harmed_url)
    session = await open_session(settings, "test", generic_plans=True)
    try:
        async with session.transaction():
            assert given(await (await session.execute(READ)).fetchone()) == EXPECTED
            await session.execute("SELECT pg_sleep(2)")
    finally:
        await session.close()


@pytest.mark.parametrize("pgbouncer", [False, True])
def test_blocking_session_overrides_defaults_of_database(harmed_url: str, pgbouncer: bool) -> None:
    settings = quick_settings(harmed_url).model_copy(update={"pgbouncer": pgbouncer})
    with open_blocking_session(settings, "test") as blocking, with_session_options(blocking, settings):
        assert given(blocking.execute(READ).fetchone()) == EXPECTED
        blocking.execute("SELECT pg_sleep(2)")
        blocking.execute("SELECT 1 FROM run")


@pytest.mark.parametrize("pgbouncer", [False, True])
@pytest.mark.parametrize("chosen", ["local", "remote_apply"])
async def test_safe_synchronous_commit_is_not_changed(database_url: str, chosen: str, pgbouncer: bool) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = '{chosen}'".encode())
    database = Database(quick_settings(database_url).model_copy(update={"pgbouncer": pgbouncer}), "test")
    await database.open()
    try:
        async with database.transaction() as connection:
            row = await (await connection.execute("SHOW synchronous_commit")).fetchone()
        assert row == {"synchronous_commit": chosen}
    finally:
        await database.close()


# Updates that take longer than the timeouts of the role.
SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(2); RETURN NEW; END $$;
CREATE TRIGGER slow BEFORE UPDATE ON worker FOR EACH ROW EXECUTE FUNCTION slow();
"""


def hand_over_runs(settings: Settings) -> None:
    _hand_over(settings, UUID(int=1), None, lambda _: None)


def report_end(settings: Settings) -> None:
    EndedProcessReporter(settings)._report("token")


@pytest.mark.parametrize("pgbouncer", [False, True])
@pytest.mark.parametrize("work", [hand_over_runs, report_end])
def test_writes_over_blocking_sessions_ignore_role_timeouts(
    harmed_url: str, work: Callable[[Settings], None], pgbouncer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its usual timeout is shorter than the slow write.
    monkeypatch.setattr("holdfast.cli.ended_processes.REPORT_TIMEOUT_SECONDS", 15.0)
    with psycopg.connect(harmed_url, autocommit=True, options="-c statement_timeout=0") as connection:
        connection.execute("SET search_path TO holdfast")
        connection.execute("SELECT set_config(name, '0', false) FROM pg_settings WHERE name = ANY(%s)", (LIMITS,))
        connection.execute(REGISTER, (UUID(int=1),))
        connection.execute("UPDATE worker SET process = 'token'")
        connection.execute(SLOW)
        work(quick_settings(harmed_url).model_copy(update={"pgbouncer": pgbouncer}))
        row = connection.execute("SELECT lease_until < now() OR ended_at IS NOT NULL FROM worker").fetchone()
    assert row == (True,)
