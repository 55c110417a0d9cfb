"""Reading the event log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# Read by primary key, so that a reader costs what it is sent, whatever the log holds.
READ_AFTER = """
SELECT seq, run_id, kind, namespace, data, created_at FROM event
WHERE thread_id = %(thread_id)s AND seq > %(after)s ORDER BY seq LIMIT %(limit)s
"""

HEADS = """
SELECT watched.thread_id, coalesce((SELECT seq FROM event WHERE event.thread_id = watched.thread_id
                                    ORDER BY seq DESC LIMIT 1), 0) AS seq
FROM unnest(%(thread_ids)s::uuid[]) AS watched(thread_id)
"""

# A run that is gone (rolled back, deleted) has ended too.
ENDED_RUNS = """
SELECT watched.run_id FROM unnest(%(run_ids)s::uuid[]) AS watched(run_id)
LEFT JOIN run USING (run_id) WHERE run.run_id IS NULL OR run.finished_at IS NOT NULL
"""

LAST_OUTPUT = """
SELECT data FROM event
WHERE thread_id = %(thread_id)s AND seq >= %(first_seq)s AND run_id = %(run_id)s
  AND kind IN ('values', 'output') AND namespace = ''
ORDER BY seq DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One row of the log. `namespace` is empty for the root graph."""

    seq: int
    run_id: UUID
    kind: str
    namespace: str
    data: bytes
    created_at: datetime


async def read_after(
    connection: AsyncConnection[DictRow], thread_id: UUID, after: int, limit: int = 500
) -> list[LogEvent]:
    """A thread's events with a number above `after`, in order, at most `limit`."""
    cursor = await connection.execute(READ_AFTER, {"thread_id": thread_id, "after": after, "limit": limit}, binary=True)
    return [LogEvent(**row) for row in await cursor.fetchall()]


async def heads(connection: AsyncConnection[DictRow], thread_ids: Sequence[UUID]) -> dict[UUID, int]:
    """The highest number in the log of each thread, 0 for none."""
    cursor = await connection.execute(HEADS, {"thread_ids": list(thread_ids)})
    return {row["thread_id"]: row["seq"] for row in await cursor.fetchall()}


async def ended_runs(connection: AsyncConnection[DictRow], run_ids: Sequence[UUID]) -> list[UUID]:
    """Those of the runs that have ended or do not exist."""
    cursor = await connection.execute(ENDED_RUNS, {"run_ids": list(run_ids)})
    return [row["run_id"] for row in await cursor.fetchall()]


async def last_output(
    connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID, first_seq: int
) -> bytes | None:
    """The last values of a run, as JSON."""
    cursor = await connection.execute(
        LAST_OUTPUT, {"thread_id": thread_id, "run_id": run_id, "first_seq": first_seq}, binary=True
    )
    row = await cursor.fetchone()
    return None if row is None else row["data"]
