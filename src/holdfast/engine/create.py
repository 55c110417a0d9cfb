"""Creating a run: the one place where a thread decides who goes next.

The thread row is locked first and looked behind in *later* statements. One statement would look with a snapshot
taken before it had the lock, and two runs could both believe they are first. The statements are pipelined, so
that the whole transaction costs one round trip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, cast
from uuid import UUID

import orjson
import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.db.arrays import booleans, floats, integers, texts, uuids
from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.budget import share_askers_budget
from holdfast.engine.cancel import CancelledRuns, cancel_locked
from holdfast.engine.interrupts.accepting import hand_over_resumes, take_interrupts
from holdfast.engine.interrupts.resume import resume_of
from holdfast.engine.quota import measure, refuse_over_limit
from holdfast.engine.states import MultitaskStrategy
from holdfast.errors import Conflict, NotFound
from holdfast.resources.tenants import Quota
from holdfast.streams.log import ACCEPTANCE, LogEvent
from holdfast.streams.serialize import storable, to_json
from holdfast.telemetry import tracing

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

# `found` looks into LangGraph's own table: a thread whose checkpoints were there before Holdfast goes on from them, if
# its creator may have them. For others the id is taken.
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

# A thread's head may be scheduled for later than the new run starts. A head that a worker claims at this moment is
# waited for, and seen to be running by the statement after this one; any other is out of the claim's reach from here.
# The clock is read in a subquery, once: an index cannot look for something that changes from row to row.
LOCK_LATER_HEADS = """
SELECT run.run_id
FROM unnest(%(thread_ids)b::uuid[], %(afters)b::float8[]) AS asked(thread_id, after_seconds)
JOIN run ON run.thread_id = asked.thread_id AND run.status = 'pending' AND run.ready_at IS NOT NULL
        AND run.created_at > (SELECT clock_timestamp()) + make_interval(secs => asked.after_seconds)
