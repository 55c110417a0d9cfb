"""Workers and the queue, as the database has them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.pages import PageLimits, PageRows, fetch_page
from holdfast.engine.children.parents import NEVER
from holdfast.errors import Conflict, NotFound

# `lease_left` of a worker that has left is negative: its lease ended that many seconds ago.
WORKERS = """
SELECT worker_id, status, host, pid, version, graphs, capacity, claims_last_minute, problem, started_at, stopped_at,
       extract(epoch FROM lease_until - now())::float8 AS lease_left, coalesce(held.run_ids, '{}') AS run_ids
FROM worker
LEFT JOIN LATERAL (
    SELECT array_agg(run_id ORDER BY started_at) AS run_ids FROM run
    WHERE run.worker_id = worker.worker_id AND run.status = 'running'
) AS held ON true
WHERE %(status)s::text IS NULL OR status = %(status)s
ORDER BY status IN ('online', 'draining') DESC, started_at DESC, worker_id LIMIT %(limit)s OFFSET %(offset)s
"""

# The worker reads the status when it next renews its lease. Then it drains, and the end of its attempts does not count
# as a crash of their runs (`engine/lease.py`).
DRAIN = """
WITH asked AS (
    UPDATE worker SET status = 'draining' WHERE worker_id = %(worker_id)s AND status = 'online' RETURNING worker_id
)
SELECT status FROM worker WHERE worker_id = %(worker_id)s
"""

# Each part uses a partial index that holds only the rows it counts. `waiting` are the runs behind another run of their
# thread, and the runs that wait for their children.
QUEUE = f"""
SELECT (SELECT count(*) FROM run WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at <= now()) AS ready,
       (SELECT count(*) FROM run WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at > now()
          AND ready_at < {NEVER}) AS scheduled,
       (SELECT count(*) FROM run WHERE status IN ('pending', 'running') AND ready_at IS NULL)
       + (SELECT count(*) FROM run WHERE status = 'pending' AND ready_at = {NEVER}) AS waiting,
       (SELECT count(*) FROM run WHERE status = 'running') AS running,
       coalesce((SELECT extract(epoch FROM now() - min(ready_at))::float8 FROM run
                 WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at <= now()), 0) AS oldest_seconds,
       coalesce(sum(capacity) FILTER (WHERE status = 'online'), 0) AS capacity,
       count(*) FILTER (WHERE status = 'online') AS workers_online,
       count(*) FILTER (WHERE status = 'draining') AS workers_draining,
       coalesce(sum(claims_last_minute), 0) / 60.0::float8 AS claims_per_second
FROM worker WHERE status IN ('online', 'draining')
"""

UNSERVED = """
SELECT graph_id, count(*) AS ready FROM run
WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at <= now()
  AND graph_id <> ALL(SELECT unnest(graphs) FROM worker WHERE status = 'online')
GROUP BY graph_id ORDER BY graph_id
"""

# Why a pending run has not started.
WAITS = f"""
SELECT ready_at, ready_at > now() AS later, ready_at = {NEVER} AS for_children,
       EXISTS (SELECT 1 FROM worker WHERE status = 'online') AS served,
       EXISTS (SELECT 1 FROM worker WHERE status = 'online' AND run.graph_id = ANY(graphs)) AS has_graph
FROM run WHERE run_id = %(run_id)s AND status = 'pending'
"""


async def list_workers(connection: AsyncConnection[DictRow], status: str | None, part: PageLimits) -> PageRows:
    """List workers: those that are alive first, then the latest first. Workers that have left are listed until the
    sweep removes their rows."""
    rows, more = await fetch_page(connection, WORKERS, {"status": status}, part, ["graphs", "run_ids"])
    return PageRows([{**row, "active": len(row["run_ids"])} for row in rows], more)


async def drain_worker(connection: AsyncConnection[DictRow], worker_id: UUID) -> str:
    """Ask a worker to drain. Returns its status. Idempotent."""
    row = await (await connection.execute(DRAIN, {"worker_id": worker_id})).fetchone()
    if row is None:
        raise NotFound("Worker", worker_id)
    if row["status"] in ("offline", "lost"):
        raise Conflict(f"Worker {worker_id} is {row['status']} already.")
    # Not `row["status"]`: the SELECT does not see the UPDATE of the same statement.
    return "draining"


async def queue_figures(connection: AsyncConnection[DictRow]) -> dict[str, Any]:
    """The length of the queue and the rate of claims. `unserved` counts ready runs by graph, for each graph that no
    online worker has."""
    figures = await (await connection.execute(QUEUE)).fetchone()
    assert figures is not None
    unserved = await (await connection.execute(UNSERVED)).fetchall() if figures["ready"] else []
    return {
        **{key: float(value) if key == "claims_per_second" else value for key, value in figures.items()},
        "unserved": {row["graph_id"]: row["ready"] for row in unserved},
    }


async def waits_for(connection: AsyncConnection[DictRow], run_id: UUID, graph_id: str) -> str | None:
    """What a pending run is waiting for, in words; None when it is not pending any more."""
    row = await (await connection.execute(WAITS, {"run_id": run_id})).fetchone()
    if row is None:
        return None
    if row["ready_at"] is None:
        return "the runs before it in its thread"
    if row["for_children"]:
        return "its children"
    if row["later"]:
        return f"its time, {row['ready_at'].isoformat()}"
    if not row["served"]:
        return "a worker: none is online"
    if not row["has_graph"]:
        return f"a worker with graph '{graph_id}': no worker that is online has it"
    return "a free worker"
