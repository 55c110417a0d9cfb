"""Reading, searching, changing, copying and deleting threads. `create.py` creates them, because runs do that too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

import orjson
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.pages import PageLimits, PageRows, fetch_page
from holdfast.db.visibility import EVERYTHING, Visibility, only_visible
from holdfast.engine.children.parents import LOCK_FAMILY
from holdfast.engine.create import THREAD_COLUMNS
from holdfast.engine.new_run import NewThread
from holdfast.engine.usage import usage_totals
from holdfast.errors import Conflict, NotFound

log = structlog.get_logger(__name__)

TtlStrategy = Literal["delete", "keep_latest"]
# Written into statements as literals: the partial index of threads that are not idle cannot serve a generic plan.
STATUSES = frozenset({"idle", "busy", "interrupted", "error"})

WIDE = frozenset({"metadata", "config", "values", "interrupts", "error", "usage"})
HAS_CHECKPOINTS_ONLY = """
SELECT EXISTS (SELECT 1 FROM checkpoints WHERE thread_id = %(thread_id)s::uuid::text)
       AND NOT EXISTS (SELECT 1 FROM thread WHERE thread_id = %(thread_id)s) AS any
"""
ALL_COLUMNS = ", ".join(f'"{column}"' for column in THREAD_COLUMNS)

GET = f"SELECT {ALL_COLUMNS} FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL AND {{visible}}"

# Without the values and other columns that may have many megabytes.
GET_SUMMARY = """
SELECT status, metadata -> 'graph_id' AS graph_id, metadata -> 'assistant_id' AS assistant_id,
       jsonb_path_query_array(interrupts, '$.*[*].id') AS interrupt_ids
FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL AND {visible}
"""

# Every change of the thread extends its life. The column `expires_at` is updated only when that time is reached.
GET_TTL = """
SELECT ttl_strategy AS strategy, ttl_minutes,
       greatest(expires_at, updated_at + ttl_minutes * interval '1 minute') AS expires_at
FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL AND ttl_minutes IS NOT NULL
"""

STATE_TIMES = """
SELECT created_at, state_updated_at FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL
"""

CHANGE = f"""
UPDATE thread SET
    metadata = metadata || %(metadata)s::jsonb,
    updated_at = now(),
    ttl_minutes = coalesce(%(minutes)s::float8, ttl_minutes),
    ttl_strategy = coalesce(%(strategy)s::text, ttl_strategy),
    expires_at = coalesce(now() + %(minutes)s::float8 * interval '1 minute', expires_at)
WHERE thread_id = %(thread_id)s AND hidden_at IS NULL AND {{visible}}
RETURNING {ALL_COLUMNS}
"""

# One statement has one snapshot, so no checkpoint is copied without its blobs while a run writes. Waiting interrupts
# wait in the copy too, without their deadlines. The copy has no runs, so its status is otherwise idle, and no events.
COPY = f"""
WITH source AS (
    SELECT * FROM thread WHERE thread_id = %(thread_id)s AND hidden_at IS NULL AND {{visible}}
), checkpoint AS (
    INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata)
    SELECT %(copy_id)s::uuid::text, c.checkpoint_ns, c.checkpoint_id, c.parent_checkpoint_id, c.type, c.checkpoint,
           CASE WHEN c.metadata ? 'thread_id'
                THEN c.metadata || jsonb_build_object('thread_id', %(copy_id)s::uuid::text) ELSE c.metadata END
    FROM source JOIN checkpoints c ON c.thread_id = source.thread_id::text
), blob AS (
    INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
    SELECT %(copy_id)s::uuid::text, b.checkpoint_ns, b.channel, b.version, b.type, b.blob
    FROM source JOIN checkpoint_blobs b ON b.thread_id = source.thread_id::text
), write AS (
    INSERT INTO checkpoint_writes (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type,
                                   blob)
    SELECT %(copy_id)s::uuid::text, w.checkpoint_ns, w.checkpoint_id, w.task_id, w.task_path, w.idx, w.channel, w.type,
           w.blob
    FROM source JOIN checkpoint_writes w ON w.thread_id = source.thread_id::text
), copied_interrupt AS (
    INSERT INTO interrupt (thread_id, interrupt_id, run_id, assistant_id, graph_id, task_id, value, form, asked_at)
    SELECT %(copy_id)s, i.interrupt_id, i.run_id, i.assistant_id, i.graph_id, i.task_id, i.value, i.form, i.asked_at
    FROM source JOIN interrupt i USING (thread_id)
    WHERE source.status = 'interrupted' AND i.answered_by IS NULL AND i.settled_at IS NULL
)
INSERT INTO thread (thread_id, tenant_id, status, resting_status, metadata, config, "values", interrupts, has_state,
                    ttl_minutes, ttl_strategy, expires_at)
