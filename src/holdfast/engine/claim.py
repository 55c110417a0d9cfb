"""Claiming: a worker takes as many ready runs as it has free slots.

The cost does not depend on the backlog. Runs that wait behind another run of their thread are not in the index at
all. Runs scheduled for later are, so the scan steps from priority to priority (a "loose" index scan, one probe
each) and reads within each only what is due: one scan over `priority DESC, ready_at` would wade through every
high-priority run that is due tomorrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.engine.ready import ReadyRun

# A worker that was declared lost between two renewals must not take new runs.
# `next_seq` continues the thread's numbering: the log may be ahead of the thread row (a run is being taken over)
# or behind it (its events have expired).
CLAIM = """
WITH RECURSIVE level(priority) AS (
    (SELECT priority FROM run WHERE status = 'pending' AND ready_at IS NOT NULL ORDER BY priority DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT lower.priority FROM run lower
            WHERE lower.status = 'pending' AND lower.ready_at IS NOT NULL AND lower.priority < level.priority
            ORDER BY lower.priority DESC LIMIT 1)
    FROM level WHERE level.priority IS NOT NULL
), picked AS MATERIALIZED (
    SELECT due.run_id FROM level CROSS JOIN LATERAL (
        SELECT run_id FROM run
        WHERE status = 'pending' AND ready_at IS NOT NULL AND priority = level.priority AND ready_at <= now()
          AND graph_id = ANY(%(graphs)s)
        ORDER BY ready_at LIMIT %(slots)s FOR NO KEY UPDATE SKIP LOCKED
    ) AS due
    WHERE EXISTS (SELECT 1 FROM worker WHERE worker_id = %(worker_id)s AND status = 'online')
    LIMIT %(slots)s
)
UPDATE run SET status = 'running', worker_id = %(worker_id)s, fence = run.fence + 1, attempt = run.attempt + 1,
               started_at = coalesce(run.started_at, now()), updated_at = now(),
               first_seq = coalesce(run.first_seq, numbered.next_seq)
FROM picked
JOIN run claimed USING (run_id)
JOIN thread ON thread.thread_id = claimed.thread_id
CROSS JOIN LATERAL (
    SELECT greatest(thread.last_seq, (SELECT seq FROM event WHERE event.thread_id = claimed.thread_id
                                      ORDER BY seq DESC LIMIT 1)) + 1 AS next_seq
) AS numbered
WHERE run.run_id = picked.run_id
RETURNING run.run_id, run.thread_id, run.assistant_id, run.graph_id, run.fence, run.attempt, run.retries, run.crashes,
          run.worker_id, run.progress,
          run.kwargs, run.metadata, run.cancel_action, numbered.next_seq,
          NOT thread.has_state AND run.fence = 1 AS fresh,
          extract(epoch FROM now() - run.started_at)::float8 AS elapsed,
          extract(epoch FROM now() - run.ready_at)::float8 AS waited
"""

# A claim whose answer was lost on the way may have been made all the same. Its worker lives and renews its lease, so
# nobody else would ever look for such a run. Nothing has been executed: that costs the run neither its place nor a
# crash. The fence rises, as whenever a run changes hands.
RETURN_STRAYS = """
WITH stray AS (
    SELECT run_id FROM run
    WHERE worker_id = %(worker_id)s AND status = 'running' AND run_id <> ALL(%(held)s::uuid[])
    ORDER BY run_id FOR NO KEY UPDATE
)
UPDATE run SET status = 'pending', worker_id = NULL, fence = run.fence + 1, updated_at = now()
FROM stray WHERE run.run_id = stray.run_id
RETURNING run.run_id
"""

# Nothing is due now: how long until something is? Bounds a worker's sleep.
NEXT_DUE = """
SELECT run_id, graph_id, extract(epoch FROM ready_at - now())::float8 AS seconds FROM run
WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at > now()
ORDER BY priority DESC, ready_at LIMIT 1
"""


async def claim(
    connection: AsyncConnection[DictRow], worker_id: UUID, slots: int, graphs: Sequence[str]
) -> list[DictRow]:
    """Take up to `slots` due runs of the given graphs, highest priority first, longest ready first.

    Each is now `running`, owned by this worker, under a fence higher than any it had before.
    """
    cursor = await connection.execute(CLAIM, {"worker_id": worker_id, "slots": slots, "graphs": list(graphs)})
    return await cursor.fetchall()


async def return_strays(connection: AsyncConnection[DictRow], worker_id: UUID, held: Sequence[UUID]) -> list[UUID]:
    """Give back the runs this worker owns without knowing it: all but those it holds. Not while it is claiming."""
    cursor = await connection.execute(RETURN_STRAYS, {"worker_id": worker_id, "held": list(held)})
    return [row["run_id"] for row in await cursor.fetchall()]


async def next_due(connection: AsyncConnection[DictRow]) -> ReadyRun | None:
    """The scheduled run that is due next, or None. Approximate across priorities; the slow poll corrects it."""
    row = await (await connection.execute(NEXT_DUE)).fetchone()
    return None if row is None else ReadyRun(row["run_id"], row["graph_id"], max(0.0, row["seconds"]))
