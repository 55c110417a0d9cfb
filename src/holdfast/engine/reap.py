"""Take-over: runs whose worker is gone return to the queue, under a higher fence.

Each statement looks at the present rows, not at past events, so a pass that was missed or interrupted is made up for by
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
from holdfast.engine.queue import LOCK_THREADS, PROMOTE_NEXT, SET_THREAD_STATUS
from holdfast.engine.rollback import erase_runs

# The share of the grace for a missing session that a worker has when all its sessions are missing: 0.2 seconds by
# default. A living process reconnects its heartbeat sooner, if it can connect at all.
SHORT_GRACE_SHARE = 0.125

# Shares of DATABASE_TIMEOUT: how long runs may be released one by one, and poison runs be ended one by one, before the
# caller gets the result. The next check for lost workers waits for that.
RELEASE_SHARE = 1.0
END_SHARE = 0.5

# A worker is lost when its lease has expired, when its supervisor saw the process end, or when its heartbeat's session
# has been missing from pg_stat_activity for the grace.
#
# A session is recognised by its pid and its name, which every role may read. The name contains the token of the
# process, so a pid that was used again is not mistaken for it. `backend_start` is NULL in the rows of other roles'
# sessions, so it counts only where it can be read.
#
# A missing session counts only if the worker last renewed with this very server. When Postgres restarts, or a standby
# is promoted, all sessions are gone, and each worker gets the time of its lease to come back. The start of the server
# is compared for equality: the promoted server may have been started long before the one that failed.
#
# After an outage longer than a lease, or a jump of the server's clock, all leases have expired. Until the leader is
# `settled`, an expired lease counts only if its worker has recorded which runs are to blame: the other workers may be
# about to renew, or to register again and record it.
#
# When all sessions of a process are gone, it has probably died, and the grace is short. But not if the session that
# executes this statement was opened only after they were gone: something may then have cut the sessions of all
# processes, and reconnecting takes time.
#
# It is one statement because it is executed often: it records which sessions are missing or back, and returns the
# missing and lost workers. `busy`: whether any run is executing. A worker whose row is locked is left out until the
# next check, so that it does not delay the others.
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

# The conditions are checked again under the row lock: a renewal that came first keeps the worker.
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

# The runs of all workers that are not alive, not only of one just marked. That includes runs claimed at the last
# moment, runs left by a reaper that died between two statements, and runs whose worker could write no outcome and
# disowned them (`unexecuted.py`). `shared_worker`: whether the worker executed other runs as well; must be read before
# the first of them is released.
ORPHANS = """
SELECT run.run_id, run.thread_id, run.worker_id, run.parent_run_id,
       run.crashes_in_a_row + 1 >= %(max_crashes)s
       AND EXISTS (SELECT 1 FROM run other
                   WHERE other.worker_id = run.worker_id AND other.status = 'running'
                     AND other.run_id <> run.run_id) AS shared_worker
FROM run LEFT JOIN worker USING (worker_id)
WHERE run.status = 'running' AND (worker.worker_id IS NULL OR worker.status IN ('lost', 'offline'))
  AND run.run_id <> ALL(%(aside)s)
