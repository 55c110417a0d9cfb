"""Creating a run: the one place where a thread decides who goes next.

The thread row is locked first and looked behind in *later* statements. One statement would look with a snapshot
taken before it had the lock, and two runs could both believe they are first. The statements are pipelined, so
that the whole transaction costs one round trip.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast
from uuid import UUID

import orjson
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.cancel import CancelledRuns, cancel_locked
from holdfast.engine.gates import answer_of, repeat_answers, take_questions
from holdfast.engine.quota import Quota, measure, refuse_over_limit
from holdfast.engine.states import MultitaskStrategy
from holdfast.errors import Conflict, NotFound
from holdfast.streams.serialize import to_json
from holdfast.telemetry import tracing

RUN_COLUMNS = (
    "run_id, thread_id, assistant_id, graph_id, status, created_at, updated_at, metadata, kwargs, "
    "multitask_strategy, attempt, error, first_seq, priority, usage, parent_run_id"
)

# `has_state` looks into LangGraph's own table, so that a thread whose checkpoints were there before Holdfast goes on.
CREATE_THREAD = """
INSERT INTO thread (thread_id, tenant_id, metadata, temporary, ttl_minutes, ttl_strategy, expires_at, has_state)
VALUES (%(thread_id)s, %(tenant_id)s, %(metadata)s::jsonb, %(temporary)s, %(ttl_minutes)s::float8,
        %(ttl_strategy)s::text, now() + %(ttl_minutes)s::float8 * interval '1 minute',
        EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.thread_id = %(thread_id)s::uuid::text))
ON CONFLICT (thread_id) DO NOTHING
RETURNING thread_id
"""

LOCK_THREAD = """
SELECT thread_id, last_seq FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL FOR NO KEY UPDATE
"""

# The thread's head may be scheduled for later than the new run starts. A head that a worker claims at this moment is
# waited for, and seen to be running by the statement after this one; any other is out of the claim's reach from here.
# The clock is read in a subquery, once: an index cannot look for something that changes from row to row.
LOCK_LATER_HEAD = """
SELECT run_id FROM run
WHERE thread_id = %(thread_id)s AND status = 'pending' AND ready_at IS NOT NULL
  AND created_at > (SELECT clock_timestamp() + make_interval(secs => %(after_seconds)s))
FOR NO KEY UPDATE
"""

# A head that is due later than the new run steps back for it. Both are decided by one reading of the clock: with two,
# a head due between them would step back for a run that then waits for it, and the thread would stand still.
INSERT_RUN = f"""
WITH due AS MATERIALIZED (
    SELECT clock_timestamp() + make_interval(secs => %(after_seconds)s) AS at
), demoted AS (
    UPDATE run SET ready_at = NULL FROM due
    WHERE run.thread_id = %(thread_id)s AND run.status = 'pending' AND run.ready_at IS NOT NULL
      AND run.created_at > due.at
)
INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, priority, multitask_strategy,
                 metadata, kwargs, webhook, parent_run_id, depth, tenant_id)
SELECT %(run_id)s, thread.thread_id, %(assistant_id)s, %(graph_id)s, due.at,
       CASE WHEN NOT EXISTS (
           SELECT 1 FROM run other WHERE other.thread_id = thread.thread_id
             AND other.status IN ('pending', 'running') AND (other.status = 'running' OR other.created_at <= due.at)
       ) THEN due.at END,
       %(priority)s, %(multitask_strategy)s,
       %(assistant_metadata)s::jsonb || thread.metadata || %(metadata)s::jsonb, %(kwargs)s::json,
       %(webhook)s::text, thread.parent_run_id, thread.depth, thread.tenant_id
FROM thread, due
WHERE thread.thread_id = %(thread_id)s AND thread.hidden_at IS NULL
  AND NOT (%(multitask_strategy)s = 'reject' AND EXISTS (
           SELECT 1 FROM run other WHERE other.thread_id = thread.thread_id
             AND other.status IN ('pending', 'running')))
