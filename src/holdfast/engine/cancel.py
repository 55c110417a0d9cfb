"""Cancelling runs.

A run that is not running ends in the transaction that asks. A running one is marked; its owner learns of it by a
hint, at the latest by its next heartbeat, interrupts the graph where it stands and writes the end. Terminal runs are
not touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.queue import LOCK_THREADS, PROMOTE_NEXT, SETTLE_THREAD
from holdfast.engine.rollback import erase_runs
from holdfast.engine.states import CancelAction
from holdfast.signals import Signals

# Waits for a claim or a journal commit in flight, and sees what it left.
LOCK_UNFINISHED = """
SELECT run_id, thread_id, status, worker_id, cancel_action FROM run
WHERE thread_id = %(thread_id)s AND status IN ('pending', 'running')
  AND (%(run_ids)s::uuid[] IS NULL OR run_id = ANY(%(run_ids)s))
ORDER BY run_id FOR NO KEY UPDATE
"""

# A rollback outranks an interrupt that came first, never the other way round.
REQUEST_CANCEL = """
UPDATE run SET cancel_action = %(action)s, updated_at = now()
WHERE run_id = ANY(%(run_ids)s) AND status = 'running' AND cancel_action IS DISTINCT FROM 'rollback'
"""

# A run between two attempts leaves its checkpoints behind, and the thread in the middle of them.
END_PENDING = """
WITH ended AS (
    UPDATE run SET status = 'interrupted', ready_at = NULL, finished_at = now(), updated_at = now(),
                   cancel_action = 'interrupt'
    WHERE run_id = ANY(%(run_ids)s) AND status = 'pending'
    RETURNING thread_id, fence, progress
), per_thread AS (
    SELECT thread_id, bool_or(fence > 0) AS started, bool_or(progress = 2) AS midway FROM ended GROUP BY thread_id
)
UPDATE thread SET
    has_state = thread.has_state OR per_thread.started,
    last_seq = greatest(thread.last_seq, (SELECT seq FROM event WHERE event.thread_id = thread.thread_id
                                          ORDER BY seq DESC LIMIT 1)),
    resting_status = CASE WHEN per_thread.midway THEN 'interrupted' ELSE thread.resting_status END,
    error = CASE WHEN per_thread.midway
                 THEN '{"error": "UserInterrupt", "message": "The run was cancelled."}'::jsonb ELSE thread.error END
FROM per_thread WHERE thread.thread_id = per_thread.thread_id
"""


@dataclass(frozen=True)
class CancelledRuns:
    """`ended` are over already; `requested` (run_id, thread_id, worker_id) still have to be stopped by their owner."""

    ended: list[UUID] = field(default_factory=list)
    requested: list[DictRow] = field(default_factory=list)


async def cancel_locked(
    connection: AsyncConnection[DictRow], thread_id: UUID, run_ids: list[UUID] | None, action: CancelAction
) -> CancelledRuns:
    """Cancel the given unfinished runs of a thread (None: all of them). The caller holds the thread's lock and
    settles the thread afterwards."""
    cursor = await connection.execute(LOCK_UNFINISHED, {"thread_id": thread_id, "run_ids": run_ids})
    rows = await cursor.fetchall()
    requested = [row for row in rows if row["status"] == "running"]
    pending = [row for row in rows if row["status"] == "pending"]
    # A rollback that was promised while the run was running is kept, even if the run has lost its worker since.
    erased = [row["run_id"] for row in pending if "rollback" in (action, row["cancel_action"])]
    ended = [row["run_id"] for row in pending if row["run_id"] not in erased]
    if requested:
        await connection.execute(REQUEST_CANCEL, {"run_ids": [row["run_id"] for row in requested], "action": action})
    if erased:
        await erase_runs(connection, thread_id, erased)
    if ended:
        await connection.execute(END_PENDING, {"run_ids": ended})
    return CancelledRuns(ended=[*ended, *erased], requested=requested)


def announce_cancelled(signals: Signals, cancelled: CancelledRuns, action: CancelAction) -> None:
    """Tell the owners of runs to stop, and the watchers of runs that ended already."""
    for run in cancelled.requested:
        signals.publish("cancel", orjson.dumps({"run_id": str(run["run_id"]), "action": action}).decode())
    if cancelled.ended:
        signals.publish("events", orjson.dumps({"ended": [str(run) for run in cancelled.ended]}).decode())
        signals.publish("work", "")


async def cancel_runs(
    database: Database, thread_id: UUID, run_ids: list[UUID] | None, action: CancelAction
) -> CancelledRuns:
    """Cancel runs of one thread. When this returns the request is committed; an empty result means that none of
    them was unfinished."""
    async with database.transaction() as connection:
        await connection.execute(LOCK_THREADS, {"thread_ids": [thread_id]})
        cancelled = await cancel_locked(connection, thread_id, run_ids, action)
        if cancelled.ended:
            await connection.execute(PROMOTE_NEXT, {"thread_ids": [thread_id]})
            await connection.execute(SETTLE_THREAD, {"thread_ids": [thread_id]})
    return cancelled
