"""Runs that wait for their children, and children whose parent is gone."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.cancel import announce_cancelled, cancel_runs
from holdfast.engine.ready import ReadyRun
from holdfast.engine.waking import NEVER
from holdfast.signals import Signals

# What is waited for now, and nothing that an earlier attempt waited for.
AWAIT_CHILDREN = """
UPDATE child SET awaited = coalesce(wanted.how, 0)
FROM child known
LEFT JOIN unnest(%(run_ids)s::uuid[], %(keys)s::text[], %(hows)s::smallint[]) AS wanted(run_id, key, how)
    ON wanted.run_id = known.parent_run_id AND wanted.key = known.key
WHERE known.parent_run_id = ANY(%(parents)s) AND child.parent_run_id = known.parent_run_id AND child.key = known.key
  AND child.awaited <> coalesce(wanted.how, 0)
"""

# The row is locked, and so are the children's: what is read here cannot change before this is committed. One that was
# cancelled on its way here goes on, to be stopped by whoever claims it.
WAIT_RUNS = f"""
UPDATE run SET status = 'pending', worker_id = NULL, updated_at = now(),
               ready_at = CASE WHEN run.cancel_action IS NULL
                    AND EXISTS (SELECT 1 FROM child WHERE child.parent_run_id = run.run_id AND child.awaited > 0
                                  AND child.status IS NULL)
                    AND NOT EXISTS (SELECT 1 FROM child WHERE child.parent_run_id = run.run_id AND child.awaited = 2
                                      AND child.status <> 'success')
                    THEN {NEVER} ELSE now() END
WHERE run.run_id = ANY(%(run_ids)s) AND run.status = 'running'
RETURNING run.run_id, run.graph_id, run.ready_at < {NEVER} AS ready
"""

UNFINISHED_CHILDREN = """
SELECT thread_id, array_agg(run_id) AS run_ids, array_agg(run_id) FILTER (WHERE children > 0) AS parents
FROM run WHERE parent_run_id = ANY(%(run_ids)s) AND status IN ('pending', 'running')
GROUP BY thread_id ORDER BY thread_id
"""

ABANDONED = "SELECT run_id FROM abandoned ORDER BY abandoned_at, run_id LIMIT %(limit)s"

FORGET_ABANDONED = "DELETE FROM abandoned WHERE run_id = ANY(%(run_ids)s)"

# Waiting counts as running, and nobody is there to stop it: whoever claims it finds its time used up. And the net below
# the triggers: a parent that waits for nothing.
RELEASE_OVERDUE = f"""
WITH overdue AS (
    SELECT run_id FROM run
    WHERE status = 'pending' AND ready_at = {NEVER}
      AND (started_at <= now() - make_interval(secs => %(timeout)s)
           OR NOT EXISTS (SELECT 1 FROM child WHERE child.parent_run_id = run.run_id AND child.awaited > 0
                            AND child.status IS NULL))
    ORDER BY run_id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE run SET ready_at = now(), updated_at = now() FROM overdue
WHERE run.run_id = overdue.run_id AND run.status = 'pending' AND run.ready_at = {NEVER}
RETURNING run.run_id, run.graph_id
"""


async def cancel_children(database: Database, signals: Signals, parents: Iterable[UUID]) -> int:
    """Cancel the unfinished children of runs that were stopped, and theirs. Returns how many.

    Not within the transaction that stops a parent: that has the parent's lock, and whoever ends a child wants it while
    holding the child's.
    """
    found, generation = 0, list(parents)
    while generation:
        async with database.connection() as connection:
            rows = await (await connection.execute(UNFINISHED_CHILDREN, {"run_ids": generation})).fetchall()
        generation = []
        for row in rows:
            cancelled = await cancel_runs(database, row["thread_id"], row["run_ids"], "interrupt")
            announce_cancelled(signals, cancelled, "interrupt")
            found += len(cancelled.ended) + len(cancelled.requested)
            generation += row["parents"] or []
    return found


async def cancel_abandoned(database: Database, signals: Signals, limit: int) -> tuple[int, int]:
    """Cancel the children of runs that have been stopped. Returns how many such runs there were, and children.

    From the moment a run is stopped it creates no more children, so one look is enough for each.
    """
    async with database.connection() as connection:
        rows = await (await connection.execute(ABANDONED, {"limit": limit})).fetchall()
    if not rows:
        return 0, 0
    run_ids = [row["run_id"] for row in rows]
    found = await cancel_children(database, signals, run_ids)
    async with database.connection() as connection:
        await connection.execute(FORGET_ABANDONED, {"run_ids": run_ids})
    return len(run_ids), found


async def release_overdue(connection: AsyncConnection[DictRow], timeout: float) -> list[ReadyRun]:
    """Let the parents go on that have waited for longer than a run may take."""
    cursor = await connection.execute(RELEASE_OVERDUE, {"timeout": timeout})
    return [ReadyRun(row["run_id"], row["graph_id"]) for row in await cursor.fetchall()]