SELECT %(copy_id)s, tenant_id, CASE WHEN status = 'interrupted' THEN 'interrupted' ELSE 'idle' END,
       CASE WHEN status = 'interrupted' THEN 'interrupted' ELSE 'idle' END,
       metadata, config, "values", CASE WHEN status = 'interrupted' THEN interrupts ELSE '{{{{}}}}'::jsonb END,
       has_state OR EXISTS (SELECT 1 FROM checkpoints c WHERE c.thread_id = source.thread_id::text),
       ttl_minutes, ttl_strategy, now() + ttl_minutes * interval '1 minute'
FROM source
RETURNING {ALL_COLUMNS}
"""

LOCK_FOR_DELETE = """
SELECT thread_id, parent_run_id FROM thread
WHERE thread_id = %(thread_id)s AND hidden_at IS NULL AND {visible} FOR UPDATE
"""

# The runs are deleted first. That waits for a concurrent journal commit and makes the fences of running runs invalid,
# so that nothing is written to the thread's other tables after they were emptied.
DELETE_RUNS = """
WITH doomed AS (
    SELECT run_id, status, worker_id FROM run WHERE thread_id = %(thread_id)s ORDER BY run_id FOR UPDATE
)
DELETE FROM run USING doomed WHERE run.run_id = doomed.run_id
RETURNING doomed.run_id, doomed.status, doomed.worker_id
"""

DELETE_REST = (
    "DELETE FROM event WHERE thread_id = %(thread_id)s",
    "DELETE FROM checkpoints WHERE thread_id = %(thread_id)s::uuid::text",
    "DELETE FROM checkpoint_blobs WHERE thread_id = %(thread_id)s::uuid::text",
    "DELETE FROM checkpoint_writes WHERE thread_id = %(thread_id)s::uuid::text",
    "DELETE FROM thread WHERE thread_id = %(thread_id)s",
)


@dataclass(frozen=True, kw_only=True)
class ThreadFilters:
    """What a thread must be like to be found. Each that is left out lets all pass."""

    ids: Sequence[UUID] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    status: str | None = None
    visible: Visibility = EVERYTHING

    def where(self) -> tuple[str, dict[str, Any]]:
        """Only the conditions that were asked for: `OR … IS NULL` would keep the planner from the index on metadata.
        A thread without values contains none."""
        conditions, parameters = ["hidden_at IS NULL"], dict[str, Any]()
        if self.ids is not None:
            conditions.append("thread_id = ANY(%(ids)s)")
            parameters["ids"] = list(self.ids)
        if self.metadata:
            conditions.append("metadata @> %(metadata)s::jsonb")
            parameters["metadata"] = orjson.dumps(self.metadata).decode()
        if self.values:
            conditions.append('"values" @> %(values)s::jsonb')
            parameters["values"] = orjson.dumps(self.values).decode()
        if self.status in STATUSES:
            conditions.append(f"status = '{self.status}'")
        elif self.status is not None:
            conditions.append("status = %(status)s")
            parameters["status"] = self.status
        if self.visible.restricted:
            condition, more = self.visible.condition()
            conditions.append(condition)
            parameters |= more
        return " AND ".join(conditions), parameters


async def get_thread(
    connection: AsyncConnection[DictRow], thread_id: UUID, visible: Visibility = EVERYTHING
) -> DictRow:
    """Return a thread. Raises NotFound."""
    statement, owner = only_visible(GET, visible)
    row = await (await connection.execute(statement, {**owner, "thread_id": thread_id})).fetchone()
    if row is None:
        raise NotFound("Thread", thread_id)
    return row


@dataclass(frozen=True)
class ThreadSummary:
    """A thread without its values, for requests that work with the thread and do not show it."""

    status: str
    graph_id: str | None
    assistant_id: str | None
    """Both are read from the thread's metadata."""
    interrupt_ids: frozenset[str]
    """The interrupts that wait."""


async def get_thread_summary(
    connection: AsyncConnection[DictRow], thread_id: UUID, visible: Visibility = EVERYTHING
) -> ThreadSummary:
    """Return a thread without its values. Raises NotFound."""
    statement, owner = only_visible(GET_SUMMARY, visible)
    row = await (await connection.execute(statement, {**owner, "thread_id": thread_id})).fetchone()
    if row is None:
        raise NotFound("Thread", thread_id)
    ids = {key: row[key] if isinstance(row[key], str) else None for key in ("graph_id", "assistant_id")}
    return ThreadSummary(row["status"], **ids, interrupt_ids=frozenset(row["interrupt_ids"]))


async def state_times(connection: AsyncConnection[DictRow], thread_id: UUID) -> tuple[datetime, datetime] | None:
    """When a thread was created and when its state was last updated; None if there is no such thread."""
    row = await (await connection.execute(STATE_TIMES, {"thread_id": thread_id})).fetchone()
    return None if row is None else (row["created_at"], row["state_updated_at"])


async def get_ttl(connection: AsyncConnection[DictRow], thread_id: UUID) -> DictRow | None:
    """A thread's time to live, and when it expires if nothing happens before; None if it does not expire."""
    return await (await connection.execute(GET_TTL, {"thread_id": thread_id})).fetchone()


