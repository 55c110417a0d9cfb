"""The duty that removes what has outlived its use, in small batches."""

from __future__ import annotations

import time

import structlog

from holdfast.db.connect import Database
from holdfast.errors import RequestError
from holdfast.graphs.checkpointer import CheckpointerSection
from holdfast.resources.pruning import keep_latest

log = structlog.get_logger(__name__)

BATCH = 500
# Seconds between two sweeps with nothing left to do.
INTERVAL = 60.0
PRUNED_AT_ONCE = 50

# With everything that belongs to them. LangGraph's tables know threads by text.
ERASE_DOOMED = """
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

# Threads of finished stateless runs, but for those that a dead letter may still be retried in.
SWEEP_TEMPORARY = f"""
WITH doomed AS (
    SELECT thread_id FROM thread
    WHERE hidden_at < now() - make_interval(secs => %(ttl)s)
      AND NOT EXISTS (SELECT 1 FROM run WHERE run.thread_id = thread.thread_id AND run.dead_letter IS NOT NULL)
    LIMIT %(batch)s FOR UPDATE SKIP LOCKED
{ERASE_DOOMED}
"""

# A thread's time to live counts from the last thing that happened in it, which says nothing to `expires_at`.
POSTPONE_ACTIVE = """
WITH active AS (
    SELECT thread_id FROM thread
    WHERE expires_at <= now() AND updated_at + ttl_minutes * interval '1 minute' > now()
    ORDER BY expires_at LIMIT %(batch)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE thread SET expires_at = updated_at + ttl_minutes * interval '1 minute'
FROM active WHERE thread.thread_id = active.thread_id
"""

# Whether a run is unfinished is asked of the row itself: when a run is created before the row can be locked, the row
# is read again, which a look into the table of runs would not be.
EXPIRED = """
expires_at <= now() AND updated_at + ttl_minutes * interval '1 minute' <= now() AND status <> 'busy'
"""

SWEEP_EXPIRED = f"""
WITH doomed AS (
    SELECT thread_id FROM thread WHERE {EXPIRED} AND ttl_strategy = 'delete'
    ORDER BY expires_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
{ERASE_DOOMED}
"""

EXPIRED_HISTORIES = f"""
SELECT thread_id FROM thread WHERE {EXPIRED} AND ttl_strategy = 'keep_latest' ORDER BY expires_at LIMIT %(batch)s
"""

# An hour at least, so that a thread at rest is not looked at for ever.
POSTPONE_PRUNED = """
UPDATE thread SET expires_at = now() + greatest(ttl_minutes, 60) * interval '1 minute' WHERE thread_id = %(thread_id)s
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

SWEEP_DELIVERIES = """
WITH doomed AS (
    SELECT delivery_id FROM webhook_delivery WHERE settled_at < now() - make_interval(secs => %(ttl)s)
    ORDER BY settled_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
)
DELETE FROM webhook_delivery USING doomed WHERE webhook_delivery.delivery_id = doomed.delivery_id
"""


class Sweeper:
    """Runs once a minute, or at once again while there is more. Threads with a time to live have an interval of their
    own."""

    def __init__(self, database: Database, threads: CheckpointerSection | None = None) -> None:
        self._database = database
        self._settings = database.settings
        self._threads = threads or CheckpointerSection()
        self._due = 0.0
        self._threads_due = 0.0

    async def run(self) -> None:
        if time.monotonic() >= self._due:
            await self._sweep()
        if time.monotonic() >= self._threads_due:
            await self._sweep_expired()

    async def _sweep(self) -> None:
        self._due = time.monotonic() + INTERVAL
        async with self._database.connection() as connection:
            parameters = {"ttl": self._settings.temporary_ttl, "batch": BATCH}
            temporary = await connection.execute(SWEEP_TEMPORARY, parameters)
            events = await connection.execute(SWEEP_EVENTS, {"ttl": self._settings.event_ttl, "batch": BATCH})
            parameters = {"ttl": self._settings.webhook_ttl, "batch": BATCH}
            deliveries = await connection.execute(SWEEP_DELIVERIES, parameters)
            await connection.execute(FORGET_WORKERS)
        if max(temporary.rowcount, events.rowcount, deliveries.rowcount) >= BATCH:
            self._due = 0.0
        if temporary.rowcount or events.rowcount or deliveries.rowcount:
            swept = {"threads": temporary.rowcount, "events": events.rowcount, "deliveries": deliveries.rowcount}
            log.debug("upkeep.swept", **swept)

    async def _sweep_expired(self) -> None:
        limit = self._threads.sweep_limit
        self._threads_due = time.monotonic() + self._threads.sweep_interval
        async with self._database.connection() as connection:
            active = await connection.execute(POSTPONE_ACTIVE, {"batch": BATCH})
            expired = await connection.execute(SWEEP_EXPIRED, {"batch": limit or BATCH})
        pruned = await self._prune(limit or PRUNED_AT_ONCE)
        # With a limit of their own they are done: it says how much one look may do.
        more = limit is None and (expired.rowcount >= BATCH or pruned >= PRUNED_AT_ONCE)
        if more or active.rowcount >= BATCH:
            self._threads_due = 0.0
        if expired.rowcount or pruned:
            log.debug("upkeep.threads_expired", threads=expired.rowcount, pruned=pruned)

    async def _prune(self, limit: int) -> int:
        """Threads whose history has expired, but not their state. Returns how many there were."""
        async with self._database.connection() as connection:
            cursor = await connection.execute(EXPIRED_HISTORIES, {"batch": limit})
            due = [row["thread_id"] for row in await cursor.fetchall()]
        for thread_id in due:
            try:
                await keep_latest(self._database, thread_id)
            except RequestError as error:
                log.info("upkeep.not_pruned", thread_id=str(thread_id), reason=str(error))
            async with self._database.connection() as connection:
                await connection.execute(POSTPONE_PRUNED, {"thread_id": thread_id})
        return len(due)
