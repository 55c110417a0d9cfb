"""Letting time pass for what is in the database."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.resources.history import first_id, written_at

SHIFT_ROWS = (
    "UPDATE thread SET created_at = created_at - %(age)s, updated_at = updated_at - %(age)s, "
    "state_updated_at = state_updated_at - %(age)s, history_from = history_from - %(age)s, "
    "undone_at = undone_at - %(age)s, hidden_at = hidden_at - %(age)s WHERE thread_id = %(thread_id)s",
    "UPDATE run SET finished_at = finished_at - %(age)s WHERE thread_id = %(thread_id)s",
    "UPDATE event SET created_at = created_at - %(age)s WHERE thread_id = %(thread_id)s",
)


async def age_thread(database: Database, thread_id: UUID, **age: float) -> None:
    """Everything in a thread happened that much earlier."""
    passed = timedelta(**age)
    async with database.transaction() as connection:
        for statement in SHIFT_ROWS:
            await connection.execute(statement, {"age": passed, "thread_id": thread_id})
        await _age_checkpoints(connection, str(thread_id), passed)


async def _age_checkpoints(connection: AsyncConnection[DictRow], thread_id: str, passed: timedelta) -> None:
    """A checkpoint's time is in its id, which others refer to."""
    cursor = await connection.execute(
        "SELECT DISTINCT checkpoint_id FROM checkpoints WHERE thread_id = %s", (thread_id,)
    )
    for row in await cursor.fetchall():
        old: str = row["checkpoint_id"]
        names = {"thread_id": thread_id, "old": old, "new": first_id(written_at(old) - passed) + old[18:]}
        await connection.execute(
            "UPDATE checkpoints SET checkpoint_id = replace(checkpoint_id, %(old)s, %(new)s), "
            "parent_checkpoint_id = replace(parent_checkpoint_id, %(old)s, %(new)s), "
            "checkpoint = replace(checkpoint::text, %(old)s, %(new)s)::jsonb, "
            "metadata = replace(metadata::text, %(old)s, %(new)s)::jsonb WHERE thread_id = %(thread_id)s",
            names,
        )
        await connection.execute(
            "UPDATE checkpoint_writes SET checkpoint_id = %(new)s "
            "WHERE checkpoint_id = %(old)s AND thread_id = %(thread_id)s",
            names,
        )