ORDER BY run.run_id FOR NO KEY UPDATE OF run
"""

# A head that is due later than the new run steps back for it. Both are decided by one reading of the clock: with two,
# a head due between them would step back for a run that then waits for it, and the thread would stand still.
# `seen` is how the creator knows the assistant, from an earlier look: a run is made of no other than there is now, and
# everything fails, by a division by zero, if there is another.
# A run that is streamed, and can begin at once, is told of by the transaction that creates it: whoever asked for it has
# its id as soon as there is one. Nobody else gives out numbers in its thread: it is locked, and nothing in it runs.
INSERT_RUNS = f"""
WITH due AS MATERIALIZED (
    SELECT asked.*, clock_timestamp() + make_interval(secs => asked.after_seconds) AS at,
           1 / (asked.seen IS NULL OR EXISTS (
               SELECT 1 FROM assistant
               WHERE assistant.assistant_id = asked.assistant_id AND assistant.updated_at = asked.seen
           ))::integer AS current
    FROM unnest(%(run_ids)b::uuid[], %(thread_ids)b::uuid[], %(assistant_ids)b::uuid[], %(seens)b::timestamptz[],
                %(graph_ids)b::text[], %(afters)b::float8[], %(priorities)b::integer[], %(strategies)b::text[],
                %(metadatas)b::text[], %(assistant_metadatas)b::text[], %(kwargs)b::text[], %(webhooks)b::text[],
                %(streamed)b::boolean[])
         AS asked(run_id, thread_id, assistant_id, seen, graph_id, after_seconds, priority, strategy, metadata,
                  assistant_metadata, kwargs, webhook, streamed)
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
       metadata = CASE WHEN metadata @> stamp::jsonb THEN metadata ELSE metadata || stamp::jsonb END
FROM unnest(%(thread_ids)b::uuid[], %(run_ids)b::uuid[], %(stamps)b::text[]) AS entered(thread_id, run_id, stamp)
WHERE thread.thread_id = entered.thread_id AND EXISTS (SELECT 1 FROM run WHERE run.run_id = entered.run_id)
"""


# The highest priority, and the lowest with a minus. Few, because a claim looks at each priority that a tenant uses: ten
# thousand different ones would make the claims of all tenants slow.
MAX_PRIORITY = 100


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
    # It goes on behind what its kwargs answer, and answers nothing more.
    behind_answers: bool = False
    # An answer that nobody gave in time.
    by_default: bool = False
    # Whose a thread is that is created with the run. The run is always its thread's tenant's.
    tenant_id: str = ""
    # Whether a thread that is created with the run may continue checkpoints that were there before it.
    adopting: bool = True
    # Looked at for tenants that may have limits.
    quota: Quota | None = None
    # Whether its events are going to be watched by whoever asks for it.
    streamed: bool = False
    # When the assistant that the run was made of had last been changed, if it was not looked up just now.
    assistant_seen: datetime | None = None
    run_id: UUID = field(default_factory=uuid7)

    @property
    def plain(self) -> bool:
        """Whether its thread alone decides about it. Such runs can be created together."""
        return (
            self.multitask_strategy in ("enqueue", "reject")
            and self.quota is None
            and not self.visible.restricted
            and resume_of(self.kwargs) is None
        )

    @cached_property
    def kwargs_json(self) -> str:
        return to_json(self.kwargs).decode()

    @cached_property
    def metadata_json(self) -> str:
        return to_json(self.metadata).decode()

    @property
    def size(self) -> int:
        """Characters of JSON that are stored for it."""
        return len(self.kwargs_json) + len(self.metadata_json)

    @property
    def thread(self) -> NewThread:
        """The thread that is created with it, unless it is there already."""
        ttl = None if self.temporary else self.thread_ttl
        return NewThread(self.thread_id, self.thread_metadata, ttl, self.tenant_id, self.temporary, self.adopting)


@dataclass(frozen=True)
class NewThread:
    """`ttl`: minutes without activity, and what happens then. `adopting`: whether it may continue checkpoints of its id
    that no thread has; else it is not created when there are some."""

    thread_id: UUID
    metadata: dict[str, Any]
    ttl: tuple[float, str] | None = None
    tenant_id: str = ""
    temporary: bool = False
    adopting: bool = True

    @cached_property
    def metadata_json(self) -> str:
        return orjson.dumps(self.metadata).decode()

    @property
    def size(self) -> int:
        """Characters of JSON that are stored for it."""
        return len(self.metadata_json)


@dataclass(frozen=True)
class Created:
    """A new run, whether it is its thread's head, and what its strategy cancelled. `acceptance` is what its thread's
    log says of it already, if it does."""

    run: DictRow
    ready: bool
    cancelled: CancelledRuns
    acceptance: LogEvent | None = None


class AssistantChanged(Exception):
    """The assistant is not any more what the run was made of. Nothing has been created: look it up, and try again."""


async def create_threads(connection: AsyncConnection[DictRow], threads: Sequence[NewThread]) -> AsyncCursor[DictRow]:
    """Create threads. Says which, as they are now; those that exist already are left out. May be pipelined."""
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


async def create_run(database: Database, new: NewRun) -> Created:
    """Create a run by its multitask strategy. When this returns, the run is committed.

    Raises NotFound when the thread does not exist and `create_thread` is False, Conflict when the strategy is
    `reject` and the thread has an unfinished run, AlreadyAnswered when the run answers what another has answered
    before, OverLimit when the tenant has used up its quota, AssistantChanged when the assistant is not what it was; in
    all cases nothing has changed.
    """
    with traced(new) as run:
        return await commit_run(database, run)


async def commit_run(database: Database, new: NewRun) -> Created:
    """The same for a run that knows its place in a trace."""
    try:
        async with database.transaction() as connection:
            return await _create_within(connection, new)
    except psycopg.errors.DivisionByZero:
        raise AssistantChanged from None


async def create_run_within(connection: AsyncConnection[DictRow], new: NewRun) -> Created:
    """The same as part of the caller's transaction, which must be rolled back when this raises."""
    with traced(new) as run:
        return await _create_within(connection, run)


@contextmanager
def traced(new: NewRun) -> Iterator[NewRun]:
    """The run as it is created where the trace at hand is, if there is one."""
    if tracing.recorder is None:
        yield new
        return
    subject = tracing.Subject(
        run_id=new.run_id,
        thread_id=new.thread_id,
        assistant_id=new.assistant_id,
        graph_id=new.graph_id,
        tenant=new.tenant_id,
    )
    with tracing.recorder.creating(subject, new.kwargs, new.after_seconds) as kwargs:
        yield replace(new, kwargs=kwargs)


async def _create_within(connection: AsyncConnection[DictRow], new: NewRun) -> Created:
    async with connection.pipeline():
        if new.plain:
            return await (await write_runs(connection, [new])).created(new)
        parameters = _parameters([new])
        opened = await create_threads(connection, [new.thread]) if new.create_thread else None
        locked = await _lock_thread(connection, new)
        cancelled = CancelledRuns()
        if new.multitask_strategy == "interrupt" or new.multitask_strategy == "rollback":
            cancelled = await cancel_locked(connection, new.thread_id, None, new.multitask_strategy)
        thread, answers = await _answer_questions(connection, new, locked, cancelled)
        measured = None if new.quota is None else await measure(connection, new.tenant_id, new.quota)
        written = await _insert(connection, parameters, opened, locked)
        if thread is not None:
            written.threads = {new.thread_id: thread}
        created = await written.created(new)
        if answers:
            await share_askers_budget(connection, new.thread_id, new.run_id)
        if measured is not None:
            await refuse_over_limit(new.tenant_id, measured)
    return replace(created, cancelled=cancelled)


async def create_runs_within(connection: AsyncConnection[DictRow], runs: Sequence[NewRun]) -> list[Created]:
    """Runs of one thread each, all of them or none."""
    if tracing.recorder is not None or not all(new.plain for new in runs):
        return [await create_run_within(connection, new) for new in runs]
    async with connection.pipeline():
        written = await write_runs(connection, runs)
        return [await written.created(new) for new in runs]


class Written:
    """What the statements that create runs have said, once the answers are in."""

    def __init__(
        self, opened: AsyncCursor[DictRow] | None, locked: AsyncCursor[DictRow], inserted: AsyncCursor[DictRow]
    ) -> None:
        self.threads: dict[UUID, DictRow] | None = None
        self._opened, self._locked, self._inserted = opened, locked, inserted
        self._created: set[UUID] = set()
        self._runs: dict[UUID, DictRow] | None = None

    async def created(self, new: NewRun) -> Created:
        """What became of one of them. Raises as `create_run` does."""
        if self._runs is None:
            if self.threads is None:
                self.threads = {row["thread_id"]: row for row in await self._locked.fetchall()}
            self._runs = {row["run_id"]: row for row in await self._inserted.fetchall()}
            if self._opened is not None:
                self._created = {row["thread_id"] for row in await self._opened.fetchall()}
        thread, row = (self.threads or {}).get(new.thread_id), self._runs.get(new.run_id)
        if thread is None and new.thread_id not in self._created:
            raise NotFound("Thread", new.thread_id)
        if row is None:
            raise Conflict(
                f"Thread {new.thread_id} has a run that is not finished, and multitask_strategy is 'reject'. "
                "Wait for it, cancel it, or use 'enqueue', 'interrupt' or 'rollback'."
            )
        ready, accepted_at = cast(bool, row.pop("is_head")), row.pop("accepted_at")
        acceptance = None
        if row["first_seq"] is None:
            # Not where its events begin, but a place that they come after: who watches it need not read what is older.
            row["first_seq"] = (0 if thread is None else thread["last_seq"]) + 1
        else:
            acceptance = LogEvent(row["first_seq"], new.run_id, "accepted", "", ACCEPTANCE, accepted_at)
        return Created(run=row, ready=ready, cancelled=CancelledRuns(), acceptance=acceptance)


async def write_runs(connection: AsyncConnection[DictRow], runs: Sequence[NewRun]) -> Written:
    """Create plain runs, of one thread each, in the caller's transaction and pipeline. Those that cannot be created
    leave nothing behind, and do not concern the others."""
    threads = [new.thread for new in runs if new.create_thread]
    opened = await create_threads(connection, threads) if threads else None
    parameters = _parameters(runs)
    locked = await connection.execute(LOCK_OPEN_THREADS, parameters)
    return await _insert(connection, parameters, opened, locked)


async def _insert(
    connection: AsyncConnection[DictRow],
    parameters: dict[str, Any],
    opened: AsyncCursor[DictRow] | None,
    locked: AsyncCursor[DictRow],
) -> Written:
    await connection.execute(LOCK_LATER_HEADS, parameters)
    inserted = await connection.execute(INSERT_RUNS, parameters)
    await connection.execute(MARK_BUSY, parameters)
    return Written(opened, locked, inserted)


def _parameters(runs: Sequence[NewRun]) -> dict[str, Any]:
    return {
        "run_ids": uuids([new.run_id for new in runs]),
        "thread_ids": uuids([new.thread_id for new in runs]),
        "assistant_ids": uuids([new.assistant_id for new in runs]),
        "seens": [new.assistant_seen for new in runs],
        "graph_ids": texts([new.graph_id for new in runs]),
        "afters": floats([new.after_seconds for new in runs]),
        "priorities": integers([new.priority for new in runs]),
        "strategies": texts([new.multitask_strategy for new in runs]),
        "metadatas": texts([new.metadata_json for new in runs]),
        "assistant_metadatas": texts([to_json(new.assistant_metadata).decode() for new in runs]),
        "kwargs": texts([new.kwargs_json for new in runs]),
        "webhooks": texts([_webhook(new) for new in runs]),
        "stamps": texts([_stamp(new) for new in runs]),
        "streamed": booleans([new.streamed for new in runs]),
        "acceptance": ACCEPTANCE,
    }


def _webhook(new: NewRun) -> str | None:
    """The URL to call when it has ended. That of a dead letter or a cron may be older than the checks of requests: what
    is no text is none, and what Postgres does not take becomes U+FFFD."""
    url = new.kwargs.get("webhook")
    return storable(url) if isinstance(url, str) else None


def _stamp(new: NewRun) -> str:
    """What a thread's metadata says of its last run."""
    return orjson.dumps({"graph_id": new.graph_id, "assistant_id": str(new.assistant_id)}).decode()


async def _answer_questions(
    connection: AsyncConnection[DictRow], new: NewRun, locked: AsyncCursor[DictRow], cancelled: CancelledRuns
) -> tuple[DictRow | None, bool]:
    """Take what the run answers. Returns the thread, if it was read for that, and whether the run answers anything. A
    run without answers costs nothing here."""
    answer = resume_of(new.kwargs)
    thread = None if answer is None else await locked.fetchone()
    answers = False
    if answer is not None and thread is not None:
        if new.repeats is not None:
            await hand_over_resumes(connection, new.thread_id, new.repeats, new.run_id)
            answer = replace(answer, lenient=True)
        if new.behind_answers:
            return thread, False
        rolled_back = cancelled.requested if new.multitask_strategy == "rollback" else []
        answers = await take_interrupts(connection, new, answer, [run["run_id"] for run in rolled_back])
    return thread, answers


async def _lock_thread(connection: AsyncConnection[DictRow], new: NewRun) -> AsyncCursor[DictRow]:
    locked: dict[str, Any] = {"thread_ids": [new.thread_id]}
    if not new.visible.restricted:
        return await connection.execute(LOCK_OPEN_THREADS, locked)
    # Under the lock, and not before: the thread may be created by somebody else at this moment.
    condition, more = new.visible.condition()
    statement = LOCK_OPEN_THREADS.replace("hidden_at IS NULL", f"hidden_at IS NULL AND {condition}")
    return await connection.execute(statement.encode(), {**locked, **more})
