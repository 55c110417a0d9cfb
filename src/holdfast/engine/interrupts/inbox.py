"""The inbox: interrupts as clients search them, and what happens at their deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

import orjson
import psycopg
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.pages import PageLimits, PageRows
from holdfast.db.row_by_row import TRY_TIMEOUT_SHARE
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.create import LOCK_OPEN_THREADS
from holdfast.engine.new_run import CreatedRun, NewRun, RunRequest
from holdfast.engine.outbox import RUN_FIELDS
from holdfast.engine.runs import get_run
from holdfast.engine.submit import continue_run, create_run_within
from holdfast.errors import NotFound, RequestError
from holdfast.resources.searching import search_rows

InterruptState = Literal["waiting", "answered", "closed"]

COLUMNS = """
interrupt.interrupt_id, interrupt.thread_id, interrupt.run_id, interrupt.assistant_id, interrupt.graph_id,
CASE WHEN settled_at IS NOT NULL AND (answered_by IS NULL OR closed_by IS NOT NULL) THEN 'closed'
     WHEN answered_by IS NOT NULL THEN 'answered' ELSE 'waiting' END AS state,
value, form, asked_at, deadline_at, escalated_at, escalation ->> 'to' AS escalated_to,
CASE WHEN closed_by IS NULL THEN answered_at END AS answered_at,
CASE WHEN closed_by IS NULL THEN answered_by END AS answered_by,
defaulted, thread.metadata
"""

WIDE = ("value", "form", "metadata")

# The thread's own list decides, in case a process of an earlier version ended the run without changing the rows.
WAITING = """
answered_by IS NULL AND settled_at IS NULL
AND jsonb_path_exists(thread.interrupts, '$.*[*] ? (@.id == $id)', jsonb_build_object('id', interrupt_id))
"""

SEARCH = f"""
SELECT {COLUMNS} FROM interrupt JOIN thread USING (thread_id) WHERE {{where}}
ORDER BY {{sort_by}} {{order}}, interrupt.interrupt_id {{order}} LIMIT %(limit)s OFFSET %(offset)s
"""

OF_RUN = """
SELECT interrupt_id, answered_by IS NULL AND settled_at IS NULL AS waits FROM interrupt
WHERE thread_id = %(thread_id)s AND %(run_id)s IN (run_id, left_by) AND asked_at IS NOT NULL
ORDER BY asked_at, interrupt_id
"""

# Identifies one due time of one interrupt. A postponed interrupt has another.
DUE_TIME = "concat_ws(' ', thread_id, interrupt_id, run_id, due_at)"

# The interrupts that are due, and the next one. now() rather than clock_timestamp(), which no index can be used with.
UPCOMING = f"""
SELECT {DUE_TIME} AS due_time, thread_id, interrupt_id, run_id, extract(epoch FROM due_at - now())::float8 AS due_in
FROM interrupt
WHERE answered_by IS NULL AND settled_at IS NULL AND due_at IS NOT NULL AND {DUE_TIME} <> ALL(%(aside)s::text[])
ORDER BY due_at LIMIT %(limit)s
"""

NEXT_DEADLINE = f"""
SELECT extract(epoch FROM due_at - now())::float8 AS due_in FROM interrupt
WHERE answered_by IS NULL AND settled_at IS NULL AND due_at IS NOT NULL AND {DUE_TIME} <> ALL(%(aside)s::text[])
ORDER BY due_at LIMIT 1
"""

# The guard against serving a deadline twice: only the first process finds the row still due.
DUE = """
SELECT interrupt.*, default_answer IS NOT NULL AS has_default FROM interrupt
WHERE thread_id = %(thread_id)s AND interrupt_id = %(interrupt_id)s AND run_id = %(run_id)s
  AND answered_by IS NULL AND settled_at IS NULL AND due_at <= now()
FOR NO KEY UPDATE SKIP LOCKED
"""

SET_DUE = """
UPDATE interrupt SET due_at = now() + make_interval(secs => %(seconds)s::float8)
WHERE (thread_id, interrupt_id, run_id) = (
    SELECT thread_id, interrupt_id, run_id FROM interrupt
    WHERE thread_id = %(thread_id)s AND interrupt_id = %(interrupt_id)s AND run_id = %(run_id)s
    FOR NO KEY UPDATE SKIP LOCKED)
