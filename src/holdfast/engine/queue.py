"""The statements that maintain a thread's queue and status. Every change of a run's state uses them.

They are executed under the thread's row lock. All code locks in one order: threads, then runs, each in the order of
their ids.
"""

from __future__ import annotations

LOCK_THREADS = """
SELECT thread_id, parent_run_id FROM thread WHERE thread_id = ANY(%(thread_ids)b::uuid[])
ORDER BY thread_id FOR NO KEY UPDATE
"""

# Make the first unfinished run of each thread its head, unless it is the head already (running, or pending and ready).
# A head is always the first, so one row is read however many runs wait in the thread. The exception is a clock that was
# set back: then a run can sort before the one that is running. It must not become the head beside it.
PROMOTE_NEXT = """
UPDATE run SET ready_at = run.created_at
FROM unnest(%(thread_ids)b::uuid[]) AS ended(thread_id)
CROSS JOIN LATERAL (
    SELECT unfinished.run_id FROM run unfinished
    WHERE unfinished.thread_id = ended.thread_id AND unfinished.status IN ('pending', 'running')
    ORDER BY unfinished.created_at, unfinished.run_id LIMIT 1
) AS first
WHERE run.run_id = first.run_id AND run.status = 'pending' AND run.ready_at IS NULL
  AND NOT EXISTS (SELECT 1 FROM run head WHERE head.thread_id = ended.thread_id AND head.status = 'running')
RETURNING run.run_id, run.graph_id
"""

UNFINISHED = """
    SELECT EXISTS (SELECT 1 FROM run WHERE run.thread_id = {thread_id} AND run.status IN ('pending', 'running')) AS any
"""


def thread_status_columns(status: str) -> str:
    """The SET clause of an UPDATE of threads: `busy` while any run is unfinished, else `status`, an SQL expression. A
    temporary thread is hidden when its last run has ended."""
    return f"""
    status = CASE WHEN unfinished.any THEN 'busy' ELSE {status} END,
    hidden_at = CASE WHEN thread.temporary AND NOT unfinished.any THEN coalesce(thread.hidden_at, now()) END,
    updated_at = now()"""


# `resting_status` is the status that the thread's last run has left.
SET_THREAD_STATUS = f"""
UPDATE thread SET {thread_status_columns("thread.resting_status")}
FROM unnest(%(thread_ids)b::uuid[]) AS changed(thread_id)
CROSS JOIN LATERAL ({UNFINISHED.format(thread_id="changed.thread_id")}) AS unfinished
WHERE thread.thread_id = changed.thread_id
"""
