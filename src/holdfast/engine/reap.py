"""Take-over: runs whose worker is gone return to the queue, under a higher fence.

Level-triggered: each statement looks at how things are, so a pass that was missed or interrupted is made up by
the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.row_by_row import RowsSetAside, process_rows
from holdfast.engine.children.parents import lock_with_parents
from holdfast.engine.interrupts.without_worker import update_interrupts_without_worker
from holdfast.engine.outbox import queue_webhooks
from holdfast.engine.queue import LOCK_THREADS, PROMOTE_NEXT, SETTLE_THREAD
from holdfast.engine.rollback import erase_runs

# The part of the grace for a missing session that a worker has when all its sessions are missing. By default 0.2
# seconds: a living process reconnects its heartbeat in less, if it can connect at all.
SHORT_GRACE_SHARE = 0.125

# Of DATABASE_TIMEOUT: how long runs are released one by one before the caller is told of those that are, and how long
# poison runs are ended so. The next look for lost workers waits for that.
RELEASE_SHARE = 1.0
END_SHARE = 0.5

# Three rules make a worker lost. Its lease ran out; its supervisor saw the process end; or its heartbeat's session has
# been missing from pg_stat_activity for the grace.
#
# A session is recognised by its pid and its name, which every role may read. The name contains the token of the
# process, so a pid that was used again is not mistaken for it. `backend_start` is NULL in the rows of other roles'
# sessions, so it counts only where it can be read.
#
# A missing session counts only if the worker last renewed with this very server. When Postgres restarts, or a standby
# is promoted, all sessions are gone, and each worker gets the time of its lease to come back. The start of the server
# is compared for equality: the promoted server may have been started long before the one that failed.
#
# After an outage that was longer than the leases, or a jump of the server's clock, all of them have expired. Until the
# leader is `settled`, only those count whose worker has said which runs are to blame: the others may be about to renew,
# or to register anew and say it.
#
# When all sessions of the process are gone, it has probably died, and the grace is short. Not if they were gone when
# this session, which asks, had only just been opened: then something may have cut everybody's sessions, this one's
# predecessor included, and reconnecting takes its time.
#
# One statement, because it is executed so often: it records which sessions are missing or back, and returns the workers
# that are missing or lost. `busy`: runs are being executed, so that there is something to take over. A worker whose row
# somebody has locked is passed over: it delays no other, and is looked at again soon.
WATCH_WORKERS = """
WITH seen AS (
    SELECT worker_id, host, pid, session_gone_at, ended_at IS NOT NULL AS ended,
           lease_until < now() AND (%(settled)s OR blamed IS NOT NULL) AS expired,
           worker.backend_pid IS NOT NULL
           AND coalesce(worker.server_start = pg_postmaster_start_time(),
                        worker.backend_start >= pg_postmaster_start_time(), false)
           AND NOT EXISTS (SELECT 1 FROM pg_stat_activity session
                           WHERE session.pid = worker.backend_pid
                             AND coalesce(session.backend_start = worker.backend_start, true)
                             AND coalesce(session.application_name = worker.session_name, true)) AS gone,
           process, session_name
    FROM worker WHERE status IN ('online', 'draining')
), missing AS (
    SELECT worker_id, host, pid, session_gone_at, expired, ended, gone,
           CASE WHEN gone AND strpos(session_name, process) > 0
                     AND coalesce(session_gone_at, now()) > (SELECT backend_start + make_interval(secs => %(grace)s)
                                                             FROM pg_stat_activity WHERE pid = pg_backend_pid())
                     AND NOT EXISTS (SELECT 1 FROM pg_stat_activity session
                                     WHERE strpos(session.application_name, seen.process) > 0)
                THEN %(short_grace)s::float8 ELSE %(grace)s::float8 END AS grace
    FROM seen WHERE expired OR ended OR gone
), changed AS (
    SELECT worker.worker_id, seen.gone FROM worker JOIN seen USING (worker_id)
    WHERE seen.gone <> (worker.session_gone_at IS NOT NULL)
    FOR NO KEY UPDATE OF worker SKIP LOCKED
), noted AS (
    UPDATE worker SET session_gone_at = CASE WHEN changed.gone THEN now() END
    FROM changed WHERE worker.worker_id = changed.worker_id
)
SELECT EXISTS (SELECT 1 FROM run WHERE status = 'running') AS busy, worker_id, host, pid, expired, ended, grace,
       expired OR ended OR gone AND session_gone_at <= now() - make_interval(secs => grace) AS lost,
       grace - coalesce(extract(epoch FROM now() - session_gone_at)::float8, 0) AS grace_left,
       extract(epoch FROM now())::float8 AS server_time
