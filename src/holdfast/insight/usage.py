"""Reads what threads and runs have used."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.errors import NotFound

OF_THREAD = "SELECT usage FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL"

OF_RUN = """
SELECT usage, kwargs, pots,
       coalesce(extract(epoch FROM coalesce(finished_at, now()) - started_at), 0)::float8 AS elapsed
FROM run WHERE run_id = %(run_id)s AND thread_id = %(thread_id)s
"""


async def thread_usage(connection: AsyncConnection[DictRow], thread_id: UUID) -> dict[str, Any] | None:
    """The stored usage of a thread. Raises NotFound."""
    row = await (await connection.execute(OF_THREAD, {"thread_id": thread_id})).fetchone()
    if row is None:
        raise NotFound("Thread", thread_id)
    return row["usage"]  # type: ignore[no-any-return]


async def run_usage(connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID) -> DictRow:
    """The stored usage of a run, its kwargs, and the seconds from its first start to its end (or to now). Raises
    NotFound."""
    row = await (await connection.execute(OF_RUN, {"thread_id": thread_id, "run_id": run_id})).fetchone()
    if row is None:
        raise NotFound("Run", f"{run_id} of thread {thread_id}")
    return row
