"""Checks that DATABASE_URL and DIRECT_DATABASE_URL lead to the same database.

LISTEN, leadership and migrations use DIRECT_DATABASE_URL; runs use DATABASE_URL. If these are different databases, one
of them has no tables, or workers wait for ever for runs that are in the other one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row

SAME_DATABASE_RULE = "Both must lead to the same database; only DIRECT_DATABASE_URL goes past PgBouncer"

# One statement for each field. The last two are not readable everywhere: operators can revoke the rights, and some
# services that speak Postgres's protocol lack the function.
NAME = "SELECT current_database()"
OID = "SELECT oid::text FROM pg_database WHERE datname = current_database()"
SYSTEM = "SELECT system_identifier::text FROM pg_control_system()"
NOT_READABLE = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.FeatureNotSupported,
)


class DatabaseIdentity(NamedTuple):
    """The values that distinguish a database from others. None: the role may not read the value."""

    name: str | None
    oid: str | None
    system: str | None
    """The identifier of the server's data. A standby and a restored copy have the same one as the original."""


def read_database_identity(connection: Connection[Any]) -> DatabaseIdentity:
    """Read the identity over a connection in autocommit. It may lead through PgBouncer."""
    return DatabaseIdentity(*(_read(connection, statement) for statement in (NAME, OID, SYSTEM)))


async def read_database_identity_async(connection: AsyncConnection[Any]) -> DatabaseIdentity:
    return DatabaseIdentity(*[await _read_async(connection, statement) for statement in (NAME, OID, SYSTEM)])


def difference(pooled: DatabaseIdentity, direct: DatabaseIdentity) -> str | None:
    """Describe the difference between the databases of DATABASE_URL and DIRECT_DATABASE_URL; None if there is none."""
    if all(None in pair or pair[0] == pair[1] for pair in zip(pooled, direct, strict=True)):
        return None
    where = f"{pooled.name} and {direct.name}" if pooled.name != direct.name else f"both are named {pooled.name}"
    return f"DATABASE_URL and DIRECT_DATABASE_URL lead to different databases ({where})"


def _read(connection: Connection[Any], statement: str) -> str | None:
    try:
        row = connection.cursor(row_factory=tuple_row).execute(statement.encode()).fetchone()
    except NOT_READABLE:
        return None
    return None if row is None else str(row[0])


async def _read_async(connection: AsyncConnection[Any], statement: str) -> str | None:
    try:
        row = await (await connection.cursor(row_factory=tuple_row).execute(statement.encode())).fetchone()
    except NOT_READABLE:
        return None
    return None if row is None else str(row[0])
