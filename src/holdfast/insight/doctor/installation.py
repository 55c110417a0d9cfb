"""What is examined: the settings, the project and the database they lead to."""

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

# A schema that is there, and that the role may not use.
CLOSED = """
SELECT current_user AS role FROM pg_namespace
WHERE nspname = %(schema)s AND NOT has_schema_privilege(oid, 'USAGE')
"""


@dataclass(frozen=True)
class Installation:
    """One installation, as this machine sees it."""

    settings: Settings
    config: Path | None = None
    """The project's langgraph.json; None when there is none here."""
    absent: str = ""
    """Why there is no database to look at, if there is none yet."""
    unusable: str = ""
    """Why the embedded Postgres cannot be looked at, if it does not start."""
    patience: float = 10.0
    """Seconds that a check may take."""
    clock: Callable[[], float] = time.time
    """This machine's."""

    async def connect(self, *, session: bool = False) -> AsyncConnection[DictRow]:
        """A connection of the check's own: one that hangs or breaks takes no other check with it."""
        direct = session and self.settings.session_url is not None
        return await AsyncConnection.connect(
            connection_parameters(self.settings, "doctor", session=direct),
            autocommit=True,
            row_factory=dict_row,
            prepare_threshold=None,
        )

    @asynccontextmanager
    async def reading(self, *, tables: bool = True) -> AsyncIterator[AsyncConnection[DictRow]]:
        """A transaction that can change nothing, and whose statements the server itself ends when they take long.

        `tables`: Holdfast's own are read. Raises InsufficientPrivilege if the role may not use their schema: without
        that, Postgres says that they do not exist.
        """
        async with await self.connect() as connection, connection.transaction(force_rollback=True):
            await connection.execute("SET TRANSACTION READ ONLY")
            await connection.execute(
                sql.SQL("SET LOCAL search_path TO {}").format(sql.Identifier(self.settings.db_schema))
            )
            await connection.execute(
                sql.SQL("SET LOCAL statement_timeout TO {}").format(sql.Literal(f"{self.patience * 1000:.0f}ms"))
            )
            # Counting is no hot statement: the planner may choose.
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
