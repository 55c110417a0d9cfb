"""The statements that keep a thread's queue true, shared by every move that can change it.

Whoever runs one of these holds the thread's row lock. Locks are taken in one order everywhere: threads, then runs,
each in id order.
"""

from __future__ import annotations

LOCK_THREADS = """
SELECT thread_id, parent_run_id FROM thread WHERE thread_id = ANY(%(thread_ids)b::uuid[])
ORDER BY thread_id FOR NO KEY UPDATE
"""

# The first unfinished run of each thread becomes its head, unless it is that already (running, or pending and ready).
# A head is always the first, so nothing behind it needs to be looked at: a thread may have any number waiting. Only a
# clock that was set back puts a run before one that is running; then it waits all the same.
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


def settled(resting: str) -> str:
    """What an UPDATE sets to settle a thread: `busy` while any run is unfinished, else what the last one left. A
    temporary thread disappears with its last run."""
    return f"""
    status = CASE WHEN unfinished.any THEN 'busy' ELSE {resting} END,
    hidden_at = CASE WHEN thread.temporary AND NOT unfinished.any THEN coalesce(thread.hidden_at, now()) END,
    updated_at = now()"""


SETTLE_THREAD = f"""
UPDATE thread SET {settled("thread.resting_status")}
FROM unnest(%(thread_ids)b::uuid[]) AS settled(thread_id)
CROSS JOIN LATERAL ({UNFINISHED.format(thread_id="settled.thread_id")}) AS unfinished
WHERE thread.thread_id = settled.thread_id
"""