async def change_thread(
    connection: AsyncConnection[DictRow],
    thread_id: UUID,
    metadata: Mapping[str, Any],
    ttl: tuple[float, TtlStrategy] | None,
    visible: Visibility = EVERYTHING,
) -> DictRow:
    """Merge keys into a thread's metadata, and set its time to live in minutes. Raises NotFound."""
    minutes, strategy = ttl or (None, None)
    statement, owner = only_visible(CHANGE, visible)
    given = {"metadata": orjson.dumps(metadata).decode(), "minutes": minutes, "strategy": strategy}
    row = await (await connection.execute(statement, {**owner, **given, "thread_id": thread_id})).fetchone()
    if row is None:
        raise NotFound("Thread", thread_id)
    return row


async def search_threads(
    connection: AsyncConnection[DictRow],
    filters: ThreadFilters,
    *,
    columns: Sequence[str],
    extract: Mapping[str, tuple[str, Sequence[str]]],
    sort_by: str,
    descending: bool,
    part: PageLimits,
) -> PageRows:
    """Search threads and return the given columns.

    `extract` maps an alias to a path in one of the JSON columns; `extracted` has the value there, or null. Column names
    come from the caller, never from a client.
    """
    where, parameters = filters.where()
    selected = [f'"{column}"' for column in columns]
    places = []
    for number, (alias, (document, path)) in enumerate(extract.items()):
        places.append(f'%(alias{number})s::text, "{document}" #> %(path{number})s::text[]')
        parameters |= {f"alias{number}": alias, f"path{number}": list(path)}
    if places:
        selected.append(f"jsonb_build_object({', '.join(places)}) AS extracted")
    direction = "DESC" if descending else "ASC"
    statement = (
        f"SELECT {', '.join(selected)} FROM thread WHERE {where} "
        f'ORDER BY "{sort_by}" {direction}, thread_id {direction} LIMIT %(limit)s OFFSET %(offset)s'
    )
    wide = [column for column in columns if column in WIDE] + (["extracted"] if places else [])
    return await fetch_page(connection, statement, parameters, part, wide)


async def count_threads(connection: AsyncConnection[DictRow], filters: ThreadFilters) -> int:
    where, parameters = filters.where()
    cursor = await connection.execute(f"SELECT count(*) FROM thread WHERE {where}".encode(), parameters)
    row = await cursor.fetchone()
    return 0 if row is None else int(row["count"])


async def copy_thread(
    connection: AsyncConnection[DictRow], thread_id: UUID, copy_id: UUID, visible: Visibility
) -> DictRow:
    """Create a thread with the metadata and the whole history of another.

    Raises Conflict if the other does not exist, and NotFound if it is not visible.
    """
    statement, owner = only_visible(COPY, visible)
    row = await (await connection.execute(statement, {**owner, "thread_id": thread_id, "copy_id": copy_id})).fetchone()
    if row is None and visible.restricted:
        raise NotFound("Thread", thread_id)
    if row is None:
        raise Conflict(f"Thread {thread_id} does not exist, so it cannot be copied.")
    return row


async def delete_thread(database: Database, thread_id: UUID, visible: Visibility) -> list[DictRow]:
    """Delete a thread with everything that belongs to it, if it is visible, which is checked under its lock.

    Returns its unfinished runs, so that the caller can send hints to their workers; a worker that gets none notices at
    its next write. Raises NotFound.
    """
    statement, owner = only_visible(LOCK_FOR_DELETE, visible)
    parameters = {"thread_id": thread_id}
    async with database.transaction() as connection:
        locked = await (await connection.execute(statement, {**owner, **parameters})).fetchone()
        if locked is None:
            raise NotFound("Thread", thread_id)
        if locked["parent_run_id"] is not None:
            await connection.execute(LOCK_FAMILY, parameters | {"parent_run_id": locked["parent_run_id"]})
        runs = await (await connection.execute(DELETE_RUNS, parameters)).fetchall()
        for delete in DELETE_REST:
            await connection.execute(delete, parameters)
    return [run for run in runs if run["status"] in ("pending", "running")]


def present(row: DictRow) -> dict[str, Any]:
    """A row as clients see it: times in UTC, and the usage as its total."""
    shown: dict[str, Any] = {
        key: value.astimezone(UTC) if isinstance(value, datetime) else value for key, value in row.items()
    }
    return shown if shown.get("usage") is None else {**shown, "usage": usage_totals(shown["usage"])}


async def log_refused_checkpoints(connection: AsyncConnection[DictRow], refused: NewThread) -> None:
    """Log that a thread was refused because its id has checkpoints but no thread.

    The response does not say so, because it must not reveal what belongs to an id of another caller.
    """
    if refused.adopting:
        return
    row = await (await connection.execute(HAS_CHECKPOINTS_ONLY, {"thread_id": refused.thread_id})).fetchone()
    if row is not None and row["any"]:
        log.warning("thread.checkpoints_not_adopted", thread_id=str(refused.thread_id))
