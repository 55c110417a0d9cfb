"""Checks of the database: connection, version, rights, migrations and clock."""

from __future__ import annotations

import psycopg

from holdfast.db import rights
from holdfast.db.connect import CREATE_DATABASE, MINIMUM_SERVER, encoding_problem
from holdfast.db.database_identity import SAME_DATABASE_RULE, difference, read_database_identity_async
from holdfast.db.migrate import migrations
from holdfast.errors import DatabaseError
from holdfast.insight.doctor.findings import Finding, Problem, Verdict, failed, passed, skipped, summed_up, warned
from holdfast.insight.doctor.installation import Installation, brief

# The newest major version that the tests run on.
NEWEST_TESTED = 18
# Leases use the database's clock, so an offset loses no run. But log lines of different machines do not sort, and
# receivers of webhooks refuse a signature that is minutes old.
CLOCK_WARN_SECONDS, CLOCK_FAIL_SECONDS = 1.0, 60.0

ABOUT = "SELECT pg_is_in_recovery() AS standby, current_setting('transaction_read_only') AS read_only"

SCHEMA = """
SELECT to_regnamespace(%(schema)s) IS NOT NULL AS there,
       current_user AS role, current_database() AS database,
       has_database_privilege(current_database(), 'CREATE') AS may_create_schema
"""

# Leaves out indexes that are being built; `index_relid` is NULL if another role builds the index. An interrupted
# REINDEX CONCURRENTLY leaves a copy behind that can be dropped.
INVALID_INDEXES = """
SELECT format('%%I.%%I', nspname, relname) AS name, relname ~ '_cc(new|old)[0-9]*$' AS copy
FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = %(schema)s AND NOT indisvalid
  AND NOT EXISTS (SELECT 1 FROM pg_stat_progress_create_index
                  WHERE datname = current_database() AND coalesce(index_relid, indexrelid) = indexrelid)
ORDER BY relname
"""

NOW = "SELECT extract(epoch FROM clock_timestamp())::float8 AS now"


async def check_database(installation: Installation) -> Finding:
    """Whether the database answers, takes writes, and has a supported encoding and version."""
    if installation.absent:
        return warned(installation.absent, "Set DATABASE_URL, or start `holdfast dev` or `holdfast serve` here.")
    if installation.unusable:
        return failed(installation.unusable, "Correct this first: `holdfast dev` and `holdfast serve` need it, too.")
    try:
        async with await installation.connect() as connection:
            number, encoding = connection.info.server_version, encoding_problem(connection.info)
            about = await (await connection.execute(ABOUT)).fetchone()
    except DatabaseError as error:
        return failed(str(error), "Correct the variable, in the environment or in `env` of langgraph.json.")
    except psycopg.errors.OperationalError as error:
        return failed(
            f"cannot be connected to: {brief(error)}",
            "Correct DATABASE_URL, start the server, or let this machine in (pg_hba.conf, firewall).",
        )
    assert about is not None
    if about["standby"] or about["read_only"] == "on":
        return failed(
            "it takes no writes: it is a standby, or set to read only",
            "Point DATABASE_URL at the primary (target_session_attrs=read-write finds it among several hosts).",
        )
    if encoding is not None:
        return failed(f"a database {encoding}", f"Create another, and point DATABASE_URL at it: {CREATE_DATABASE}")
    return version_finding(number)


async def check_direct_database(installation: Installation) -> Finding:
    """Whether DIRECT_DATABASE_URL leads to the same database as DATABASE_URL."""
    if installation.settings.direct_database_url is None:
        return passed("not used: DIRECT_DATABASE_URL is not set")
    async with await installation.connect() as connection:
        pooled = await read_database_identity_async(connection)
    try:
        async with await installation.connect(session=True) as connection:
            direct = await read_database_identity_async(connection)
    except DatabaseError as error:
        return failed(str(error), "Correct the variable, in the environment or in `env` of langgraph.json.")
    except psycopg.errors.OperationalError as error:
        return failed(
            f"DIRECT_DATABASE_URL cannot be connected to: {brief(error)}",
            "Correct DIRECT_DATABASE_URL, or let this machine in (pg_hba.conf, firewall).",
        )
    if (problem := difference(pooled, direct)) is not None:
        return failed(problem, f"{SAME_DATABASE_RULE}. No process starts until then.")
    return passed("DIRECT_DATABASE_URL leads to the same database")


def version_finding(number: int) -> Finding:
    """The finding about a server of this version, in libpq's notation (160004)."""
    major = number // 10000
    if number < MINIMUM_SERVER:
        return failed(f"PostgreSQL {major}", f"Holdfast needs {MINIMUM_SERVER // 10000} or later: upgrade the server.")
    if major > NEWEST_TESTED:
        return warned(
            f"PostgreSQL {major}, newer than any that was tried",
            f"{NEWEST_TESTED} is the newest that the tests run on.",
        )
    return passed(f"PostgreSQL {major} answers")


