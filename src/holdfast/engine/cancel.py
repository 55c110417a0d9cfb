"""Cancelling runs.

A pending run is ended by the transaction of the cancel. A running one is marked; its worker gets a hint, or at the
latest reads the mark with its next heartbeat, then interrupts the graph where it stands and writes the end. Runs that
have ended are not changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

import orjson
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.children.parents import LOCK_FAMILY, ready_parents
from holdfast.engine.interrupts.without_worker import update_interrupts_without_worker
from holdfast.engine.outbox import announce_webhooks, queue_webhooks
from holdfast.engine.queue import LOCK_THREADS, PROMOTE_NEXT, SET_THREAD_STATUS
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.engine.rollback import erase_runs
from holdfast.engine.states import CancelAction
from holdfast.signals import Signals
from holdfast.streams.hints import check_log_hint, ended_runs_hints

log = structlog.get_logger(__name__)

# The same error as when a worker ends a cancelled run.
USER_INTERRUPT = '{"error": "UserInterrupt", "message": "The run was cancelled."}'

# Waits for a concurrent claim or journal commit, and sees its result.
LOCK_UNFINISHED = """
SELECT run_id, thread_id, status, worker_id, cancel_action, webhook IS NOT NULL AS webhook,
       children > 0 AS has_children, parent_run_id, fence > 0 AS started,
       EXISTS (SELECT 1 FROM interrupt
               WHERE interrupt.thread_id = run.thread_id AND interrupt.answered_by = run.run_id) AS answers
FROM run
WHERE thread_id = %(thread_id)s AND status IN ('pending', 'running')
  AND (%(run_ids)s::uuid[] IS NULL OR run_id = ANY(%(run_ids)s))
ORDER BY run_id FOR NO KEY UPDATE
"""

# A rollback replaces an earlier interrupt. An interrupt never replaces a rollback.
REQUEST_CANCEL = """
UPDATE run SET cancel_action = %(action)s, updated_at = now()
WHERE run_id = ANY(%(run_ids)s) AND status = 'running' AND cancel_action IS DISTINCT FROM 'rollback'
"""

# The log of a run between two attempts says that it is running, and no worker has it to write its end. The thread is
# locked, so this transaction may assign event numbers.
INSERT_CANCEL_EVENTS = """
INSERT INTO event (thread_id, seq, run_id, kind, data)
SELECT run.thread_id,
       numbered.last + row_number() OVER (PARTITION BY run.thread_id ORDER BY run.created_at, run.run_id), run.run_id,
       'end', convert_to(jsonb_build_object('status', 'interrupted', 'error', %(error)s::jsonb,
                                                        'graph_id', run.graph_id)::text, 'UTF8')
FROM run JOIN thread USING (thread_id)
CROSS JOIN LATERAL (
    SELECT greatest(thread.last_seq, (SELECT seq FROM event WHERE event.thread_id = run.thread_id
                                      ORDER BY seq DESC LIMIT 1)) AS last
) AS numbered
WHERE run.run_id = ANY(%(run_ids)s) AND run.status = 'pending' AND run.first_seq IS NOT NULL
RETURNING thread_id
"""

# A run between two attempts leaves its checkpoints, so the thread stays between two steps.
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
    error = CASE WHEN per_thread.midway THEN %(error)s::jsonb ELSE thread.error END
FROM per_thread WHERE thread.thread_id = per_thread.thread_id
"""


@dataclass(frozen=True)
class CancelledRuns:
    """The result of a cancel.

    `ended`: runs that have ended. `requested` (run_id, thread_id, worker_id): runs that their workers have yet to stop.
    `promoted` (run_id, graph_id): runs that became ready. `logged`: threads whose log has the end. `webhooks`: whether
    a webhook was queued. `parents`: cancelled runs with children, which must be cancelled too. `waited_for_by`: the
    parents of the runs that ended.
    """

    ended: list[UUID] = field(default_factory=list)
    requested: list[DictRow] = field(default_factory=list)
    promoted: list[DictRow] = field(default_factory=list)
    logged: list[UUID] = field(default_factory=list)
    webhooks: bool = False
    parents: list[UUID] = field(default_factory=list)
    waited_for_by: list[UUID] = field(default_factory=list)


