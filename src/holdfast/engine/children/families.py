"""Parents that wait for their children, and children whose parent was stopped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import TRY_TIMEOUT_SHARE, RowsSetAside, process_rows
from holdfast.db.time_limit import time_limit
from holdfast.engine.cancel import announce_cancelled, cancel_runs
from holdfast.engine.children.parents import NEVER
from holdfast.engine.ready import ReadyRun
from holdfast.signals import Signals

# Set which children the run waits for, and clear those that only an earlier attempt waited for.
AWAIT_CHILDREN = """
UPDATE child SET awaited = coalesce(wanted.how, 0)
FROM child known
LEFT JOIN unnest(%(run_ids)s::uuid[], %(keys)s::text[], %(hows)s::smallint[]) AS wanted(run_id, key, how)
    ON wanted.run_id = known.parent_run_id AND wanted.key = known.key
WHERE known.parent_run_id = ANY(%(parents)s) AND child.parent_run_id = known.parent_run_id AND child.key = known.key
  AND child.awaited <> coalesce(wanted.how, 0)
"""

# The rows of the run and of its children are locked, so the conditions hold until the commit. A run that was cancelled
# meanwhile becomes ready at once: the worker that claims it stops it.
WAIT_RUNS = f"""
UPDATE run SET status = 'pending', worker_id = NULL, updated_at = now(), crashes_in_a_row = 0,
               ready_at = CASE WHEN run.cancel_action IS NULL
                    AND EXISTS (SELECT 1 FROM child WHERE child.parent_run_id = run.run_id AND child.awaited > 0
                                  AND child.status IS NULL)
                    AND NOT EXISTS (SELECT 1 FROM child WHERE child.parent_run_id = run.run_id AND child.awaited = 2
                                      AND child.status <> 'success')
                    AND NOT (run.pots IS NOT NULL AND is_overspent(run.pots))
                    THEN {NEVER} ELSE now() END
WHERE run.run_id = ANY(%(run_ids)s) AND run.status = 'running'
RETURNING run.run_id, run.graph_id, run.ready_at < {NEVER} AS ready
"""

UNFINISHED_CHILDREN = """
SELECT thread_id, array_agg(run_id) AS run_ids, array_agg(run_id) FILTER (WHERE children > 0) AS parents
FROM run WHERE parent_run_id = ANY(%(run_ids)s) AND status IN ('pending', 'running')
GROUP BY thread_id ORDER BY thread_id
"""

ABANDONED = """
SELECT run_id FROM abandoned WHERE run_id <> ALL(%(aside)s) ORDER BY abandoned_at, run_id LIMIT %(limit)s
"""

DELETE_ABANDONED = "DELETE FROM abandoned WHERE run_id = ANY(%(run_ids)s)"

# Uses two partial indexes that contain only such runs.
HAS_FAMILY_WORK = f"""
SELECT EXISTS (SELECT 1 FROM abandoned)
       OR EXISTS (SELECT 1 FROM run WHERE status = 'pending' AND ready_at = {NEVER}) AS found
"""

# The time a parent waits counts as run time. No worker has the run, so it is made ready, and the worker that claims it
# ends it with a timeout. Also finds parents that wait for no child, in case a trigger has missed one.
WAITS_TOO_LONG = f"""
status = 'pending' AND ready_at = {NEVER}
AND (started_at <= now() - make_interval(secs => %(timeout)s)
     OR NOT EXISTS (SELECT 1 FROM child WHERE child.parent_run_id = run.run_id AND child.awaited > 0
                      AND child.status IS NULL))
"""

OVERDUE = f"SELECT run_id, thread_id FROM run WHERE {WAITS_TOO_LONG} AND run_id <> ALL(%(aside)s)"

RELEASE_OVERDUE = f"""
WITH overdue AS (
    SELECT run_id FROM run WHERE run_id = ANY(%(run_ids)s) AND {WAITS_TOO_LONG}
    ORDER BY run_id FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE run SET ready_at = now(), updated_at = now() FROM overdue
WHERE run.run_id = overdue.run_id AND run.status = 'pending' AND run.ready_at = {NEVER}
RETURNING run.run_id, run.graph_id
"""


async def has_family_work(connection: AsyncConnection[DictRow]) -> bool:
    """Whether a stopped run has children to cancel, or any parent waits for its children."""
    row = await (await connection.execute(HAS_FAMILY_WORK)).fetchone()
    return row is not None and bool(row["found"])


async def cancel_children(database: Database, signals: Signals, parents: Iterable[UUID]) -> int:
    """Cancel all unfinished descendants of stopped runs. Returns how many.

    A child that cannot be cancelled, or whose thread is locked, does not delay the others: its error is raised at the
    end.

    Must not be called within the transaction that stops a parent. That transaction holds the parent's lock, and ending
    a child takes the parent's lock while holding the child's: a deadlock.
    """
    found, generation = 0, list(parents)
    seconds = TRY_TIMEOUT_SHARE * database.settings.database_timeout
    failure: Exception | None = None
    while generation:
        async with database.connection() as connection:
            rows = await (await connection.execute(UNFINISHED_CHILDREN, {"run_ids": generation})).fetchall()
        generation = []
        for row in rows:
            try:
                async with time_limit(database, seconds):
                    cancelled = await cancel_runs(database, row["thread_id"], row["run_ids"], "interrupt")
            except Exception as error:
                if is_outage(error):
                    raise
                failure = failure or error
                continue
            announce_cancelled(signals, cancelled, "interrupt")
            found += len(cancelled.ended) + len(cancelled.requested)
            generation += row["parents"] or []
    if failure is not None:
        raise failure
    return found


async def cancel_abandoned(
    database: Database, signals: Signals, limit: int, aside: RowsSetAside | None = None
) -> tuple[int, int]:
    """Cancel the children of stopped runs. Returns the number of such runs and of their children.

    A run whose children cannot be cancelled is set aside and does not delay the others. A stopped run creates no more
    children, so each is handled once.
    """
    async with database.connection() as connection:
        parameters = {"limit": limit, "aside": [] if aside is None else aside.ids()}
        rows = await (await connection.execute(ABANDONED, parameters)).fetchall()
    if not rows:
        return 0, 0

    async def cancel(stopped: Sequence[DictRow]) -> list[tuple[int, int]]:
        run_ids = [row["run_id"] for row in stopped]
        found = await cancel_children(database, signals, run_ids)
        async with database.connection() as connection:
            await connection.execute(DELETE_ABANDONED, {"run_ids": run_ids})
        return [(len(run_ids), found)]

    # A run may have many children, and each cancel is a transaction of its own.
    done = await process_rows(database, rows, cancel, aside, seconds=database.settings.database_timeout)
    return sum(parents for parents, _ in done), sum(children for _, children in done)


async def release_overdue(database: Database, timeout: float, aside: RowsSetAside | None = None) -> list[ReadyRun]:
    """Make parents ready that have waited for longer than a run may take.

    A parent that cannot be changed is set aside and does not delay the others.
    """
    async with database.connection() as connection:
        parameters = {"timeout": timeout, "aside": [] if aside is None else aside.ids()}
        overdue = await (await connection.execute(OVERDUE, parameters)).fetchall()

    async def release(rows: Sequence[DictRow]) -> list[ReadyRun]:
        run_ids = [row["run_id"] for row in rows]
        async with database.connection() as connection:
            cursor = await connection.execute(RELEASE_OVERDUE, {"run_ids": run_ids, "timeout": timeout})
            return [ReadyRun(row["run_id"], row["graph_id"]) for row in await cursor.fetchall()]

    return await process_rows(database, overdue, release, aside) if overdue else []
