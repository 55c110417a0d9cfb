"""The statements that create threads and runs, and the order in which they lock. Call them through `submit.py`.

The thread's row is locked first, and its unfinished runs are read by *later* statements. A single statement would read
with a snapshot from before it had the lock, and two runs could both become the thread's head. The statements are
pipelined: the transaction costs one round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import orjson
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow

from holdfast.db.arrays import booleans, floats, integers, texts, uuids
from holdfast.engine.budget import share_interrupted_budget
from holdfast.engine.cancel import CancelledRuns, cancel_locked
from holdfast.engine.interrupts.accepting import hand_over_resumes, take_interrupts
from holdfast.engine.interrupts.resume import resume_of
from holdfast.engine.new_run import CreatedRun, NewRun, NewThread
from holdfast.engine.quota import read_tenant_usage, refuse_over_limit
from holdfast.errors import Conflict, NotFound
from holdfast.streams.log import ACCEPTED_DATA, LogEvent
from holdfast.streams.serialize import storable, to_json

RUN_COLUMNS = (
    "run_id, thread_id, assistant_id, graph_id, status, created_at, updated_at, metadata, kwargs, "
    "multitask_strategy, attempt, error, first_seq, priority, usage, parent_run_id"
)

THREAD_COLUMNS = (
    "thread_id",
    "created_at",
    "updated_at",
    "state_updated_at",
    "metadata",
    "config",
    "status",
    "values",
    "interrupts",
    "error",
    "usage",
)

# `found` reads LangGraph's own table. A new thread may continue checkpoints that were written before there was a
# Holdfast, if its creator may adopt them. If not, the id counts as taken and no thread is created.
CREATE_THREADS = f"""
INSERT INTO thread (thread_id, tenant_id, metadata, temporary, ttl_minutes, ttl_strategy, expires_at, has_state)
SELECT asked.thread_id, asked.tenant_id, asked.metadata::jsonb, asked.temporary, asked.ttl_minutes, asked.ttl_strategy,
       now() + asked.ttl_minutes * interval '1 minute', found.checkpoints
FROM unnest(%(thread_ids)b::uuid[], %(tenant_ids)b::text[], %(metadatas)b::text[], %(temporaries)b::boolean[],
            %(ttl_minutes)b::float8[], %(ttl_strategies)b::text[], %(adopting)b::boolean[])
     AS asked(thread_id, tenant_id, metadata, temporary, ttl_minutes, ttl_strategy, adopting)
CROSS JOIN LATERAL (
    SELECT EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.thread_id = asked.thread_id::text) AS checkpoints
    OFFSET 0
) AS found
WHERE asked.adopting OR NOT found.checkpoints
ORDER BY asked.thread_id
ON CONFLICT (thread_id) DO NOTHING
RETURNING {", ".join(f'"{column}"' for column in THREAD_COLUMNS)}
"""

LOCK_OPEN_THREADS = """
SELECT thread_id, last_seq FROM thread WHERE thread_id = ANY(%(thread_ids)b::uuid[]) AND hidden_at IS NULL
ORDER BY thread_id FOR NO KEY UPDATE
"""

# Lock heads that are scheduled for later than the new run, so that no worker claims one before the new run takes its
# place. If a worker is claiming one at this moment, wait for its commit: the next statement then sees it running.
# The clock is read in a subquery, once: a value that changes from row to row cannot be looked up in an index.
LOCK_LATER_HEADS = """
SELECT run.run_id
FROM unnest(%(thread_ids)b::uuid[], %(afters)b::float8[]) AS asked(thread_id, after_seconds)
JOIN run ON run.thread_id = asked.thread_id AND run.status = 'pending' AND run.ready_at IS NOT NULL
        AND run.created_at > (SELECT clock_timestamp()) + make_interval(secs => asked.after_seconds)