"""

# A second deadline replaces the first.
ESCALATE = """
UPDATE interrupt SET escalated_at = now(), due_at = further.at, deadline_at = coalesce(further.at, deadline_at)
FROM (SELECT now() + make_interval(secs => %(seconds)s::float8) AS at) AS further
WHERE thread_id = %(thread_id)s AND interrupt_id = %(interrupt_id)s AND run_id = %(run_id)s
"""

# An ordinary webhook delivery, about the interrupted run as it was when it ended.
QUEUE_ESCALATION = f"""
INSERT INTO webhook_delivery (run_id, thread_id, tenant_id, url, run, "values")
SELECT run.run_id, run.thread_id, run.tenant_id, %(url)s,
       json_build_object(
           'event', 'interrupt.escalated',
           'interrupt', json_build_object(
               'interrupt_id', i.interrupt_id, 'value', i.value, 'form', i.form, 'asked_at', i.asked_at,
               'deadline_at', i.deadline_at, 'escalated_at', i.escalated_at, 'escalated_to', i.escalation ->> 'to'),
           {RUN_FIELDS}),
       thread.values
FROM interrupt i JOIN run USING (run_id) JOIN thread ON thread.thread_id = run.thread_id
WHERE i.thread_id = %(thread_id)s AND i.interrupt_id = %(interrupt_id)s AND i.run_id = %(run_id)s
"""


@dataclass(frozen=True, kw_only=True)
class InterruptFilters:
    """Which interrupts to find. A filter that is None matches all."""

    state: InterruptState | None = "waiting"
    interrupt_id: str | None = None
    thread_id: UUID | None = None
    run_id: UUID | None = None
    assistant_id: UUID | None = None
    graph_id: str | None = None
    # Seconds since it was asked.
    older_than: float | None = None
    newer_than: float | None = None
    escalated: bool | None = None
    # Of the thread.
    metadata: Mapping[str, Any] = field(default_factory=dict)
    visible: Visibility = EVERYTHING

    def where(self) -> tuple[str, dict[str, Any]]:
        """Only the conditions that were given: `OR … IS NULL` would keep the planner from using indexes."""
        conditions, parameters = ["asked_at IS NOT NULL", "thread.hidden_at IS NULL"], dict[str, Any]()
        match self.state:
            case "waiting":
                conditions.append(WAITING)
            case "answered":
                conditions.append("answered_by IS NOT NULL AND closed_by IS NULL")
            case "closed":
                conditions.append("settled_at IS NOT NULL AND (answered_by IS NULL OR closed_by IS NOT NULL)")
        for column in ("interrupt_id", "thread_id", "run_id", "assistant_id", "graph_id"):
            if (value := getattr(self, column)) is not None:
                conditions.append(f"interrupt.{column} = %({column})s")
                parameters[column] = value
        for name, sign in (("older_than", "<="), ("newer_than", ">")):
            if (value := getattr(self, name)) is not None:
                conditions.append(f"asked_at {sign} now() - make_interval(secs => %({name})s)")
                parameters[name] = value
        if self.escalated is not None:
            conditions.append(f"escalated_at IS {'NOT ' if self.escalated else ''}NULL")
        if self.metadata:
            conditions.append("thread.metadata @> %(metadata)s::jsonb")
            parameters["metadata"] = orjson.dumps(self.metadata).decode()
        condition, more = self.visible.condition("thread.metadata")
        return " AND ".join([*conditions, condition]), {**parameters, **more}


async def search_interrupts(
    connection: AsyncConnection[DictRow], filters: InterruptFilters, *, ascending: bool, part: PageLimits
) -> PageRows:
    """Search interrupts, ordered by the time of the interrupt."""
    return await search_rows(connection, SEARCH, filters, sort_by="asked_at", ascending=ascending, part=part, wide=WIDE)


async def interrupts_of_run(connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID) -> list[DictRow]:
    """The interrupts that a run raised or left waiting, and for each whether it `waits`."""
    return await (await connection.execute(OF_RUN, {"thread_id": thread_id, "run_id": run_id})).fetchall()


async def next_deadline(connection: AsyncConnection[DictRow], aside: Sequence[str] = ()) -> float | None:
    """Seconds until the next interrupt is due, zero or less if one is; None if none has a deadline. `aside`: the
    `due_time` of interrupts to leave out."""
    row = await (await connection.execute(NEXT_DEADLINE, {"aside": list(aside)})).fetchone()
    return None if row is None else float(row["due_in"])


async def upcoming_deadlines(
    connection: AsyncConnection[DictRow], limit: int, aside: Sequence[str] = ()
) -> list[DictRow]:
    """The interrupts that are due first. `due_in` is in seconds, zero or less for those that are due. `aside`: the
    `due_time` of interrupts to leave out."""
    return await (await connection.execute(UPCOMING, {"limit": limit, "aside": list(aside)})).fetchall()


@dataclass(frozen=True, kw_only=True)
class Served:
    """What was done at a deadline: escalated, resumed with the default (`created`), or neither (`skipped`: why)."""

    escalated: bool = False
    webhook_queued: bool = False
    created: CreatedRun | None = None
    skipped: str = ""


async def serve_deadline(database: Database, due: DictRow) -> Served | None:
    """Escalate a due interrupt or resume it with its default, in the transaction that locks it.

    A resume at the same time either comes first, and nothing is left to do, or is refused. Returns None if the
    interrupt is no longer due, or is locked.

    Raises TimeoutError if it takes longer than TRY_TIMEOUT_SHARE of DATABASE_TIMEOUT, so that it does not delay other
    due interrupts. The wait for a pooled connection does not count, because the interrupt is not its cause.
    """
    seconds = TRY_TIMEOUT_SHARE * database.settings.database_timeout
    async with database.transaction() as connection, asyncio.timeout(seconds):
        # Lock the thread before the interrupt, in the same order as a resume.
        await connection.execute(LOCK_OPEN_THREADS, {"thread_ids": [due["thread_id"]]})
        interrupt = await (await connection.execute(DUE, due)).fetchone()
        if interrupt is None:
            return None
        if interrupt["escalation"] is not None and interrupt["escalated_at"] is None:
            return await _escalate(connection, interrupt)
        if not interrupt["has_default"]:
            await connection.execute(SET_DUE, {**due, "seconds": None})
            return Served(skipped="nothing is to be done")
        new = await _default_run(connection, interrupt)
        try:
            async with connection.transaction():
                return Served(created=await create_run_within(connection, new))
        except (RequestError, psycopg.DataError) as error:
            await connection.execute(SET_DUE, {**due, "seconds": None})
            return Served(skipped=str(error))


async def postpone_deadline(database: Database, due: DictRow, seconds: float) -> None:
    """Try again later, after an unexpected failure. A locked interrupt is not changed."""
    async with database.connection() as connection:
        await connection.execute(SET_DUE, {**due, "seconds": seconds})


async def _escalate(connection: AsyncConnection[DictRow], interrupt: DictRow) -> Served:
    escalation = interrupt["escalation"]
    further = escalation.get("deadline") if interrupt["has_default"] else None
    place = {key: interrupt[key] for key in ("thread_id", "interrupt_id", "run_id")}
    await connection.execute(ESCALATE, {**place, "seconds": further})
    webhook_queued = False
    if url := escalation.get("webhook"):
        queued = await connection.execute(QUEUE_ESCALATION, {**place, "url": url})
        webhook_queued = queued.rowcount > 0
    return Served(escalated=True, webhook_queued=webhook_queued)


def continued_kwargs(kwargs: Mapping[str, Any], resume: Mapping[str, Any]) -> dict[str, Any]:
    """The kwargs of a run that resumes another: those of the other, without its input and its starting checkpoint."""
    config = dict(kwargs.get("config") or {})
    if config.get("configurable"):
        start_keys = ("checkpoint_id", "checkpoint_ns", "checkpoint_map")
        config["configurable"] = {key: value for key, value in config["configurable"].items() if key not in start_keys}
    kept = {key: value for key, value in kwargs.items() if key not in ("answers", "strict_resume")}
    return {**kept, "input": None, "command": {"resume": dict(resume)}, "config": config}


async def _default_run(connection: AsyncConnection[DictRow], interrupt: DictRow) -> NewRun:
    """The run that resumes an interrupt with its default, with the kwargs of the run that raised it."""
    try:
        raised_by: Mapping[str, Any] = await get_run(connection, interrupt["run_id"])
    except NotFound:  # The run was deleted since, the interrupt was not.
        raised_by = {"kwargs": {"stream_mode": ["values"]}, "metadata": {}, "priority": 0}
    request = RunRequest(
        by="deadline",
        kwargs=continued_kwargs(raised_by["kwargs"], {interrupt["interrupt_id"]: interrupt["default_answer"]}),
        metadata=raised_by["metadata"],
        priority=raised_by["priority"],
        thread_id=interrupt["thread_id"],
        answers_run=interrupt["run_id"],
    )
    return continue_run(request, interrupt["assistant_id"], interrupt["graph_id"])
