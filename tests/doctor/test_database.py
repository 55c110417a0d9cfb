"""The checks of the database, each against the fault it is for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

import pytest
from psycopg.conninfo import make_conninfo
from psycopg.errors import UniqueViolation

from holdfast.db.connect import open_session
from holdfast.db.rights import role_grants
from holdfast.errors import DatabaseError
from holdfast.insight.doctor.connections import check_connections
from holdfast.insight.doctor.database import (
    check_clock,
    check_database,
    check_direct_database,
    check_migrations,
    check_rights,
    version_finding,
)
from holdfast.insight.doctor.examination import Check, examine
from holdfast.insight.doctor.findings import Finding, Verdict
from holdfast.insight.doctor.installation import Installation
from holdfast.settings import load_settings

Execute = Callable[[str], None]


def changed(installation: Installation, **settings: object) -> Installation:
    return replace(installation, settings=installation.settings.model_copy(update=settings))


async def test_a_server_that_answers(installation: Installation) -> None:
    finding = await check_database(installation)
    assert finding.verdict is Verdict.PASS
    assert finding.found.startswith("PostgreSQL 18")


async def test_a_server_that_is_not_there(installation: Installation) -> None:
    nowhere = changed(installation, database_url="postgresql://127.0.0.1:9/nowhere")
    finding = await check_database(nowhere)
    assert finding.verdict is Verdict.FAIL
    assert "cannot be connected to" in finding.found
    assert "DATABASE_URL" in finding.fix


async def test_doctor_fails_a_database_that_is_not_utf8(installation: Installation, execute: Execute) -> None:
    name = f"ascii_{uuid4().hex[:12]}"
    execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'")
    try:
        url = make_conninfo(str(installation.settings.database_url), dbname=name)
        finding = await check_database(changed(installation, database_url=url))
    finally:
        execute(f"DROP DATABASE {name} WITH (FORCE)")
    assert finding.verdict is Verdict.FAIL
    assert "whose encoding is SQL_ASCII" in finding.found
    assert "ENCODING 'UTF8'" in finding.fix


async def test_direct_url_that_leads_to_another_database(installation: Installation, execute: Execute) -> None:
    url = str(installation.settings.database_url)
    assert (await check_direct_database(installation)).found == "not used: DIRECT_DATABASE_URL is not set"
    same = await check_direct_database(changed(installation, direct_database_url=url))
    assert same.verdict is Verdict.PASS
    name = f"other_{uuid4().hex[:12]}"
    execute(f"CREATE DATABASE {name}")
    try:
        other = changed(installation, direct_database_url=make_conninfo(url, dbname=name))
        finding = await check_direct_database(other)
    finally:
        execute(f"DROP DATABASE {name} WITH (FORCE)")
    assert finding.verdict is Verdict.FAIL
    assert "DATABASE_URL and DIRECT_DATABASE_URL lead to different databases" in finding.found
    assert finding.found.endswith(f" and {name})")
    gone = await check_direct_database(other)
    assert gone.verdict is Verdict.FAIL
    assert gone.found.startswith("DIRECT_DATABASE_URL cannot be connected to: ")


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(130012, Verdict.FAIL), (140000, Verdict.PASS), (180001, Verdict.PASS), (190000, Verdict.WARN)],
)
def test_versions(number: int, verdict: Verdict) -> None:
    assert version_finding(number).verdict is verdict


async def test_a_database_that_takes_no_writes(installation: Installation) -> None:
    url = make_conninfo(str(installation.settings.database_url), options="-c default_transaction_read_only=on")
    # The options that Holdfast connects with replace those of the URL, so the server has to be told.
    async with await installation.connect() as connection:
        name = connection.info.dbname
        await connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only TO on".encode())
    finding = await check_database(changed(installation, database_url=url))
    assert finding.verdict is Verdict.FAIL
    assert "takes no writes" in finding.found


async def test_the_owner_may_do_everything(installation: Installation) -> None:
    finding = await check_rights(installation)
    assert finding.verdict is Verdict.PASS, finding


async def test_a_role_without_rights(as_role: Installation, role: str, execute: Execute) -> None:
    closed = await check_rights(as_role)
    assert closed.verdict is Verdict.FAIL
    assert f"{role} lacks USAGE on the schema holdfast" in closed.found

    execute(f"GRANT USAGE, CREATE ON SCHEMA holdfast TO {role}")
    execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA holdfast TO {role}")
    execute(f"REVOKE INSERT, DELETE ON run FROM {role}")
    partial = await check_rights(as_role)
    assert partial.verdict is Verdict.FAIL
    assert "run (INSERT, DELETE)" in partial.found
    assert f"TO {role};" in partial.fix

    # What the fix says is enough to work with, now and after the next migration.
    for statement in partial.fix.split(";"):
        if statement:
            execute(statement)
    enough = await check_rights(as_role)
    assert enough.verdict is Verdict.PASS
    assert enough.found.endswith("tables of holdfast; postgres owns and migrates them")


@pytest.mark.parametrize("lacking", range(3), ids=["usage", "tables", "later tables"])
async def test_role_with_the_documented_grants_passes_and_each_that_is_missing_is_named(
    as_role: Installation, role: str, execute: Execute, lacking: int
) -> None:
    grants = role_grants("holdfast", role, owner="postgres")
    for number, grant in enumerate(grants):
        if number != lacking:
            execute(grant)
    finding = await check_rights(as_role)
    assert finding.verdict is (Verdict.WARN if lacking == 2 else Verdict.FAIL)
    assert finding.fix == grants[lacking]
    execute(grants[lacking])
    assert (await check_rights(as_role)).verdict is Verdict.PASS


async def test_role_that_does_not_own_all_tables_cannot_migrate(
    as_role: Installation, role: str, execute: Execute
) -> None:
    for grant in role_grants("holdfast", role, owner="postgres"):
        execute(grant)
    execute(f"ALTER TABLE run OWNER TO {role}")
    finding = await check_rights(as_role)
    assert finding.verdict is Verdict.WARN
    assert f"Run `holdfast migrate` as the role postgres, or GRANT postgres TO {role};" in finding.fix


async def test_missing_migrations_name_the_owner(as_role: Installation, role: str, execute: Execute) -> None:
    for grant in role_grants("holdfast", role, owner="postgres"):
        execute(grant)
    execute("DELETE FROM holdfast_migration WHERE number = 1")
    finding = await check_migrations(as_role)
    assert finding.verdict is Verdict.FAIL
    assert finding.fix == f"Run `holdfast migrate` as the role postgres, or GRANT postgres TO {role};"


async def test_a_schema_that_cannot_be_created(as_role: Installation, execute: Execute) -> None:
    elsewhere = changed(as_role, db_schema="elsewhere")
    assert (await check_rights(elsewhere)).verdict is Verdict.FAIL
    execute(f"GRANT CREATE ON DATABASE {await database_name(as_role)} TO {await role_name(as_role)}")
    assert (await check_rights(elsewhere)).verdict is Verdict.PASS


async def database_name(installation: Installation) -> str:
    async with await installation.connect() as connection:
        return connection.info.dbname


async def role_name(installation: Installation) -> str:
    async with await installation.connect() as connection:
        return connection.info.user


async def test_migrations_that_are_not_applied(installation: Installation, execute: Execute) -> None:
    assert (await check_migrations(installation)).verdict is Verdict.PASS
    execute("DELETE FROM holdfast_migration WHERE number = 6")
    finding = await check_migrations(installation)
    assert finding.verdict is Verdict.FAIL
    assert "0006_webhooks" in finding.found
    assert "holdfast migrate" in finding.fix


async def test_migrations_that_the_role_may_not_see_are_not_missing(
    as_role: Installation, role: str, execute: Execute
) -> None:
    async def found() -> Finding:
        [finding] = [one async for one in examine(as_role, [Check("migrations", check_migrations)])]
        return finding

    closed = await found()
    assert (closed.verdict, closed.fix) == (Verdict.SKIP, "See rights.")
    assert f"{role} lacks USAGE on the schema holdfast" in closed.found
    execute(f"GRANT USAGE ON SCHEMA holdfast TO {role}")
    unreadable = await found()
    assert (unreadable.verdict, unreadable.fix) == (Verdict.SKIP, "See rights.")
    assert "permission denied for table" in unreadable.found


async def test_migrations_of_a_schema_that_cannot_be_created_need_rights_first(as_role: Installation) -> None:
    finding = await check_migrations(changed(as_role, db_schema="elsewhere"))
    assert (finding.verdict, finding.fix) == (Verdict.SKIP, "See rights.")


SECRET = "TOPSECRET"
MALFORMED = [
    f"mysql://u:{SECRET}@h/d",
    f"postgresql+psycopg://u:{SECRET}@h/d",
    f"postgresql://u:{SECRET}@127.0.0.1:notaport/db",
    f"postgresql://u:{SECRET}/x@127.0.0.1/db",
    f"postgresql://u:{SECRET}@{SECRET}@127.0.0.1/db",
    f"postgresql://u:{SECRET} {SECRET}@127.0.0.1/db",
    f"postgresql://u:{SECRET}%zz@127.0.0.1/db",
    f"postgres://u:{SECRET}@[::1/db",
    f"host=127.0.0.1 pasword={SECRET}",
    SECRET,
]


@pytest.mark.parametrize("dsn", MALFORMED)
async def test_malformed_dsn_is_explained_and_not_shown(installation: Installation, dsn: str) -> None:
    finding = await check_database(changed(installation, database_url=dsn))
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith("DATABASE_URL ")
    assert "Correct the variable" in finding.fix
    assert SECRET not in finding.found + finding.fix
    direct = changed(installation, direct_database_url=dsn)
    with pytest.raises(DatabaseError, match=r"^DIRECT_DATABASE_URL ") as refused:
        await open_session(direct.settings, "test")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(("table", "named"), [("checkpoint_migrations", "checkpoints"), ("store_migrations", "store")])
async def test_migrations_of_langgraph(installation: Installation, execute: Execute, table: str, named: str) -> None:
    execute(f"DELETE FROM {table} WHERE v = (SELECT max(v) FROM {table})")
    finding = await check_migrations(installation)
    assert finding.verdict is Verdict.FAIL
    assert f"langgraph {named}" in finding.found


async def test_a_schema_that_was_never_migrated(installation: Installation) -> None:
    finding = await check_migrations(changed(installation, db_schema="empty"))
    assert finding.verdict is Verdict.FAIL
    assert "never" in finding.found


async def test_invalid_indexes_are_mended_by_the_statements_that_are_printed(
    installation: Installation, execute: Execute
) -> None:
    execute("INSERT INTO tenant (tenant_id) VALUES ('a'), ('b')")
    # The second leaves a copy of the index behind as well.
    for interrupted in (
        "CREATE UNIQUE INDEX CONCURRENTLY next_index ON tenant (weight)",
        "REINDEX INDEX CONCURRENTLY next_index",
    ):
        with pytest.raises(UniqueViolation):
            execute(interrupted)
    execute("DELETE FROM tenant")
    finding = await check_migrations(installation)
    assert finding.verdict is Verdict.WARN
    assert "the index holdfast.next_index is invalid" in finding.found
    assert finding.fix == (
        "REINDEX INDEX CONCURRENTLY holdfast.next_index; DROP INDEX CONCURRENTLY holdfast.next_index_ccnew;"
    )
    for statement in finding.fix.removesuffix(";").split(";"):
        execute(statement)
    assert (await check_migrations(installation)).verdict is Verdict.PASS


async def test_migrations_of_a_newer_version(installation: Installation, execute: Execute) -> None:
    execute("INSERT INTO holdfast_migration (number, name) VALUES (9001, '9001_future')")
    finding = await check_migrations(installation)
    assert finding.verdict is Verdict.WARN
    assert "9001_future" in finding.found


@pytest.mark.parametrize(
    ("off", "verdict", "says"),
    [
        (0.0, Verdict.PASS, ""),
        (-30.0, Verdict.WARN, "ahead of"),
        (30.0, Verdict.WARN, "behind"),
        (3600.0, Verdict.FAIL, "behind"),
    ],
)
async def test_doctor_compares_the_clocks(installation: Installation, off: float, verdict: Verdict, says: str) -> None:
    wrong = replace(installation, clock=lambda: time.time() + off)
    finding = await check_clock(wrong)
    assert finding.verdict is verdict, finding
    assert says in finding.found


async def test_room_for_all_connections(installation: Installation) -> None:
    finding = await check_connections(installation)
    assert finding.verdict is Verdict.PASS, finding
    assert "1 worker and 1 web process may open 26 connections" in finding.found


async def test_pools_too_large_for_the_server(installation: Installation) -> None:
    finding = await check_connections(changed(installation, pool_max=1000))
    assert finding.verdict is Verdict.FAIL
    assert "max_connections leaves" in finding.found


async def test_limits_of_the_role_and_the_database(as_role: Installation, role: str, execute: Execute) -> None:
    execute(f"ALTER ROLE {role} CONNECTION LIMIT 20")
    of_role = await check_connections(as_role)
    assert of_role.verdict is Verdict.FAIL
    assert f"the limit of the role {role} leaves 20" in of_role.found
    execute(f"ALTER DATABASE {await database_name(as_role)} CONNECTION LIMIT 30")
    execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
    of_database = await check_connections(as_role)
    assert of_database.verdict is Verdict.WARN, of_database
    assert "leaves 30" in of_database.found


async def test_every_known_worker_counts(installation: Installation, execute: Execute) -> None:
    execute(
        "INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until) "
        "SELECT gen_random_uuid(), 'online', 'h', n, '0', 1, '{}', now() + interval '1 hour' "
        "FROM generate_series(1, 30) AS n"
    )
    finding = await check_connections(installation)
    assert finding.verdict is Verdict.FAIL
    assert "30 workers and 1 web process may open 432 connections" in finding.found


async def test_pools_behind_pgbouncer_do_not_count(installation: Installation) -> None:
    url = installation.settings.database_url
    behind = load_settings({}, database_url=url, direct_database_url=url, pgbouncer=True, pool_max=1000)
    finding = await check_connections(replace(installation, settings=behind))
    assert finding.verdict is Verdict.PASS, finding
    through = await check_connections(changed(replace(installation, settings=behind), direct_database_url=None))
    assert through.verdict is Verdict.PASS
    assert "all go through PgBouncer" in through.found