ORDER BY run.run_id FOR NO KEY UPDATE OF run
"""

# `demoted`: a head that is due later than the new run loses its place. `due` reads the clock once for this and for the
# new run's place: with two readings, a head due between them would lose its place to a run that then waits for it, and
# nothing in the thread would be ready.
# `current`: the assistant was read earlier, from a cache perhaps. If it has changed since, the division by zero rolls
# everything back, and the caller reads it again.
# `accepted`: a run that is streamed and can begin at once gets its first event here, so that its client has the run's
# id with this commit. No other process numbers events of the thread meanwhile: it is locked, and no run is running.
INSERT_RUNS = f"""
WITH due AS MATERIALIZED (
    SELECT asked.*, clock_timestamp() + make_interval(secs => asked.after_seconds) AS at,
           1 / (asked.assistant_updated_at IS NULL OR EXISTS (
               SELECT 1 FROM assistant
               WHERE assistant.assistant_id = asked.assistant_id AND assistant.updated_at = asked.assistant_updated_at
           ))::integer AS current
    FROM unnest(%(run_ids)b::uuid[], %(thread_ids)b::uuid[], %(assistant_ids)b::uuid[],
                %(assistants_updated_at)b::timestamptz[], %(graph_ids)b::text[], %(afters)b::float8[],
                %(priorities)b::integer[], %(strategies)b::text[], %(metadatas)b::text[],
                %(assistant_metadatas)b::text[], %(kwargs)b::text[], %(webhooks)b::text[], %(streamed)b::boolean[])
         AS asked(run_id, thread_id, assistant_id, assistant_updated_at, graph_id, after_seconds,
                  priority, strategy, metadata, assistant_metadata, kwargs, webhook, streamed)
), demoted AS (
    UPDATE run SET ready_at = NULL FROM due
    WHERE run.thread_id = due.thread_id AND run.status = 'pending' AND run.ready_at IS NOT NULL
      AND run.created_at > due.at
), entered AS (
    INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, priority, multitask_strategy,
                     metadata, kwargs, webhook, parent_run_id, depth, tenant_id, first_seq)
    SELECT due.run_id, thread.thread_id, due.assistant_id, due.graph_id, due.at, turn.ready_at,
           due.priority, due.strategy,
           due.assistant_metadata::jsonb || thread.metadata || due.metadata::jsonb, due.kwargs::json,
           due.webhook, thread.parent_run_id, thread.depth, thread.tenant_id,
           CASE WHEN due.streamed AND due.after_seconds = 0 AND turn.ready_at IS NOT NULL THEN 1 + greatest(
               thread.last_seq, (SELECT seq FROM event WHERE event.thread_id = thread.thread_id
                                 ORDER BY seq DESC LIMIT 1)) END
    FROM due JOIN thread ON thread.thread_id = due.thread_id AND thread.hidden_at IS NULL
    CROSS JOIN LATERAL (
        SELECT CASE WHEN NOT EXISTS (
            SELECT 1 FROM run other WHERE other.thread_id = thread.thread_id
              AND other.status IN ('pending', 'running') AND (other.status = 'running' OR other.created_at <= due.at)
        ) THEN due.at END AS ready_at OFFSET 0
    ) AS turn
    WHERE NOT (due.strategy = 'reject' AND EXISTS (
               SELECT 1 FROM run other WHERE other.thread_id = thread.thread_id
                 AND other.status IN ('pending', 'running')))
      AND due.current = 1
    RETURNING {RUN_COLUMNS}, ready_at IS NOT NULL AS is_head
), accepted AS (
    INSERT INTO event (thread_id, seq, run_id, kind, data)
    SELECT thread_id, first_seq, run_id, 'accepted', %(acceptance)s::bytea FROM entered WHERE first_seq IS NOT NULL
)
SELECT entered.*, now() AS accepted_at FROM entered
"""

MARK_BUSY = """
UPDATE thread SET status = 'busy', updated_at = clock_timestamp(),
       metadata = CASE WHEN metadata @> entered.stamp::jsonb THEN metadata ELSE metadata || entered.stamp::jsonb END
