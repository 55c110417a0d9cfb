"""Which scheduled run is due next. Only decides when a worker claims; the claim itself decides what it takes."""

from __future__ import annotations

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.engine.children.parents import NEVER
from holdfast.engine.claim import QUEUED
from holdfast.engine.ready import ReadyRun

# All priorities with a queued run, highest first, by the index `run_ready`.
_ALL_LEVELS = f"""
    (SELECT run.priority FROM run WHERE {QUEUED} ORDER BY run.priority DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT run.priority FROM run WHERE {QUEUED} AND run.priority < level.priority
            ORDER BY run.priority DESC LIMIT 1)
    FROM level WHERE level.priority IS NOT NULL
"""

# How long until the next scheduled run is due; bounds a worker's sleep. Every priority is looked at, so that an urgent
# run of tomorrow does not hide a less urgent one that is due in a second. Runs that wait for children are left out.
NEXT_DUE = f"""
WITH RECURSIVE level(priority) AS ({_ALL_LEVELS})
SELECT first.run_id, first.graph_id, extract(epoch FROM first.ready_at - now())::float8 AS seconds
FROM level CROSS JOIN LATERAL (
    SELECT run.run_id, run.graph_id, run.ready_at FROM run
    WHERE {QUEUED} AND run.priority = level.priority AND run.ready_at > now() AND run.ready_at < {NEVER}
    ORDER BY run.ready_at LIMIT 1
) AS first
ORDER BY first.ready_at LIMIT 1
"""


async def next_due(connection: AsyncConnection[DictRow]) -> ReadyRun | None:
    """The scheduled run that is due next, or None."""
    row = await (await connection.execute(NEXT_DUE)).fetchone()
    return None if row is None else ReadyRun(row["run_id"], row["graph_id"], max(0.0, row["seconds"]))
