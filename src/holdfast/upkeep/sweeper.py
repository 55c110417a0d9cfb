"""The duty that removes what has outlived its use, in small batches."""

from __future__ import annotations

import time

import structlog

from holdfast.db.connect import Database

log = structlog.get_logger(__name__)

BATCH = 500

# Threads of finished stateless runs. LangGraph's tables know threads by text.
SWEEP_TEMPORARY = """
WITH doomed AS (
    SELECT thread_id FROM thread
    WHERE hidden_at < now() - make_interval(secs => %(ttl)s) LIMIT %(batch)s FOR UPDATE SKIP LOCKED
), checkpoint AS (
    DELETE FROM checkpoints USING doomed WHERE checkpoints.thread_id = doomed.thread_id::text
), blob AS (
    DELETE FROM checkpoint_blobs USING doomed WHERE checkpoint_blobs.thread_id = doomed.thread_id::text
), write AS (
    DELETE FROM checkpoint_writes USING doomed WHERE checkpoint_writes.thread_id = doomed.thread_id::text
), event AS (
    DELETE FROM event USING doomed WHERE event.thread_id = doomed.thread_id
)
DELETE FROM thread USING doomed WHERE thread.thread_id = doomed.thread_id
"""

# Events of runs that ended long ago, and with them those of runs of the same thread that were rolled back;
# `last_seq` on the thread keeps the numbering from starting again.
SWEEP_EVENTS = """
WITH expired AS (
    SELECT run.run_id, run.thread_id FROM run
    WHERE run.finished_at < now() - make_interval(secs => %(ttl)s) AND run.first_seq IS NOT NULL
    ORDER BY run.finished_at LIMIT %(batch)s FOR NO KEY UPDATE SKIP LOCKED
), forgotten AS (
    UPDATE run SET first_seq = NULL FROM expired WHERE run.run_id = expired.run_id
)
DELETE FROM event USING (SELECT DISTINCT thread_id FROM expired) AS quiet
WHERE event.thread_id = quiet.thread_id AND event.created_at < now() - make_interval(secs => %(ttl)s)
  AND NOT EXISTS (SELECT 1 FROM run WHERE run.run_id = event.run_id
                    AND (run.finished_at IS NULL OR run.finished_at >= now() - make_interval(secs => %(ttl)s)))
"""

FORGET_WORKERS = """
DELETE FROM worker WHERE status IN ('offline', 'lost') AND stopped_at < now() - interval '1 day'
  AND NOT EXISTS (SELECT 1 FROM run WHERE run.worker_id = worker.worker_id AND run.status = 'running')
"""


class Sweeper:
    """Runs at most every half minute, or at once again while there is more."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._settings = database.settings
        self._due = 0.0

    async def run(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + 30.0
        async with self._database.connection() as connection:
            parameters = {"ttl": self._settings.temporary_ttl, "batch": BATCH}
            temporary = await connection.execute(SWEEP_TEMPORARY, parameters)
            events = await connection.execute(SWEEP_EVENTS, {"ttl": self._settings.event_ttl, "batch": BATCH})
            await connection.execute(FORGET_WORKERS)
        if temporary.rowcount >= BATCH or events.rowcount >= BATCH:
            self._due = 0.0
        if temporary.rowcount or events.rowcount:
            log.debug("upkeep.swept", threads=temporary.rowcount, events=events.rowcount)