FROM unnest(%(thread_ids)b::uuid[], %(run_ids)b::uuid[], %(thread_stamps)b::text[]) AS entered(thread_id, run_id, stamp)
WHERE thread.thread_id = entered.thread_id AND EXISTS (SELECT 1 FROM run WHERE run.run_id = entered.run_id)
"""


async def create_threads(connection: AsyncConnection[DictRow], threads: Sequence[NewThread]) -> AsyncCursor[DictRow]:
    """Create threads, and return those that did not exist. May be pipelined."""
    return await connection.execute(
        CREATE_THREADS,
        {
            "thread_ids": uuids([new.thread_id for new in threads]),
            "tenant_ids": texts([new.tenant_id for new in threads]),
            "metadatas": texts([new.metadata_json for new in threads]),
            "temporaries": booleans([new.temporary for new in threads]),
            "ttl_minutes": floats([None if new.ttl is None else new.ttl[0] for new in threads]),
            "ttl_strategies": texts([None if new.ttl is None else new.ttl[1] for new in threads]),
            "adopting": booleans([new.adopting for new in threads]),
        },
    )


async def create_thread(connection: AsyncConnection[DictRow], new: NewThread) -> DictRow | None:
    """Create a thread; None when it exists already."""
    return await (await create_threads(connection, [new])).fetchone()


async def insert_run(connection: AsyncConnection[DictRow], new: NewRun) -> CreatedRun:
    """Create a run in the caller's transaction. Raises as `submit.create_run` does."""
    async with connection.pipeline():
        if new.groupable:
            return await (await insert_groupable_runs(connection, [new])).created(new)
        parameters = _parameters([new])
        created_threads = await create_threads(connection, [new.thread]) if new.create_thread else None
        locked_threads = await _lock_thread(connection, new)
        cancelled = CancelledRuns()
        if new.multitask_strategy in ("interrupt", "rollback"):
            cancelled = await cancel_locked(connection, new.thread_id, None, new.cancel_action)
        thread, answers = await _answer_interrupts(connection, new, locked_threads, cancelled)
        usage = None if new.quota is None else await read_tenant_usage(connection, new.tenant_id, new.quota)
        inserted = await _insert(connection, parameters, created_threads, locked_threads)
        if thread is not None:
            inserted.threads = {new.thread_id: thread}
        created = await inserted.created(new)
        if answers:
            await share_interrupted_budget(connection, new.thread_id, new.run_id)
        if usage is not None:
            await refuse_over_limit(new.tenant_id, usage)
    return replace(created, cancelled=cancelled)


async def insert_groupable_runs(connection: AsyncConnection[DictRow], runs: Sequence[NewRun]) -> InsertedRuns:
    """Create groupable runs of different threads in the caller's transaction and pipeline. A run that cannot be
    created leaves nothing behind, and the others are created all the same."""
    threads = [new.thread for new in runs if new.create_thread]
    created_threads = await create_threads(connection, threads) if threads else None
    parameters = _parameters(runs)
    locked_threads = await connection.execute(LOCK_OPEN_THREADS, parameters)
    return await _insert(connection, parameters, created_threads, locked_threads)


class InsertedRuns:
    """The cursors of pipelined statements that create runs. They are read when the first result is asked for."""

    def __init__(
        self,
        created_threads: AsyncCursor[DictRow] | None,
        locked_threads: AsyncCursor[DictRow],
        runs: AsyncCursor[DictRow],
    ) -> None:
        # The locked threads by their ids, once they have been read.
        self.threads: dict[UUID, DictRow] | None = None
        self._created_threads, self._locked_threads, self._inserted = created_threads, locked_threads, runs
        self._created_thread_ids: set[UUID] = set()
        self._runs: dict[UUID, DictRow] | None = None

    async def created(self, new: NewRun) -> CreatedRun:
        """One of the runs. Raises NotFound or Conflict when it was not created."""
        if self._runs is None:
            if self.threads is None:
                self.threads = {row["thread_id"]: row for row in await self._locked_threads.fetchall()}
            self._runs = {row["run_id"]: row for row in await self._inserted.fetchall()}
            if self._created_threads is not None:
                self._created_thread_ids = {row["thread_id"] for row in await self._created_threads.fetchall()}
        thread, row = (self.threads or {}).get(new.thread_id), self._runs.get(new.run_id)
        if thread is None and new.thread_id not in self._created_thread_ids:
            raise NotFound("Thread", new.thread_id)
        if row is None:
            raise Conflict(
                f"Thread {new.thread_id} has a run that is not finished, and multitask_strategy is 'reject'. "
                "Wait for it, cancel it, or use 'enqueue', 'interrupt' or 'rollback'."
            )
        ready, accepted_at = cast(bool, row.pop("is_head")), row.pop("accepted_at")
        accepted = None
        if row["first_seq"] is None:
            # The run has no event yet. All its events will come after those that the thread has now, so a client that
            # streams the run need not read older ones.
            row["first_seq"] = (0 if thread is None else thread["last_seq"]) + 1
        else:
            accepted = LogEvent(row["first_seq"], new.run_id, "accepted", "", ACCEPTED_DATA, accepted_at)
        return CreatedRun(new=new, run=row, ready=ready, cancelled=CancelledRuns(), accepted=accepted)


