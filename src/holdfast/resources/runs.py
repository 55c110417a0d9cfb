"""Runs as clients read them."""

from __future__ import annotations

from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.engine.create import RUN_COLUMNS
from holdfast.errors import NotFound

GET = f"SELECT {RUN_COLUMNS}, finished_at FROM run WHERE run_id = %(run_id)s"

LIST_OF_THREAD = f"""
SELECT {RUN_COLUMNS} FROM run
WHERE thread_id = %(thread_id)s AND (%(status)s::text IS NULL OR status = %(status)s)
ORDER BY created_at DESC, run_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""

LIST_ALL = f"""
SELECT {RUN_COLUMNS} FROM run WHERE %(status)s::text IS NULL OR status = %(status)s
ORDER BY created_at DESC, run_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""


async def get_run(connection: AsyncConnection[DictRow], run_id: UUID, thread_id: UUID | None = None) -> DictRow:
    """A run, or NotFound; of the given thread, if one is given."""
    cursor = await connection.execute(GET, {"run_id": run_id})
    row = await cursor.fetchone()
    if row is None or (thread_id is not None and row["thread_id"] != thread_id):
        where = "" if thread_id is None else f" in thread {thread_id}"
        raise NotFound(f"Run {run_id} does not exist{where}.")
    return row


async def list_runs(
    connection: AsyncConnection[DictRow], thread_id: UUID | None, status: str | None, limit: int, offset: int
) -> list[DictRow]:
    """Runs of a thread, or all, newest first."""
    cursor = await connection.execute(
        LIST_ALL if thread_id is None else LIST_OF_THREAD,
        {"thread_id": thread_id, "status": status, "limit": limit, "offset": offset},
    )
    return await cursor.fetchall()
