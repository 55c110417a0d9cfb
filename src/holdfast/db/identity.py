"""Which database a connection leads to.

LISTEN, leadership and migrations go to DIRECT_DATABASE_URL, runs to DATABASE_URL. If these are different databases, one
of them has no tables, or workers wait for ever for runs that are in the other one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.rows import tuple_row

RULE = "Both must lead to the same database; only DIRECT_DATABASE_URL goes past PgBouncer"

# One statement for each field. The last two cannot be read everywhere: operators can withdraw the rights, and some
# services that speak Postgres's protocol lack the function.
NAME = "SELECT current_database()"
OID = "SELECT oid::text FROM pg_database WHERE datname = current_database()"
SYSTEM = "SELECT system_identifier::text FROM pg_control_system()"
NOT_READABLE = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.FeatureNotSupported,
)


class Identity(NamedTuple):
    """What tells a database from others. None: the role may not read it."""

    name: str | None
    oid: str | None
    system: str | None
    """The identifier of the server's data. A standby and a restored copy have that of the original."""


def read_identity(connection: Connection[Any]) -> Identity:
    """Over a connection in autocommit, also through PgBouncer."""
    return Identity(*(_read(connection, statement) for statement in (NAME, OID, SYSTEM)))


async def read_identity_async(connection: AsyncConnection[Any]) -> Identity:
    return Identity(*[await _read_async(connection, statement) for statement in (NAME, OID, SYSTEM)])


def difference(pooled: Identity, direct: Identity) -> str | None:
    """How the databases of DATABASE_URL and DIRECT_DATABASE_URL differ, in words; None if they do not."""
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
