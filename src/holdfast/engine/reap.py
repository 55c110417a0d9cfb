"""Take-over: runs whose worker is gone return to the queue, under a higher fence.

Level-triggered: each statement looks at how things are, so a pass that was missed or interrupted is made up by
the next.
"""

from __future__ import annotations

from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.gates import give_back
from holdfast.engine.outbox import queue_webhooks
from holdfast.engine.queue import LOCK_THREADS, PROMOTE_NEXT, SETTLE_THREAD
from holdfast.engine.rollback import erase_runs
from holdfast.engine.waking import lock_with_parents

# Two rules make a worker lost. Its lease ran out; or its heartbeat's session has been missing from pg_stat_activity
# for the grace. The second holds only for a session that began under this very server: when Postgres restarts, all of
# them are gone, and each worker gets the time of its lease to come back. One statement, because the leader asks every
# second: it notes who is missing or back, and names who is missing now or lost.
WATCH_WORKERS = """
WITH seen AS (
    SELECT worker_id, host, pid, session_gone_at, lease_until < now() AS expired,
           worker.backend_pid IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM pg_stat_activity session
                           WHERE session.pid = worker.backend_pid AND session.backend_start = worker.backend_start)
           AND worker.backend_start >= pg_postmaster_start_time() AS gone
    FROM worker WHERE status IN ('online', 'draining')
), noted AS (
    UPDATE worker SET session_gone_at = CASE WHEN seen.gone THEN now() END
    FROM seen
    WHERE worker.worker_id = seen.worker_id AND seen.gone IS DISTINCT FROM (worker.session_gone_at IS NOT NULL)
)
SELECT worker_id, host, pid, expired,
       expired OR gone AND session_gone_at <= now() - make_interval(secs => %(grace)s) AS lost,
       %(grace)s::float8 - coalesce(extract(epoch FROM now() - session_gone_at)::float8, 0) AS grace_left
FROM seen WHERE expired OR gone ORDER BY worker_id
"""

# Conditions are repeated under the row lock: a renewal that got in first keeps the worker.
MARK_LOST = """
UPDATE worker SET status = 'lost', stopped_at = now()
WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining')
  AND (lease_until < now() OR session_gone_at <= now() - make_interval(secs => %(grace)s))
RETURNING worker_id
"""

# Runs of every worker that is not alive, not only of the one just marked: one that claimed at the last moment,
# or whose reaper died between two statements, is found here too.
ORPHANS = """
SELECT run.run_id, run.thread_id, run.worker_id, run.parent_run_id FROM run
LEFT JOIN worker USING (worker_id)
WHERE run.status = 'running' AND (worker.worker_id IS NULL OR worker.status IN ('lost', 'offline'))
ORDER BY run.thread_id, run.run_id LIMIT 1000
"""

# The place in the queue is kept. A run that has now taken down `max_crashes` workers is a poison run. A worker that was
# last heard of by an earlier start of the server was lost to the outage, and its runs are not to blame.
RELEASE = """
WITH orphaned AS (
    SELECT run.run_id, run.updated_at AS claimed_at,
           run.crashes + CASE WHEN worker.backend_start < pg_postmaster_start_time() THEN 0 ELSE 1 END AS crashes
    FROM run LEFT JOIN worker USING (worker_id)
    WHERE run.run_id = ANY(%(run_ids)s) AND run.status = 'running'
      AND (worker.worker_id IS NULL OR worker.status IN ('lost', 'offline'))
    ORDER BY run.run_id FOR NO KEY UPDATE OF run
), held AS (
    SELECT run_id, claimed_at, crashes, crashes >= %(max_crashes)s AS poison FROM orphaned
)
UPDATE run SET
    fence = run.fence + 1, crashes = held.crashes, worker_id = NULL, updated_at = now(),
    status = CASE WHEN held.poison THEN 'error' ELSE 'pending' END,
    ready_at = CASE WHEN held.poison THEN NULL ELSE run.ready_at END,
    finished_at = CASE WHEN held.poison THEN now() END,
    dead_letter = CASE WHEN held.poison THEN 'poison' END,
    error = CASE WHEN held.poison THEN jsonb_build_object('error', 'PoisonRun', 'message',
        format('The run was stopped: %%s workers died while executing it (HOLDFAST_MAX_CRASHES).', held.crashes)) END
FROM held WHERE run.run_id = held.run_id
RETURNING run.run_id, run.thread_id, run.graph_id, run.status, run.attempt, run.crashes, run.error, run.cancel_action,
          run.progress, run.assistant_id, run.tenant_id, run.kwargs -> 'trace' AS trace,
          coalesce(run.kwargs -> 'config' ->> 'run_name', run.graph_id) AS run_name,
          held.claimed_at
"""