async def _insert(
    connection: AsyncConnection[DictRow],
    parameters: dict[str, Any],
    created_threads: AsyncCursor[DictRow] | None,
    locked_threads: AsyncCursor[DictRow],
) -> InsertedRuns:
    await connection.execute(LOCK_LATER_HEADS, parameters)
    runs = await connection.execute(INSERT_RUNS, parameters)
    await connection.execute(MARK_BUSY, parameters)
    return InsertedRuns(created_threads, locked_threads, runs)


def _parameters(runs: Sequence[NewRun]) -> dict[str, Any]:
    return {
        "run_ids": uuids([new.run_id for new in runs]),
        "thread_ids": uuids([new.thread_id for new in runs]),
        "assistant_ids": uuids([new.assistant_id for new in runs]),
        "assistants_updated_at": [new.assistant_updated_at for new in runs],
        "graph_ids": texts([new.graph_id for new in runs]),
        "afters": floats([new.after_seconds for new in runs]),
        "priorities": integers([new.priority for new in runs]),
        "strategies": texts([new.multitask_strategy for new in runs]),
        "metadatas": texts([new.metadata_json for new in runs]),
        "assistant_metadatas": texts([to_json(new.assistant_metadata).decode() for new in runs]),
        "kwargs": texts([new.kwargs_json for new in runs]),
        "webhooks": texts([_webhook(new) for new in runs]),
        "thread_stamps": texts([_thread_stamp(new) for new in runs]),
        "streamed": booleans([new.streamed for new in runs]),
        "acceptance": ACCEPTED_DATA,
    }


def _webhook(new: NewRun) -> str | None:
    """The URL to call when the run has ended. That of a dead letter or a cron may be older than the checks of requests:
    a value that is no text counts as none, and characters that Postgres cannot store become U+FFFD."""
    url = new.kwargs.get("webhook")
    return storable(url) if isinstance(url, str) else None


def _thread_stamp(new: NewRun) -> str:
    """What the thread's metadata says of its last run."""
    return orjson.dumps({"graph_id": new.graph_id, "assistant_id": str(new.assistant_id)}).decode()


async def _answer_interrupts(
    connection: AsyncConnection[DictRow], new: NewRun, locked_threads: AsyncCursor[DictRow], cancelled: CancelledRuns
) -> tuple[DictRow | None, bool]:
    """Mark the interrupts that the run resumes as answered by it. Returns the thread, if its cursor was read for that,
    and whether the run answers anything. Costs nothing for a run without an answer."""
    answer = resume_of(new.kwargs)
    thread = None if answer is None else await locked_threads.fetchone()
    answers = False
    if answer is not None and thread is not None:
        if new.repeats is not None:
            await hand_over_resumes(connection, new.thread_id, new.repeats, new.run_id)
            answer = replace(answer, lenient=True)
        if new.answer_applied:
            return thread, False
        rolled_back = cancelled.requested if new.multitask_strategy == "rollback" else []
        answers = await take_interrupts(connection, new, answer, [run["run_id"] for run in rolled_back])
    return thread, answers


async def _lock_thread(connection: AsyncConnection[DictRow], new: NewRun) -> AsyncCursor[DictRow]:
    parameters: dict[str, Any] = {"thread_ids": [new.thread_id]}
    if not new.visible.restricted:
        return await connection.execute(LOCK_OPEN_THREADS, parameters)
    # Visibility is checked by the statement that locks: another request may be creating the thread at this moment.
    condition, more = new.visible.condition()
    statement = LOCK_OPEN_THREADS.replace("hidden_at IS NULL", f"hidden_at IS NULL AND {condition}")
    return await connection.execute(statement.encode(), {**parameters, **more})
