"""Every sweep over hostile rows that have outlived their use. At the end nothing is left of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import psycopg
from psycopg.rows import TupleRow

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.items import EXPIRED_ITEMS
from holdfast.upkeep.sweeper import CHECKPOINTS, PRUNED_THREADS, Sweeper
from holdfast.upkeep.sweeps import EXPIRED_THREADS
from tests.hostile.estate import TABLES, Copy

# Seconds after which everything has outlived its use. Less than a setting may say, so that no row has to be made older.
AGE = 1e-6
HISTORY = {"checkpoint_ttl": AGE}
LOGS = {
    **dict.fromkeys(("event_ttl", "finished_run_ttl", "webhook_ttl", "dead_letter_ttl", "idempotency_ttl"), AGE),
}
THREADS = {"temporary_ttl": AGE, "thread_ttl": AGE}

EXPIRE = "ttl_minutes = 1e-6, expires_at = now(), updated_at = now() - interval '1 minute'"
PRUNE = f"UPDATE thread SET {EXPIRE}, ttl_strategy = 'keep_latest' WHERE thread_id = ANY(%(some)s::uuid[])"
# What cannot be sent is tried for long.
GIVE_UP = "UPDATE webhook_delivery SET state = 'failed', settled_at = now() WHERE settled_at IS NULL"
FORGET_ITEMS = "UPDATE store SET expires_at = now() - interval '1 minute'"
# Some threads had runs that were undone, and their events are left.
UNDO = "UPDATE thread SET undone_at = now() - interval '1 minute' WHERE thread_id = ANY(%(some)s::uuid[])"
# A third of the threads goes each way. What a thread's creator has wished for is not in its way.
GO = (
    "UPDATE thread SET ttl_minutes = NULL, ttl_strategy = NULL, expires_at = NULL",
    "UPDATE thread SET hidden_at = now() - interval '1 minute' WHERE thread_id = ANY(%(some)s::uuid[])",
    f"UPDATE thread SET {EXPIRE}, ttl_strategy = 'delete' WHERE thread_id = ANY(%(others)s::uuid[])",
)
# More than the latest state of each namespace. What is hidden goes as a
# whole, and a thread without an ended run is not pruned.
HISTORIES = """
SELECT c.thread_id, c.checkpoint_ns FROM checkpoints c JOIN thread ON thread.thread_id::text = c.thread_id
WHERE thread.hidden_at IS NULL AND thread.has_state AND thread.state_updated_at > thread.created_at
GROUP BY c.thread_id, c.checkpoint_ns HAVING count(*) > 1
"""
# What the sweeps of the last pass leave. Runs that wait for an answer go with their threads.
FINISHED = """
SELECT run_id::text, status FROM run WHERE finished_at IS NOT NULL AND NOT EXISTS (
    SELECT 1 FROM interrupt WHERE interrupt.run_id = run.run_id AND settled_at IS NULL)
"""
OF_THREADS = [table for table, column in TABLES.items() if column in ("thread_id", "pot_id")]


async def swept(
    client: httpx.AsyncClient, connection: psycopg.Connection[TupleRow], settings: Settings, copies: Sequence[Copy]
) -> list[str]:
    """End all runs, then let everything go: past states first, then what is logged, then the threads. Returns what is
    left over, and the sweeps that had nothing to do."""
    answer = await client.post("/runs/cancel", json={"status": "all"})
    assert answer.status_code in (204, 404), answer.text
    by_id = {identity: str(copy) for copy in copies for identity in copy.ids}
    threads = [str(thread_id) for (thread_id,) in connection.execute("SELECT thread_id FROM thread ORDER BY thread_id")]
    some, others = threads[::3], threads[1::3]
    complaints: list[str] = []

    def left(what: str, statement: str) -> None:
        found = connection.execute(statement.encode()).fetchall()
        complaints.extend(f"{what}: {by_id.get(row[0], row)}" for row in found)

    async def sweep(*expected: str, **ttl: float) -> None:
        complaints.extend(await _sweep(settings, ttl, expected))

    # Dead letters keep the past of their threads.
    letters = any(copy.state in ("letter", "poison") for copy in copies)
    await sweep(*["undecided dead letters"] * letters, dead_letter_ttl=AGE)
    # It takes a transaction for each thread, so only where the values are in what it reads.
    if any(copy.changed.startswith("checkpoint") for copy in copies):
        connection.execute(PRUNE.encode(), {"some": some})
        await sweep(PRUNED_THREADS, CHECKPOINTS, **HISTORY)
        left("past states", HISTORIES)
    connection.execute(GIVE_UP.encode())
    connection.execute(FORGET_ITEMS.encode())
    connection.execute(UNDO.encode(), {"some": some})
    await sweep(
        *(
            "runs' events",
            "undone runs' events",
            "finished runs",
            "webhook deliveries",
            "idempotency keys",
            EXPIRED_ITEMS.what,
        ),
        **LOGS,
    )
    left("a finished run", FINISHED)
    for statement in GO:
        connection.execute(statement.encode(), {"some": some, "others": others})
    await sweep("temporary threads", "resting threads", EXPIRED_THREADS.what, **THREADS)
    for table in (*OF_THREADS, "idempotency_key", "store"):
        left(table, f"SELECT {TABLES[table]}::text FROM {table}")
    return complaints


async def _sweep(settings: Settings, ttl: Mapping[str, Any], expected: Sequence[str]) -> list[str]:
    """What is wrong with a sweep to the end."""
    database = Database(settings.model_copy(update=dict(ttl)), "sweep", long_statements=True)
    await database.open()
    try:
        before = await Sweeper(database, Metrics()).count()
        removed = await Sweeper(database, Metrics()).finish()
        after = await Sweeper(database, Metrics()).count()
    finally:
        await database.close()
    return [
        *(f"nothing to sweep: {what}" for what in expected if not before[what]),
        *(f"not swept: {what}" for what in expected if not removed[what]),
        *(f"still to be swept: {what} ({number})" for what, number in after.items() if number),
    ]
