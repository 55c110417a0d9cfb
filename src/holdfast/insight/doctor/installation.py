"""What the checks examine: the settings, the project, and the database of the settings."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import DictRow, dict_row

from holdfast.db.connect import connection_parameters
from holdfast.settings import Settings

# Returns a row if the schema exists and the role may not use it.
CLOSED = """
SELECT current_user AS role FROM pg_namespace
WHERE nspname = %(schema)s AND NOT has_schema_privilege(oid, 'USAGE')
"""


@dataclass(frozen=True)
class Installation:
    """One installation, as seen from this machine."""

    settings: Settings
    config: Path | None = None
    """The project's langgraph.json, or None if this directory has none."""
    absent: str = ""
    """Why there is no database yet; empty if there is one."""
    unusable: str = ""
    """Why the embedded Postgres does not start; empty if it does."""
    check_timeout_seconds: float = 10.0
    clock: Callable[[], float] = time.time
    """The clock of this machine. Tests replace it."""

    async def connect(self, *, session: bool = False) -> AsyncConnection[DictRow]:
        """Open a connection for one check, so that a connection that hangs or breaks affects no other check."""
        direct = session and self.settings.session_url is not None
        return await AsyncConnection.connect(
            connection_parameters(self.settings, "doctor", session=direct),
            autocommit=True,
            row_factory=dict_row,
            prepare_threshold=None,
        )

    @asynccontextmanager
    async def reading(self, *, tables: bool = True) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A read-only transaction with a statement timeout.

        `tables` says that the check reads Holdfast's tables. Then this raises InsufficientPrivilege if the role may not
        use their schema; Postgres itself would say that the tables do not exist.
        """
        async with await self.connect() as connection, connection.transaction(force_rollback=True):
            await connection.execute("SET TRANSACTION READ ONLY")
            await connection.execute(
                sql.SQL("SET LOCAL search_path TO {}").format(sql.Identifier(self.settings.db_schema))
            )
            await connection.execute(
                sql.SQL("SET LOCAL statement_timeout TO {}").format(
                    sql.Literal(f"{self.check_timeout_seconds * 1000:.0f}ms")
                )
            )
            # Counting may need a sequential scan, which the settings of our other connections discourage.
            await connection.execute("SET LOCAL enable_seqscan TO on")
            if tables:
                cursor = await connection.execute(CLOSED, {"schema": self.settings.db_schema})
                if (closed := await cursor.fetchone()) is not None:
                    problem = f"{closed['role']} lacks USAGE on the schema {self.settings.db_schema}"
                    raise psycopg.errors.InsufficientPrivilege(problem)
            yield connection


def brief(error: BaseException) -> str:
    """An error on one line."""
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        return error.diag.message_primary
    return " ".join(str(error).split()) or type(error).__name__