RETURNING {RUN_COLUMNS}, ready_at IS NOT NULL AS is_head
"""

MARK_BUSY = """
UPDATE thread SET status = 'busy', updated_at = clock_timestamp(),
       metadata = CASE WHEN metadata @> %(stamp)s::jsonb THEN metadata ELSE metadata || %(stamp)s::jsonb END
WHERE thread_id = %(thread_id)s AND EXISTS (SELECT 1 FROM run WHERE run_id = %(run_id)s)
"""


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """All that a run is made of. `kwargs` is what the worker needs and clients may read back.

    The run's metadata is the assistant's, under the thread's, under `metadata`.
    """

    thread_id: UUID
    assistant_id: UUID
    graph_id: str
    kwargs: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    assistant_metadata: dict[str, Any] = field(default_factory=dict)
    multitask_strategy: MultitaskStrategy = "enqueue"
    after_seconds: float = 0.0
    priority: int = 0
    create_thread: bool = False
    temporary: bool = False
    thread_metadata: dict[str, Any] = field(default_factory=dict)
    # Of a thread that is created with the run: minutes without activity, and what happens then.
    thread_ttl: tuple[float, str] | None = None
    # A thread that is not the creator's to see does not exist for this run.
    visible: Visibility = EVERYTHING
    # An answer to what this run asked, and to nothing that another has asked since.
    answers_run: UUID | None = None
    # A run that is tried again by this one, with the answers that it gave.
    repeats: UUID | None = None
    # An answer that nobody gave in time.
    by_default: bool = False
    # Whose a thread is that is created with the run. The run is always its thread's tenant's.
    tenant_id: str = ""
    # Looked at for tenants that may have limits.
    quota: Quota | None = None
    run_id: UUID = field(default_factory=uuid7)


@dataclass(frozen=True)
class Created:
    """A new run, whether it is its thread's head, and what its strategy cancelled."""

    run: DictRow
    ready: bool
    cancelled: CancelledRuns


async def create_thread(
    connection: AsyncConnection[DictRow],
    thread_id: UUID,
    metadata: dict[str, Any],
    *,
    temporary: bool = False,
    ttl: tuple[float, str] | None = None,
    tenant_id: str = "",
) -> bool:
    """Create a thread; False when it exists already."""
    minutes, strategy = ttl or (None, None)
    cursor = await connection.execute(
        CREATE_THREAD,
        {
            "thread_id": thread_id,
            "tenant_id": tenant_id,
            "metadata": orjson.dumps(metadata).decode(),
            "temporary": temporary,
            "ttl_minutes": minutes,
            "ttl_strategy": strategy,
        },
    )
    return await cursor.fetchone() is not None


async def create_run(database: Database, new: NewRun) -> Created:
    """Create a run by its multitask strategy. When this returns, the run is committed.

    Raises NotFound when the thread does not exist and `create_thread` is False, Conflict when the strategy is
    `reject` and the thread has an unfinished run, AlreadyAnswered when the run answers what another has answered
    before, OverLimit when the tenant has used up its quota; in all cases nothing has changed.
    """
    async with database.transaction() as connection:
        return await create_run_within(connection, new)


async def create_run_within(connection: AsyncConnection[DictRow], new: NewRun) -> Created:
    """The same as part of the caller's transaction, which must be rolled back when this raises."""
    if tracing.recorder is None:
        return await _create_within(connection, new)
    with tracing.recorder.creating(_subject(new), new.kwargs, new.after_seconds) as kwargs:
        return await _create_within(connection, replace(new, kwargs=kwargs))


def _subject(new: NewRun) -> tracing.Subject:
    return tracing.Subject(
        run_id=new.run_id,
        thread_id=new.thread_id,
        assistant_id=new.assistant_id,
        graph_id=new.graph_id,
        tenant=new.tenant_id,
    )


