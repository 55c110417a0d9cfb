"""What tests of concurrent operations are made of: runs, workers, journals, and operations stopped in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.claim import claim
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.new_run import CreatedRun, NewRun
from holdfast.engine.outcome import Ended, Outcome
from holdfast.engine.ready import ReadyRun
from holdfast.engine.states import RunStatus
from holdfast.engine.submit import create_run
from holdfast.journal.batch import write_portions
from holdfast.journal.entries import EventEntry, Portion
from holdfast.journal.journal import Journal
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import Settings
from tests.engine.driver import checkpoint_entry, new_checkpoint_id
from tests.support.records import query
from tests.support.waiting import until

GRAPH = "graph"
SUCCESS = Ended(status=RunStatus.SUCCESS, thread_status="idle", values=b"{}")
INTERRUPTED = Ended(
    status=RunStatus.INTERRUPTED,
    thread_status="interrupted",
    error={"error": "UserInterrupt", "message": "The run was cancelled."},
)

REGISTER = """
INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until)
VALUES (%s, 'online', 'test', 0, 'test', 1, '{}', now() + interval '1 hour') RETURNING worker_id
"""

# Threads whose queue is not as it must be: one head, the earliest of the unfinished runs, and the running one if any.
BROKEN_QUEUES = """
SELECT thread_id, array_agg(status ORDER BY created_at, run_id) AS statuses,
       array_agg(ready_at IS NOT NULL ORDER BY created_at, run_id) AS heads
FROM run WHERE status IN ('pending', 'running') GROUP BY thread_id
HAVING count(ready_at) <> 1 OR (array_agg(ready_at ORDER BY created_at, run_id))[1] IS NULL
    OR bool_or(status = 'running' AND ready_at IS NULL)
"""


async def create(database: Database, thread_id: UUID, **options: Any) -> CreatedRun:
    kwargs = options.pop("kwargs", {"input": {}})
    return await create_run(
        database,
        NewRun(
            thread_id=thread_id,
            assistant_id=UUID(int=1),
            graph_id=GRAPH,
            kwargs=kwargs,
            create_thread=True,
            **options,
        ),
    )


async def online_worker(database: Database) -> UUID:
    worker_id = uuid4()
    await query(database, REGISTER, worker_id)
    return worker_id


async def declare_lost(database: Database, worker_id: UUID) -> None:
    await query(database, "UPDATE worker SET status = 'lost' WHERE worker_id = %s RETURNING worker_id", worker_id)


async def claim_runs(database: Database, worker_id: UUID, slots: int = 100) -> list[ClaimedRun]:
    async with database.connection() as connection:
        return await claim(connection, worker_id, slots, [GRAPH])


async def unfinished(database: Database, thread_id: UUID) -> list[DictRow]:
    """The thread's unfinished runs in the order in which they have to start."""
    return await query(
        database,
        "SELECT * FROM run WHERE thread_id = %s AND finished_at IS NULL ORDER BY created_at, run_id",
        thread_id,
    )


async def exists(database: Database, run_id: UUID) -> bool:
    return bool(await query(database, "SELECT 1 FROM run WHERE run_id = %s", run_id))


async def checkpoint_ids(database: Database, thread_id: UUID) -> set[str]:
    """The thread's checkpoints; each has the one blob it needs, and no other blob is left."""
    rows = await query(database, "SELECT checkpoint_id FROM checkpoints WHERE thread_id = %s", str(thread_id))
    blobs = await query(database, "SELECT version FROM checkpoint_blobs WHERE thread_id = %s", str(thread_id))
    found = {row["checkpoint_id"] for row in rows}
    assert {row["version"] for row in blobs} == found
    return found


@asynccontextmanager
async def open_journal(settings: Settings, announced: list[ReadyRun] | None = None) -> AsyncIterator[Journal]:
    """A worker's journal, at work. `announced` gets the runs that became ready."""
    heard: list[ReadyRun] = [] if announced is None else announced
    journal = Journal(settings, lambda visible, ready: heard.extend(ready), lambda writer: None)
    await journal.start()
    try:
        yield journal
    finally:
        await journal.stop()


def writer_of(journal: Journal, run: ClaimedRun) -> RunWriter:
    return journal.open_writer(run.run_id, run.thread_id, run.fence, run.next_seq)


def put_checkpoint(writer: RunWriter) -> str:
    checkpoint_id = new_checkpoint_id()
    writer.add_checkpoint(checkpoint_entry(writer.thread_id, writer.run_id, checkpoint_id))
    return checkpoint_id


def portion_of(run: ClaimedRun, outcome: Outcome | None = None) -> Portion:
    """One event of a claimed run, and perhaps its end, as the journal would write them."""
    entries = [EventEntry("values", "", b"{}")]
    return Portion(run.run_id, run.thread_id, run.fence, run.next_seq, [*entries], outcome)


def portion_of_row(row: DictRow, outcome: Outcome | None = None) -> Portion:
    """The same for a row that was put into the database as if it had been claimed."""
    return Portion(
        row["run_id"], row["thread_id"], row["fence"], row["next_seq"], [EventEntry("values", "", b"{}")], outcome
    )


@asynccontextmanager
async def commit_held_up(database: Database, portions: Sequence[Portion]) -> AsyncIterator[AsyncConnection[DictRow]]:
    """A journal's transaction in which everything has been written but the commit; that happens at the end."""
    async with database.transaction() as connection:
        await write_portions(connection, list(portions), verify=True, repeat=False)
        yield connection


async def somebody_waits(database: Database, count: int = 1) -> None:
    """Wait until so many connections to this database wait for a lock."""

    async def waiting() -> bool:
        rows = await query(
            database,
            "SELECT count(*) AS count FROM pg_stat_activity WHERE datname = current_database() "
            "AND wait_event_type = 'Lock'",
        )
        return bool(rows[0]["count"] >= count)

    await until(waiting, f"{count} connections wait for a lock")