ORDER BY run.thread_id, run.run_id LIMIT 1000
"""

# A released run keeps its place in the queue. A run that has taken down `max_crashes` workers without progress is a
# poison run. If a worker's last renewal went to another server, or to this one before a restart, the outage was the
# cause, and no crash is counted. If the worker recorded which of its runs are to blame (`blame.py`), only those count.
# Any run of a dead worker may have killed it. Those without progress since an earlier crash are suspects and are kept
# apart (`claim.py`), but another run on the same worker may have been the cause. So a run that shared its last worker
# gets one more attempt.
# The statement reads nothing that a client wrote: Postgres cannot read JSON with a NUL character and would refuse the
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
        ELSE run_id <> ALL(%(shared_worker)s) END AS poison
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

# No worker has the run to write its end, and a stream that just stops looks like success. The thread is locked and the
# fence raised, so this transaction may assign event numbers.
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
    """The result of one check of the workers.

    `missing`: workers whose session is missing, whose process has ended or whose lease has expired. Of each, `lost`
    says whether it counts as lost, `grace` is its grace in seconds and `grace_left` the rest of it. `busy`: whether any
    run is executing. `server_time`: the server's clock, in seconds.
    """

    busy: bool
    server_time: float
    missing: list[DictRow]


async def watch_workers(connection: AsyncConnection[DictRow], *, grace: float, settled: bool = True) -> Watched:
    """Check all workers.

    `grace`: how many seconds a heartbeat's session may be missing while its process has others. `settled`: whether an
    expired lease alone means that the worker is lost.
    """
    parameters = {"grace": grace, "short_grace": grace * SHORT_GRACE_SHARE, "settled": settled}
    rows = await (await connection.execute(WATCH_WORKERS, parameters)).fetchall()
    return Watched(rows[0]["busy"], rows[0]["server_time"], [row for row in rows if row["worker_id"] is not None])


async def mark_lost(connection: AsyncConnection[DictRow], worker_id: UUID, *, grace: float) -> bool:
    """Declare a worker lost. Its renewals and claims are refused from then on, and its journal's writes as soon as its
    runs are released under higher fences.

    Returns False if it is not lost after all, or if its row is locked.
    """
    cursor = await connection.execute(MARK_LOST, {"worker_id": worker_id, "grace": grace})
    return await cursor.fetchone() is not None


async def release_orphans(
    database: Database, *, max_crashes: int, aside: RowsSetAside | None = None, shared_worker: set[UUID] | None = None
) -> list[DictRow]:
    """Return the runs of lost workers to the queue, or make them dead letters. Returns them as they are now.

    A run that cannot be released is set aside and does not delay the others. The set `shared_worker` is kept between
    calls: it has the runs that shared their worker and are still to be released, since the other runs may be released
    first."""
    async with database.connection() as connection:
        parameters = {"aside": [] if aside is None else aside.ids(), "max_crashes": max_crashes}
        orphans = await (await connection.execute(ORPHANS, parameters)).fetchall()
    shared_worker = set() if shared_worker is None else shared_worker
    shared_worker |= {row["run_id"] for row in orphans if row["shared_worker"]}
    if not orphans:
        return []
    # First the runs that return to the queue, which needs only the tables of runs and threads. Ending a poison run
    # needs more tables, and waits if one of them is locked.
    timeout = database.settings.database_timeout
    release = partial(_release, database, max_crashes=max_crashes, shared_worker=shared_worker, poison=False)
    released = await process_rows(database, orphans, release, aside, within=RELEASE_SHARE * timeout)
    dealt_with = {row["run_id"] for row in released}.union([] if aside is None else aside.ids())
    if rest := [row for row in orphans if row["run_id"] not in dealt_with]:
        end = partial(_release, database, max_crashes=max_crashes, shared_worker=shared_worker, poison=True)
        try:
            released += await process_rows(database, rest, end, aside, within=END_SHARE * timeout)
        except Exception:
            # Return those that were released, so that they are announced. The next pass finds the others.
            if not released:
                raise
    shared_worker -= {row["run_id"] for row in released}
    return released


async def _release(
    database: Database, orphans: Sequence[DictRow], *, max_crashes: int, shared_worker: set[UUID], poison: bool
) -> list[DictRow]:
    """Release either the poison runs among the orphans, or the others."""
    run_ids = [row["run_id"] for row in orphans]
    parameters = {
        "run_ids": run_ids,
        "max_crashes": max_crashes,
        "shared_worker": [run_id for run_id in run_ids if run_id in shared_worker],
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
            # No worker will claim the run again, so a requested rollback is done here.
            await erase_runs(connection, row["thread_id"], [row["run_id"]])
    await connection.execute(INSERT_END_EVENTS, {"run_ids": run_ids})
    await connection.execute(MARK_POISONED_THREADS, {"run_ids": run_ids})
    await queue_webhooks(connection, run_ids)
    await update_interrupts_without_worker(connection, [row["thread_id"] for row in poisoned], run_ids)
    ended = {"thread_ids": sorted({row["thread_id"] for row in poisoned})}
    await connection.execute(PROMOTE_NEXT, ended)
    await connection.execute(SET_THREAD_STATUS, ended)