async def _create_within(connection: AsyncConnection[DictRow], new: NewRun) -> Created:
    parameters = {
        "run_id": new.run_id,
        "thread_id": new.thread_id,
        "assistant_id": new.assistant_id,
        "graph_id": new.graph_id,
        "after_seconds": new.after_seconds,
        "priority": new.priority,
        "multitask_strategy": new.multitask_strategy,
        "metadata": to_json(new.metadata).decode(),
        "assistant_metadata": to_json(new.assistant_metadata).decode(),
        "kwargs": to_json(new.kwargs).decode(),
        "webhook": new.kwargs.get("webhook"),
        "stamp": orjson.dumps({"graph_id": new.graph_id, "assistant_id": str(new.assistant_id)}).decode(),
    }
    cancelled = CancelledRuns()
    async with connection.pipeline():
        created = await create_thread_pipelined(connection, new) if new.create_thread else None
        locked = await _lock_thread(connection, new, parameters)
        if new.multitask_strategy == "interrupt" or new.multitask_strategy == "rollback":
            cancelled = await cancel_locked(connection, new.thread_id, None, new.multitask_strategy)
        thread = await _answer_questions(connection, new, locked, cancelled)
        measured = None if new.quota is None else await measure(connection, new.tenant_id, new.quota)
        await connection.execute(LOCK_LATER_HEAD, parameters)
        inserted = await connection.execute(INSERT_RUN, parameters)
        await connection.execute(MARK_BUSY, parameters)
        thread = thread or await locked.fetchone()
        row = await inserted.fetchone()
        if thread is None and (created is None or await created.fetchone() is None):
            raise NotFound(f"Thread {new.thread_id} does not exist.")
        if row is None:
            raise Conflict(
                f"Thread {new.thread_id} has a run that is not finished, and multitask_strategy is 'reject'. "
                "Wait for it, cancel it, or use 'enqueue', 'interrupt' or 'rollback'."
            )
        if measured is not None:
            await refuse_over_limit(new.tenant_id, measured)
    # Not where its events begin, but a place that they come after: who watches it need not read what is older.
    row["first_seq"] = (0 if thread is None else thread["last_seq"]) + 1
    return Created(run=row, ready=cast(bool, row.pop("is_head")), cancelled=cancelled)


async def _answer_questions(
    connection: AsyncConnection[DictRow], new: NewRun, locked: AsyncCursor[DictRow], cancelled: CancelledRuns
) -> DictRow | None:
    """Take what the run answers. Returns the thread if that was done; a run that answers nothing costs nothing here."""
    answer = answer_of(new.kwargs)
    thread = None if answer is None else await locked.fetchone()
    if answer is not None and thread is not None:
        if new.repeats is not None:
            await repeat_answers(connection, new.thread_id, new.repeats, new.run_id)
            answer = replace(answer, lenient=True)
        rolled_back = cancelled.requested if new.multitask_strategy == "rollback" else []
        await take_questions(connection, new, answer, [run["run_id"] for run in rolled_back])
    return thread


async def _lock_thread(
    connection: AsyncConnection[DictRow], new: NewRun, parameters: dict[str, Any]
) -> AsyncCursor[DictRow]:
    if not new.visible.restricted:
        return await connection.execute(LOCK_THREAD, parameters)
    # Under the lock, and not before: the thread may be created by somebody else at this moment.
    condition, more = new.visible.condition()
    statement = LOCK_THREAD.replace(" FOR NO KEY", f" AND {condition} FOR NO KEY")
    return await connection.execute(statement.encode(), {**parameters, **more})


async def create_thread_pipelined(connection: AsyncConnection[DictRow], new: NewRun) -> AsyncCursor[DictRow]:
    """Part of `create_run`: the thread, unless it is there already."""
    minutes, strategy = (None, None) if new.temporary or new.thread_ttl is None else new.thread_ttl
    return await connection.execute(
        CREATE_THREAD,
        {
            "thread_id": new.thread_id,
            "tenant_id": new.tenant_id,
            "metadata": orjson.dumps(new.thread_metadata).decode(),
            "temporary": new.temporary,
            "ttl_minutes": minutes,
            "ttl_strategy": strategy,
        },
    )