async def cancel_locked(
    connection: AsyncConnection[DictRow], thread_id: UUID, run_ids: list[UUID] | None, action: CancelAction
) -> CancelledRuns:
    """Cancel the given unfinished runs of a thread; None: all of them.

    The caller holds the thread's lock and settles the thread afterwards.
    """
    cursor = await connection.execute(LOCK_UNFINISHED, {"thread_id": thread_id, "run_ids": run_ids})
    rows = await cursor.fetchall()
    requested = [row for row in rows if row["status"] == "running"]
    pending = [row for row in rows if row["status"] == "pending"]
    # A rollback that was requested while the run was running is done even if the run has lost its worker since.
    erased = [row["run_id"] for row in pending if "rollback" in (action, row["cancel_action"])]
    ended = [row["run_id"] for row in pending if row["run_id"] not in erased]
    if requested:
        await connection.execute(REQUEST_CANCEL, {"run_ids": [row["run_id"] for row in requested], "action": action})
    if erased:
        await erase_runs(connection, thread_id, erased)
    logged: list[UUID] = []
    if ended:
        parameters = {"run_ids": ended, "error": USER_INTERRUPT}
        cursor = await connection.execute(INSERT_CANCEL_EVENTS, parameters)
        logged = [row["thread_id"] for row in await cursor.fetchall()]
        await connection.execute(END_PENDING, parameters)
    # A run that never started and resumes nothing changes no interrupt.
    with_interrupts = [
        row["run_id"] for row in pending if row["run_id"] in ended and (row["started"] or row["answers"])
    ]
    if with_interrupts:
        await update_interrupts_without_worker(connection, [thread_id], with_interrupts)
    with_webhook = [row["run_id"] for row in pending if row["webhook"] and row["run_id"] in ended]
    if with_webhook:
        await queue_webhooks(connection, with_webhook)
    return CancelledRuns(
        ended=[*ended, *erased],
        requested=requested,
        logged=logged,
        webhooks=bool(with_webhook),
        parents=[row["run_id"] for row in rows if row["has_children"]],
        waited_for_by=[row["parent_run_id"] for row in pending if row["parent_run_id"] is not None],
    )


def announce_cancelled(signals: Signals, cancelled: CancelledRuns, action: CancelAction) -> None:
    """Send hints: to the workers that must stop runs, to the watchers of runs that ended, and about runs that became
    ready."""
    for run in cancelled.requested:
        log.info("run.cancel_requested", run_id=str(run["run_id"]), action=action)
        signals.publish("cancel", orjson.dumps({"run_id": str(run["run_id"]), "action": action}).decode())
    for run_id in cancelled.ended:
        log.info("run.cancelled", run_id=str(run_id), action=action)
    for hint in ended_runs_hints(cancelled.ended):
        signals.publish("events", hint)
    for thread_id in dict.fromkeys(cancelled.logged):
        signals.publish("events", check_log_hint(thread_id), thread_id=thread_id)
    if cancelled.webhooks:
        announce_webhooks(signals)
    announce_ready(signals, [ReadyRun(run["run_id"], run["graph_id"]) for run in cancelled.promoted])


async def cancel_runs(
    database: Database, thread_id: UUID, run_ids: list[UUID] | None, action: CancelAction
) -> CancelledRuns:
    """Cancel runs of one thread. The request is committed when this returns. The result is empty if none of them was
    unfinished."""
    async with database.transaction() as connection:
        locked = await (await connection.execute(LOCK_THREADS, {"thread_ids": [thread_id]})).fetchone()
        if locked is not None and locked["parent_run_id"] is not None:
            await connection.execute(LOCK_FAMILY, locked)
        cancelled = await cancel_locked(connection, thread_id, run_ids, action)
        if cancelled.ended:
            promoted = await connection.execute(PROMOTE_NEXT, {"thread_ids": [thread_id]})
            cancelled.promoted.extend(await promoted.fetchall())
            await connection.execute(SET_THREAD_STATUS, {"thread_ids": [thread_id]})
            if cancelled.waited_for_by:
                cancelled.promoted.extend(await ready_parents(connection, cancelled.waited_for_by))
    return cancelled