FROM (VALUES (true)) AS always LEFT JOIN missing ON true ORDER BY worker_id
"""

# Conditions are repeated under the row lock: a renewal that got in first keeps the worker.
MARK_LOST = """
WITH gone AS (
    SELECT worker_id FROM worker
    WHERE worker_id = %(worker_id)s AND status IN ('online', 'draining')
      AND (lease_until < now() OR ended_at IS NOT NULL OR session_gone_at <= now() - make_interval(secs => %(grace)s))
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE worker SET status = 'lost', stopped_at = now() FROM gone WHERE worker.worker_id = gone.worker_id
RETURNING worker.worker_id
"""

# Runs of every worker that is not alive, not only of the one just marked: one that claimed at the last moment, or
# whose reaper died between two statements, is found here too. So is a run of which its worker can write no outcome:
# it has no worker any more (`unexecuted.py`). `company`: whether the worker executed other runs. This must be asked
# before the first of them is released.
ORPHANS = """
SELECT run.run_id, run.thread_id, run.worker_id, run.parent_run_id,
       run.crashes_in_a_row + 1 >= %(max_crashes)s
       AND EXISTS (SELECT 1 FROM run company
                   WHERE company.worker_id = run.worker_id AND company.status = 'running'
                     AND company.run_id <> run.run_id) AS company
FROM run LEFT JOIN worker USING (worker_id)
WHERE run.status = 'running' AND (worker.worker_id IS NULL OR worker.status IN ('lost', 'offline'))
  AND run.run_id <> ALL(%(aside)s)
ORDER BY run.thread_id, run.run_id LIMIT 1000
"""

# The place in the queue is kept. A run that has now taken down `max_crashes` workers without any progress is a poison
# run. A worker whose last renewal went to another server, or to this one before it was restarted, was lost to the
# outage, and its runs are not to blame; nor are the others, where the worker could say which of its runs were
# (`blame.py`).
# Any of a dead worker's runs may have killed it. Those without progress since an earlier crash are the first suspects,
# and are executed apart (`claim.py`); but another run beside them may have been the one. So a run that had company when
# its last worker died gets one more chance.
# It reads nothing that a client wrote: Postgres cannot look into JSON that holds a NUL character, and would refuse the
# whole batch.
RELEASE = """
WITH orphaned AS (
    SELECT run.run_id, run.worker_id, run.updated_at AS claimed_at, run.crashes_in_a_row AS crashes, worker.blamed,
           CASE WHEN coalesce(worker.server_start <> pg_postmaster_start_time(),
                              worker.backend_start < pg_postmaster_start_time()) THEN 0
                WHEN worker.blamed IS NOT NULL THEN (run.run_id = ANY(worker.blamed))::integer ELSE 1 END AS crash
    FROM run LEFT JOIN worker USING (worker_id)
    WHERE run.run_id = ANY(%(run_ids)s) AND run.status = 'running'
      AND (worker.worker_id IS NULL OR worker.status IN ('lost', 'offline'))
    ORDER BY run.run_id FOR NO KEY UPDATE OF run
), held AS (
    SELECT orphaned.*, CASE
        WHEN crash = 0 OR crashes + 1 < %(max_crashes)s THEN false
        WHEN crashes >= %(max_crashes)s OR blamed IS NOT NULL THEN true
        ELSE run_id <> ALL(%(accompanied)s) END AS poison
    FROM orphaned
)
UPDATE run SET
    fence = run.fence + 1, crashes = run.crashes + held.crash, crashes_in_a_row = held.crashes + held.crash,
    worker_id = NULL, updated_at = now(),
    status = CASE WHEN held.poison THEN 'error' ELSE 'pending' END,
    ready_at = CASE WHEN held.poison THEN NULL ELSE run.ready_at END,
    finished_at = CASE WHEN held.poison THEN now() END,
    dead_letter = CASE WHEN held.poison THEN 'poison' END,
    error = CASE WHEN held.poison THEN jsonb_build_object('error', 'PoisonRun', 'message',
        format('The run was stopped: %%s workers died while executing it, or could write no outcome of it '
               '(HOLDFAST_MAX_CRASHES).', held.crashes + held.crash)) END
FROM held WHERE run.run_id = held.run_id AND held.poison = %(poison)s
RETURNING run.run_id, run.thread_id, run.graph_id, run.status, run.attempt, run.crashes, run.error, run.cancel_action,
          run.progress, run.assistant_id, run.tenant_id, held.claimed_at
"""

# Nobody executes the run any more who could say that it failed, and a stream that just ends looks like success. The
# thread is locked and the fence raised, so the numbers are ours to give.
INSERT_END_EVENTS = """
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


@dataclass(frozen=True)
class Watched:
    """`missing` are the workers whose session is missing, whose process has ended or whose lease has expired: `lost`
    says which are lost by now, `grace_left` how many seconds the others have, `grace` how many they had. `busy`: runs
    are being executed. `server_time`: the server's clock, in seconds."""

    busy: bool
    server_time: float
    missing: list[DictRow]


async def watch_workers(connection: AsyncConnection[DictRow], *, grace: float, settled: bool = True) -> Watched:
    """`grace`: seconds that a heartbeat's session may be missing while its process has others. `settled`: a lease that
    has expired means that its worker is gone."""
    parameters = {"grace": grace, "short_grace": grace * SHORT_GRACE_SHARE, "settled": settled}
    rows = await (await connection.execute(WATCH_WORKERS, parameters)).fetchall()
    return Watched(rows[0]["busy"], rows[0]["server_time"], [row for row in rows if row["worker_id"] is not None])


async def mark_lost(connection: AsyncConnection[DictRow], worker_id: UUID, *, grace: float) -> bool:
    """Declare a worker lost. From here on its renewals, its claims and its journal are refused. False if it is not, or
    if somebody has locked its row."""
    cursor = await connection.execute(MARK_LOST, {"worker_id": worker_id, "grace": grace})
    return await cursor.fetchone() is not None


async def release_orphans(
    database: Database, *, max_crashes: int, aside: RowsSetAside | None = None, accompanied: set[UUID] | None = None
) -> list[DictRow]:
    """Put the runs of lost workers back into the queue, or with the dead letters. Returns them as they are now. A run
    that cannot be released is set aside, and delays no other.

    `accompanied` is kept between calls: runs that had company when their worker died, and are still to be released.
    Their company may have been released before them.
    """
    async with database.connection() as connection:
        parameters = {"aside": [] if aside is None else aside.ids(), "max_crashes": max_crashes}
        orphans = await (await connection.execute(ORPHANS, parameters)).fetchall()
    accompanied = set() if accompanied is None else accompanied
    accompanied |= {row["run_id"] for row in orphans if row["company"]}
    if not orphans:
        return []
    # First those that go on: that needs only the tables of runs and threads. The end of a poison run needs others, too,
    # and waits if somebody has locked one of them.
    timeout = database.settings.database_timeout
    release = partial(_release, database, max_crashes=max_crashes, accompanied=accompanied, poison=False)
    released = await process_rows(database, orphans, release, aside, within=RELEASE_SHARE * timeout)
    dealt_with = {row["run_id"] for row in released}.union([] if aside is None else aside.ids())
    if rest := [row for row in orphans if row["run_id"] not in dealt_with]:
        end = partial(_release, database, max_crashes=max_crashes, accompanied=accompanied, poison=True)
        try:
            released += await process_rows(database, rest, end, aside, within=END_SHARE * timeout)
        except Exception:
            # The caller must learn of those that are released. The others are found again.
            if not released:
                raise
    accompanied -= {row["run_id"] for row in released}
    return released


async def _release(
    database: Database, orphans: Sequence[DictRow], *, max_crashes: int, accompanied: set[UUID], poison: bool
) -> list[DictRow]:
    """Release those of the orphans that are poison runs, or those that are not."""
    run_ids = [row["run_id"] for row in orphans]
    parameters = {
        "run_ids": run_ids,
        "max_crashes": max_crashes,
        "accompanied": [run_id for run_id in run_ids if run_id in accompanied],
        "poison": poison,
    }
    async with database.transaction() as connection:
        await connection.execute(LOCK_THREADS, {"thread_ids": sorted({row["thread_id"] for row in orphans})})
        await lock_with_parents(connection, run_ids, [row["parent_run_id"] for row in orphans])
        released = await (await connection.execute(RELEASE, parameters)).fetchall()
        if poison and released:
            await _end_poisoned(connection, released)
    return released


async def _end_poisoned(connection: AsyncConnection[DictRow], poisoned: list[DictRow]) -> None:
    run_ids = [row["run_id"] for row in poisoned]
    for row in poisoned:
        if row["cancel_action"] == "rollback":
            # Nobody will take the run up again, so the rollback that was asked for happens here.
            await erase_runs(connection, row["thread_id"], [row["run_id"]])
    await connection.execute(INSERT_END_EVENTS, {"run_ids": run_ids})
    await connection.execute(MARK_POISONED_THREADS, {"run_ids": run_ids})
    await queue_webhooks(connection, run_ids)
    await update_interrupts_without_worker(connection, [row["thread_id"] for row in poisoned], run_ids)
    ended = {"thread_ids": sorted({row["thread_id"] for row in poisoned})}
    await connection.execute(PROMOTE_NEXT, ended)
    await connection.execute(SETTLE_THREAD, ended)
