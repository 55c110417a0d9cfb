"""Threads: reading and deleting them. Creating one is part of the engine, because runs do it too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.errors import NotFound

GET = """
SELECT thread_id, created_at, updated_at, state_updated_at, metadata, config, status, "values", interrupts, error
FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL
"""

LOCK_FOR_DELETE = """
SELECT thread_id FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL FOR UPDATE
"""

# The runs go first: that waits for a journal commit in flight, and voids the fences of what is still running, so
# that nothing is written to the thread's other tables after they have been emptied.
DELETE_RUNS = """
WITH doomed AS (
    SELECT run_id, status, worker_id FROM run WHERE thread_id = %(thread_id)s ORDER BY run_id FOR UPDATE
)
DELETE FROM run USING doomed WHERE run.run_id = doomed.run_id
RETURNING doomed.run_id, doomed.status, doomed.worker_id
"""

DELETE_REST = (
    "DELETE FROM event WHERE thread_id = %(thread_id)s",
    "DELETE FROM checkpoints WHERE thread_id = %(thread_id)s::uuid::text",
    "DELETE FROM checkpoint_blobs WHERE thread_id = %(thread_id)s::uuid::text",
    "DELETE FROM checkpoint_writes WHERE thread_id = %(thread_id)s::uuid::text",
    "DELETE FROM thread WHERE thread_id = %(thread_id)s",
)


async def get_thread(connection: AsyncConnection[DictRow], thread_id: UUID) -> DictRow:
    """A thread, or NotFound."""
    cursor = await connection.execute(GET, {"thread_id": thread_id})
    row = await cursor.fetchone()
    if row is None:
        raise NotFound(f"Thread {thread_id} does not exist.")
    return row


async def delete_thread(database: Database, thread_id: UUID) -> list[DictRow]:
    """Delete a thread with everything that belongs to it. Returns its runs that were unfinished, so that their
    workers can be told; if they are not, they notice at their next write."""
    parameters = {"thread_id": thread_id}
    async with database.transaction() as connection:
        locked = await (await connection.execute(LOCK_FOR_DELETE, parameters)).fetchone()
        if locked is None:
            raise NotFound(f"Thread {thread_id} does not exist.")
        runs = await (await connection.execute(DELETE_RUNS, parameters)).fetchall()
        for statement in DELETE_REST:
            await connection.execute(statement, parameters)
    return [run for run in runs if run["status"] in ("pending", "running")]


def present(row: DictRow) -> dict[str, Any]:
    """A row as clients see it: times in UTC."""
    return {key: value.astimezone(UTC) if isinstance(value, datetime) else value for key, value in row.items()}
