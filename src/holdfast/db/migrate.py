"""Migrations: numbered SQL files, applied once each, safe when many processes start at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources

import psycopg
from psycopg import Connection, sql
from psycopg.rows import dict_row

from holdfast.db import rights
from holdfast.db.connect import check_server, connection_parameters
from holdfast.errors import DatabaseError
from holdfast.settings import Settings

# Held to the end of the transaction by whoever changes the schema.
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('holdfast migrate ' || %s, 0))"


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    statements: str


def migrations() -> list[Migration]:
    """All migrations of this version, in order."""
    found = [
        Migration(int(match[1]), file.name.removesuffix(".sql"), file.read_text("utf-8"))
        for file in resources.files("holdfast.db").joinpath("migrations").iterdir()
        if (match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name))
    ]
    return sorted(found, key=lambda migration: migration.number)


def migrate(settings: Settings) -> list[str]:
    """Bring the schema up to date and return the names of what was applied.

    Everything happens in one transaction under one advisory lock: ten processes that start together apply each
    migration once, and a failure leaves the schema as it was.
    """
    try:
        connection = Connection.connect(connection_parameters(settings, "migrate"), autocommit=True)
    except psycopg.OperationalError as error:
        raise DatabaseError(f"DATABASE_URL cannot be connected to: {str(error).strip()}") from None
    with connection:
        check_server(connection)
        try:
            with connection.transaction():
                return _apply_all(connection, settings.db_schema)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
            raise _missing_rights(connection, settings.db_schema, error) from None


def _missing_rights(connection: Connection, schema: str, error: psycopg.Error) -> DatabaseError:
    """What the role may not do, and the statement that allows it."""
    role = connection.info.user
    with connection.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(rights.SCHEMA_RIGHTS, rights.parameters(schema)).fetchone()
        tables = cursor.execute(rights.TABLE_RIGHTS, rights.parameters(schema)).fetchall()
    problems, grants = [], []
    if found is None:
        problems.append(f"The schema {schema} (DATABASE_SCHEMA) does not exist, and the role {role} may not create it.")
        grants.append(rights.create_schema(schema, role))
    elif found["lacking"]:
        problems.append(f"The role {role} lacks {' and '.join(found['lacking'])} on the schema {schema}.")
        grants.append(rights.schema_grant(schema, role))
    if lacking := rights.lacking_on_tables(tables):
        problems.append(f"The role {role} lacks rights on tables of the schema {schema}: {lacking}.")
        grants.append(rights.table_grant(schema, role))
    if grants:
        return DatabaseError(f"{' '.join(problems)} Run as the owner of the database: {' '.join(grants)}")
    if (owner := rights.other_owner(tables)) is not None:
        problem = f"The schema {schema} needs migrations, and the role {role} does not own its tables."
        return DatabaseError(f"{problem} {rights.owner_remedy(owner, role)}")
    return DatabaseError(f"The role {role} may not migrate the schema {schema}: {error.diag.message_primary}.")


def _apply_all(connection: Connection, schema: str) -> list[str]:
    name = sql.Identifier(schema)
    connection.execute(LOCK, (schema,))
    # A role that may not create schemas can still use one made for it.
    if connection.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone() == (None,):
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(name))
    connection.execute(sql.SQL("SET LOCAL search_path TO {}").format(name))
    _require_table_rights(connection, schema)
    _create_once(
        connection,
        "holdfast_migration",
        "(number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())",
    )
    done = {row[0] for row in connection.execute("SELECT number FROM holdfast_migration")}
    applied = []
    for migration in migrations():
        if migration.number in done:
            continue
        connection.execute(migration.statements.encode())
        connection.execute(
            "INSERT INTO holdfast_migration (number, name) VALUES (%s, %s)",
            (migration.number, migration.name),
        )
        applied.append(migration.name)
    return applied + _apply_checkpoint_tables(connection) + _apply_store_tables(connection)


def _require_table_rights(connection: Connection, schema: str) -> None:
    """Raise InsufficientPrivilege if a table exists that the role may not use. Every command and every process migrates
    first, so none of them meets such a table later."""
    with connection.cursor(row_factory=dict_row) as cursor:
        tables = cursor.execute(rights.TABLE_RIGHTS, rights.parameters(schema)).fetchall()
    if lacking := rights.lacking_on_tables(tables):
        raise psycopg.errors.InsufficientPrivilege(lacking)


def _create_once(connection: Connection, table: str, columns: str) -> None:
    """Create a table that does not exist. Not by IF NOT EXISTS: that needs CREATE on the schema in any case, and a role
    that only uses the tables may start a server when there is nothing to migrate."""
    if connection.execute("SELECT to_regclass(%s)", (table,)).fetchone() == (None,):
        connection.execute(f"CREATE TABLE {table} {columns}".encode())


def _apply_checkpoint_tables(connection: Connection) -> list[str]:
    """The stock Postgres saver's own migrations, recorded in its own table, so that it can use the tables too.

    Its index builds are CONCURRENTLY, which no transaction may contain. Without that word they lock a table that
    is empty here, or was fully migrated already.
    """
    from langgraph.checkpoint.postgres.base import BasePostgresSaver

    steps = BasePostgresSaver.MIGRATIONS
    _create_once(connection, "checkpoint_migrations", "(v integer PRIMARY KEY)")
    row = connection.execute("SELECT max(v) FROM checkpoint_migrations").fetchone()
    first = 0 if row is None or row[0] is None else row[0] + 1
    for number, step in enumerate(steps[first:], start=first):
        connection.execute(step.replace(" CONCURRENTLY", "").encode())
        connection.execute("INSERT INTO checkpoint_migrations (v) VALUES (%s)", (number,))
    return [f"langgraph checkpoints {first} to {len(steps) - 1}"] if first < len(steps) else []


def _apply_store_tables(connection: Connection) -> list[str]:
    """The same for the stock Postgres store. The tables of semantic search depend on the project, and are made by the
    processes that know it."""
    from langgraph.store.postgres.base import BasePostgresStore

    steps = BasePostgresStore.MIGRATIONS
    _create_once(connection, "store_migrations", "(v integer PRIMARY KEY)")
    row = connection.execute("SELECT max(v) FROM store_migrations").fetchone()
    first = 0 if row is None or row[0] is None else row[0] + 1
    for number, step in enumerate(steps[first:], start=first):
        connection.execute(step.replace(" CONCURRENTLY", "").encode())
        connection.execute("INSERT INTO store_migrations (v) VALUES (%s)", (number,))
    kind = connection.execute(
        "SELECT atttypid::regtype::text FROM pg_attribute "
        "WHERE attrelid = 'store'::regclass AND attname = 'ttl_minutes'"
    ).fetchone()
    if kind == ("integer",):
        # The stock store takes fractions of minutes and rounds them here: half a minute, refreshed, is over at once.
        connection.execute("ALTER TABLE store ALTER COLUMN ttl_minutes TYPE double precision")
    return [f"langgraph store {first} to {len(steps) - 1}"] if first < len(steps) else []
