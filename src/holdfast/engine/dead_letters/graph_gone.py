"""Runs whose graph no worker has. They wait for a worker that has it; after a while they become dead letters.

A graph counts as missing only while some worker is online: a fleet that is switched off has lost no graph. Since when
it is missing is stored in a table of its own, because the rows of stopped workers are deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.row_by_row import RowsSetAside, process_rows
from holdfast.engine.children.parents import lock_with_parents
from holdfast.engine.interrupts.without_worker import update_interrupts_without_worker
from holdfast.engine.outbox import queue_webhooks
from holdfast.engine.queue import LOCK_THREADS, PROMOTE_NEXT, SET_THREAD_STATUS
from holdfast.engine.reap import INSERT_END_EVENTS, MARK_POISONED_THREADS
from holdfast.engine.rollback import erase_runs

# After a gap between two checks the time starts again, because a worker may have had the graph meanwhile.
RECORD_MISSING = """
WITH missing AS (
    SELECT DISTINCT graph_id FROM run
    WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at <= now()
      AND EXISTS (SELECT 1 FROM worker WHERE status = 'online')
      AND graph_id <> ALL(ARRAY(SELECT unnest(graphs) FROM worker WHERE status IN ('online', 'draining')))
), back AS (
    DELETE FROM graph_absence WHERE graph_id NOT IN (SELECT graph_id FROM missing)
)
INSERT INTO graph_absence (graph_id) SELECT graph_id FROM missing
ON CONFLICT (graph_id) DO UPDATE SET
    missing_since = CASE WHEN graph_absence.seen_at < now() - make_interval(secs => %(gap)s) THEN now()
                         ELSE graph_absence.missing_since END,
    seen_at = now()
RETURNING graph_id, missing_since <= now() - make_interval(secs => %(after)s) AS gone
"""

DOOMED = """
SELECT run_id, thread_id, parent_run_id FROM run
WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at <= now() - make_interval(secs => %(after)s)
  AND graph_id = ANY(%(graphs)s) AND run_id <> ALL(%(aside)s)
ORDER BY priority DESC, ready_at LIMIT %(batch)s
"""

# Waits for a concurrent claim of the run, which is then not pending any more, and checks again that no worker has the
# graph. Only the head of a thread has a `ready_at`, so no run of the thread is executed, and this transaction may
# assign event numbers.
END = """
WITH stuck AS (
    SELECT run_id FROM run
    WHERE run_id = ANY(%(run_ids)s) AND status = 'pending' AND ready_at IS NOT NULL
      AND NOT EXISTS (SELECT 1 FROM worker WHERE status IN ('online', 'draining') AND run.graph_id = ANY(graphs))
    ORDER BY run_id FOR NO KEY UPDATE
)
UPDATE run SET
    status = 'error', ready_at = NULL, finished_at = now(), updated_at = now(), dead_letter = 'graph_gone',
    first_seq = coalesce(run.first_seq, 1 + (
        SELECT greatest(thread.last_seq, (SELECT max(seq) FROM event WHERE event.thread_id = thread.thread_id))
        FROM thread WHERE thread.thread_id = run.thread_id)),
    error = jsonb_build_object('error', 'GraphGone', 'message',
        format('No worker has had graph ''%%s'' for %%s seconds (GRAPH_GONE_AFTER_SECONDS): the run has no worker.',
               run.graph_id, round(%(after)s::numeric, 1)))
FROM stuck WHERE run.run_id = stuck.run_id
RETURNING run.run_id, run.thread_id, run.graph_id, run.cancel_action
"""


async def record_missing_graphs(connection: AsyncConnection[DictRow], *, after: float, gap: float) -> list[str]:
    """Record which graphs queued runs need and no worker has. Returns those that have been missing for `after` seconds.

    `gap`: the longest time between two checks, in seconds, before the count starts again.
    """
    cursor = await connection.execute(RECORD_MISSING, {"after": after, "gap": gap})
    return [row["graph_id"] for row in await cursor.fetchall() if row["gone"]]


async def end_graphless_runs(
    database: Database, graphs: list[str], *, after: float, batch: int, aside: RowsSetAside | None = None
) -> list[DictRow]:
    """End runs as dead letters that have waited for `after` seconds for one of these graphs. Returns them.

    A run that cannot be ended is set aside and does not delay the others.
    """
    passed_over = [] if aside is None else aside.ids()
    parameters = {"graphs": graphs, "after": after, "batch": batch, "aside": passed_over}
    async with database.connection() as connection:
        doomed = await (await connection.execute(DOOMED, parameters)).fetchall()
    return await process_rows(database, doomed, partial(_end, database, after=after), aside) if doomed else []


async def _end(database: Database, doomed: Sequence[DictRow], *, after: float) -> list[DictRow]:
    async with database.transaction() as connection:
        await connection.execute(LOCK_THREADS, {"thread_ids": sorted({row["thread_id"] for row in doomed})})
        run_ids = [row["run_id"] for row in doomed]
        # Settling the threads locks the parents one by one, so lock all of them in order first.
        await lock_with_parents(connection, run_ids, [row["parent_run_id"] for row in doomed])
        ended = await (await connection.execute(END, {"run_ids": run_ids, "after": after})).fetchall()
        if ended:
            for row in ended:
                if row["cancel_action"] == "rollback":
                    # A rollback was requested while a worker had the run.
                    await erase_runs(connection, row["thread_id"], [row["run_id"]])
            run_ids = [row["run_id"] for row in ended]
            await connection.execute(INSERT_END_EVENTS, {"run_ids": run_ids})
            await connection.execute(MARK_POISONED_THREADS, {"run_ids": run_ids})
            await queue_webhooks(connection, run_ids)
            await update_interrupts_without_worker(connection, [row["thread_id"] for row in ended], run_ids)
            threads = {"thread_ids": sorted({row["thread_id"] for row in ended})}
            await connection.execute(PROMOTE_NEXT, threads)
            await connection.execute(SET_THREAD_STATUS, threads)
    return ended