# Nobody executes the run any more who could say that it failed, and a stream that just ends looks like success. The
# thread is locked and the fence raised, so the numbers are ours to give.
TELL_POISONED = """
INSERT INTO event (thread_id, seq, run_id, kind, data)
SELECT run.thread_id, numbered.last + told.place, run.run_id, told.kind, convert_to(told.data::text, 'UTF8')
FROM run JOIN thread USING (thread_id)
CROSS JOIN LATERAL (
    SELECT greatest(thread.last_seq, (SELECT seq FROM event WHERE event.thread_id = run.thread_id
                                      ORDER BY seq DESC LIMIT 1)) AS last
) AS numbered
CROSS JOIN LATERAL (
    VALUES (1, 'error', run.error), (2, 'end', jsonb_build_object('status', run.status, 'error', run.error))
) AS told(place, kind, data)
WHERE run.run_id = ANY(%(run_ids)s)
"""

MARK_POISONED_THREADS = """
UPDATE thread SET resting_status = 'error', has_state = true, error = run.error, state_updated_at = now(),
                  last_seq = greatest(thread.last_seq, (SELECT seq FROM event WHERE event.thread_id = thread.thread_id
                                                        ORDER BY seq DESC LIMIT 1))
FROM run WHERE run.run_id = ANY(%(run_ids)s) AND thread.thread_id = run.thread_id
"""


async def watch_workers(connection: AsyncConnection[DictRow], *, grace: float) -> list[DictRow]:
    """The workers whose session is missing or whose lease has expired; `lost` says which are lost by now, and
    `grace_left` how many seconds the others have."""
    cursor = await connection.execute(WATCH_WORKERS, {"grace": grace})
    return await cursor.fetchall()


async def mark_lost(connection: AsyncConnection[DictRow], worker_id: UUID, *, grace: float) -> bool:
    """Declare a worker lost. From here on its renewals, its claims and its journal are refused."""
    cursor = await connection.execute(MARK_LOST, {"worker_id": worker_id, "grace": grace})
    return await cursor.fetchone() is not None


async def release_orphans(database: Database, *, max_crashes: int) -> list[DictRow]:
    """Put the runs of lost workers back into the queue, or with the dead letters. Returns them as they are now."""
    async with database.connection() as connection:
        orphans = await (await connection.execute(ORPHANS)).fetchall()
    if not orphans:
        return []
    thread_ids = sorted({row["thread_id"] for row in orphans})
    run_ids = [row["run_id"] for row in orphans]
    async with database.transaction() as connection:
        await connection.execute(LOCK_THREADS, {"thread_ids": thread_ids})
        await lock_with_parents(connection, run_ids, [row["parent_run_id"] for row in orphans])
        cursor = await connection.execute(RELEASE, {"run_ids": run_ids, "max_crashes": max_crashes})
        released = await cursor.fetchall()
        poisoned = [row for row in released if row["status"] == "error"]
        if poisoned:
            for row in poisoned:
                if row["cancel_action"] == "rollback":
                    # Nobody will take the run up again, so the rollback that was asked for happens here.
                    await erase_runs(connection, row["thread_id"], [row["run_id"]])
            await connection.execute(TELL_POISONED, {"run_ids": [row["run_id"] for row in poisoned]})
            await connection.execute(MARK_POISONED_THREADS, {"run_ids": [row["run_id"] for row in poisoned]})
            await queue_webhooks(connection, [row["run_id"] for row in poisoned])
            unheard = [row for row in poisoned if row["progress"] < 2]
            if unheard:
                await give_back(connection, [row["thread_id"] for row in unheard], [row["run_id"] for row in unheard])
            ended = {"thread_ids": sorted({row["thread_id"] for row in poisoned})}
            await connection.execute(PROMOTE_NEXT, ended)
            await connection.execute(SETTLE_THREAD, ended)
    return released