async def check_rights(installation: Installation) -> Finding:
    """Whether the role may use the schema and its tables, and migrate them."""
    schema = {"schema": installation.settings.db_schema}
    name = installation.settings.db_schema
    async with installation.reading(tables=False) as connection:
        about = await (await connection.execute(SCHEMA, schema)).fetchone()
        assert about is not None
        if not about["there"]:
            if about["may_create_schema"]:
                return passed(f"{about['role']} may create the schema {name}")
            return failed(
                f"the schema {name} does not exist, and {about['role']} may not create it",
                rights.create_schema(name, about["role"]),
            )
        found_rights = await (await connection.execute(rights.SCHEMA_RIGHTS, rights.parameters(name))).fetchone()
        tables = await (await connection.execute(rights.TABLE_RIGHTS, rights.parameters(name))).fetchall()
        owner = rights.other_owner(tables)
        later = await (await connection.execute(rights.LATER_TABLES, {**schema, "owner": owner})).fetchone()
    assert found_rights is not None
    assert later is not None
    problems = []
    role, lacking, foreign = about["role"], found_rights["lacking"], sum(not table["owned"] for table in tables)
    if owner is not None and foreign == len(tables):
        # The owner migrates. This role does not need to create tables.
        lacking = [right for right in lacking if right != "CREATE"]
    if lacking:
        verdict = Verdict.FAIL if "USAGE" in lacking else Verdict.WARN
        found = f"{role} lacks {' and '.join(lacking)} on the schema {name}"
        fix = rights.schema_grant(name, role) if "CREATE" in lacking else rights.usage_grant(name, role)
        problems.append(Problem(verdict, found, fix))
    if closed := rights.lacking_on_tables(tables):
        problems.append(Problem(Verdict.FAIL, f"{role} lacks rights on {closed}", rights.table_grant(name, role)))
    if owner is None:
        return summed_up(problems, f"{role} may use and migrate the {len(tables)} tables of {name}")
    if foreign < len(tables):
        found = f"{role} does not own {foreign} of {len(tables)} tables, and cannot migrate them"
        problems.append(Problem(Verdict.WARN, found, rights.owner_remedy(owner, role)))
    if not later["usable"]:
        found = f"{role} may not use the tables that {owner} creates in later migrations"
        problems.append(Problem(Verdict.WARN, found, rights.later_tables_grant(name, role, owner=owner)))
    return summed_up(problems, f"{role} may use the {len(tables)} tables of {name}; {owner} owns and migrates them")


async def check_migrations(installation: Installation) -> Finding:
    """Whether all migrations of this version are applied, and all indexes are valid."""
    from langgraph.checkpoint.postgres.base import BasePostgresSaver
    from langgraph.store.postgres.base import BasePostgresStore

    ours = {migration.number: migration.name for migration in migrations()}
    fix = "Run `holdfast migrate` (`dev`, `serve`, `web` and `worker` do so when they start)."
    async with installation.reading() as connection:
        try:
            rows = await (await connection.execute("SELECT number, name FROM holdfast_migration")).fetchall()
            saver = await (await connection.execute("SELECT max(v) AS v FROM checkpoint_migrations")).fetchone()
            store = await (await connection.execute("SELECT max(v) AS v FROM store_migrations")).fetchone()
            schema = {"schema": installation.settings.db_schema}
            invalid = await (await connection.execute(INVALID_INDEXES, schema)).fetchall()
        except psycopg.errors.UndefinedTable:
            rows = None
    if rows is None:
        return await _never_migrated(installation, fix)
    applied = {row["number"]: row["name"] for row in rows}
    missing = [name for number, name in ours.items() if number not in applied]
    for what, row, steps in (
        ("checkpoints", saver, BasePostgresSaver.MIGRATIONS),
        ("store", store, BasePostgresStore.MIGRATIONS),
    ):
        if row is None or row["v"] is None or row["v"] < len(steps) - 1:
            missing.append(f"langgraph {what}")
    if missing:
        return failed(f"not applied: {', '.join(missing)}", await _migration_by_owner(installation, fix))
    problems = []
    newer = [name for number, name in applied.items() if number not in ours]
    if newer:
        fix = "Versions run side by side during a deploy. Afterwards, upgrade this one too."
        problems.append(Problem(Verdict.WARN, f"applied by a newer version: {', '.join(newer)}", fix))
    for index in invalid:
        fix = f"{'DROP' if index['copy'] else 'REINDEX'} INDEX CONCURRENTLY {index['name']};"
        found = f"the index {index['name']} is invalid, so no statement uses it: its build was interrupted"
        problems.append(Problem(Verdict.WARN, found, fix))
    return summed_up(problems, f"all {len(ours)} are applied")


async def _migration_by_owner(installation: Installation, fix: str) -> str:
    """`fix`, or how to migrate as the role that owns the tables."""
    async with installation.reading(tables=False) as connection:
        about = await (await connection.execute(SCHEMA, {"schema": installation.settings.db_schema})).fetchone()
        parameters = rights.parameters(installation.settings.db_schema)
        owner = rights.other_owner(await (await connection.execute(rights.TABLE_RIGHTS, parameters)).fetchall())
    return fix if about is None or owner is None else rights.owner_remedy(owner, about["role"])


async def _never_migrated(installation: Installation, fix: str) -> Finding:
    name = installation.settings.db_schema
    async with installation.reading(tables=False) as connection:
        about = await (await connection.execute(SCHEMA, {"schema": name})).fetchone()
    assert about is not None
    if about["there"] or about["may_create_schema"]:
        return failed(f"the schema {name} has never been migrated", fix)
    return skipped(f"the schema {name} does not exist, and {about['role']} may not create it", "See rights.")


async def check_clock(installation: Installation) -> Finding:
    """How far this machine's clock is from the database's."""
    tries = []
    async with await installation.connect() as connection:
        for _ in range(3):
            before = installation.clock()
            row = await (await connection.execute(NOW)).fetchone()
            after = installation.clock()
            assert row is not None
            tries.append((after - before, row["now"] - (before + after) / 2))
    # The shortest round trip gives the most exact offset.
    spread, offset = min(tries)
    found = f"the database is {abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} this machine"
    found += f" (give or take {spread / 2:.3f} s)"
    fix = "Have both set by NTP (chrony, systemd-timesyncd). The database's clock decides about leases and due times."
    distance = abs(offset) - spread / 2
    if distance > CLOCK_FAIL_SECONDS:
        return failed(found, fix)
    return warned(found, fix) if distance > CLOCK_WARN_SECONDS else passed(found)
