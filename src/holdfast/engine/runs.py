"""Reading, listing and deleting runs for clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.pages import PageLimits, PageRows, fetch_page
from holdfast.db.stored_json import as_object
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.create import RUN_COLUMNS
from holdfast.engine.interrupts.rows import restore_thread
from holdfast.engine.queue import LOCK_THREADS
from holdfast.engine.rollback import erase_runs
from holdfast.engine.states import RunStatus
from holdfast.engine.threads import present
from holdfast.errors import Conflict, NotFound

# The kwargs of a run that clients may see. The others are internal.
SHOWN_KWARGS = (
    "input",
    "command",
    "config",
    "context",
    "stream_mode",
    "interrupt_before",
    "interrupt_after",
    "webhook",
    "feedback_keys",
    "temporary",
    "subgraphs",
    "resumable",
    "checkpoint_during",
    "durability",
)
# Where the LangSmith tracer looks for the name of its project.
LANGSMITH_PROJECT_KEY = "__langsmith_project__"

WIDE = ("metadata", "kwargs", "error", "usage")

GET = f"SELECT {RUN_COLUMNS}, finished_at FROM run WHERE run_id = %(run_id)s"

THREAD = "SELECT thread_id FROM run WHERE run_id = %(run_id)s"

# Reads all unfinished runs. An index by assistant would cost every run a little and would hardly ever be used.
UNFINISHED = """
SELECT thread_id, array_agg(run_id) AS run_ids FROM run
WHERE status IN ('pending', 'running') AND (%(status)s = 'all' OR status = %(status)s)
  AND (%(assistant_id)s::uuid IS NULL OR assistant_id = %(assistant_id)s) AND {visible}
GROUP BY thread_id
"""

LOCK = "SELECT status FROM run WHERE run_id = %(run_id)s AND thread_id = %(thread_id)s FOR UPDATE"

LIST_OF_THREAD = f"""
SELECT {RUN_COLUMNS} FROM run
WHERE thread_id = %(thread_id)s AND (%(status)s::text IS NULL OR status = %(status)s)
ORDER BY created_at DESC, run_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""

# The status is a literal, not a parameter: each status has a partial index (`run_recent`, `run_unfinished`,
# `run_failed`), and none of them can serve a generic plan.
LIST_ALL = f"""
SELECT {RUN_COLUMNS} FROM run WHERE {{state}} AND {{visible}}
ORDER BY created_at DESC, run_id DESC LIMIT %(limit)s OFFSET %(offset)s
"""


async def get_run(connection: AsyncConnection[DictRow], run_id: UUID, thread_id: UUID | None = None) -> DictRow:
    """Return a run, of the given thread if one is given. Raises NotFound."""
    cursor = await connection.execute(GET, {"run_id": run_id})
    row = await cursor.fetchone()
    if row is None or (thread_id is not None and row["thread_id"] != thread_id):
        raise NotFound("Run", run_id if thread_id is None else f"{run_id} of thread {thread_id}")
    return row


async def thread_of_run(connection: AsyncConnection[DictRow], run_id: UUID) -> UUID:
    """Return the thread of a run. Raises NotFound."""
    row = await (await connection.execute(THREAD, {"run_id": run_id})).fetchone()
    if row is None:
        raise NotFound("Run", run_id)
    thread_id: UUID = row["thread_id"]
    return thread_id


def _in_visible_thread(visible: Visibility) -> tuple[str, dict[str, Any]]:
    if not visible.filter:
        owned, tenants = visible.tenant_condition("run.tenant_id")
        if visible.tenant is not None:
            # Matches the expression index on tenants.
            owned += " AND run.tenant_id <> '' AND hashtext(run.tenant_id) = hashtext(%(visible_tenant)s)"
            tenants["visible_tenant"] = visible.tenant
        return owned, tenants
    # Both tables have metadata.
    condition, parameters = visible.condition("thread.metadata")
    return f"EXISTS (SELECT 1 FROM thread WHERE thread.thread_id = run.thread_id AND {condition})", parameters


async def unfinished_by_thread(
    connection: AsyncConnection[DictRow], status: str, visible: Visibility, assistant_id: UUID | None = None
) -> dict[UUID, list[UUID]]:
    """The unfinished runs of visible threads with a status ("all": pending or running), by thread.

    With an `assistant_id`, only those of that assistant.
    """
    condition, parameters = _in_visible_thread(visible)
    statement = UNFINISHED.format(visible=condition)
    cursor = await connection.execute(
        statement.encode(), {"status": status, "assistant_id": assistant_id, **parameters}
    )
    return {row["thread_id"]: row["run_ids"] for row in await cursor.fetchall()}


async def delete_run(database: Database, thread_id: UUID, run_id: UUID) -> None:
    """Delete a run that has ended, with every checkpoint it wrote. Raises Conflict while it is unfinished."""
    parameters = {"thread_id": thread_id, "run_id": run_id}
    async with database.transaction() as connection:
        await connection.execute(LOCK_THREADS, {"thread_ids": [thread_id]})
        row = await (await connection.execute(LOCK, parameters)).fetchone()
        if row is None:
            raise NotFound("Run", f"{run_id} of thread {thread_id}")
        if row["status"] in ("pending", "running"):
            raise Conflict(f"Run {run_id} is {row['status']}: cancel it first.")
        await erase_runs(connection, thread_id, [run_id])
        await restore_thread(connection, thread_id)


def list_statement(status: str | None, visible: str) -> str:
    """The statement that lists runs with a status, newest first. `visible` is SQL of ours, never of a client."""
    state = "true" if status is None else f"status = '{RunStatus(status)}'"
    return LIST_ALL.format(state=state, visible=visible)


async def list_runs(
    connection: AsyncConnection[DictRow],
    thread_id: UUID | None,
    status: str | None,
    part: PageLimits,
    visible: Visibility = EVERYTHING,
) -> PageRows:
    """Runs of a thread, or of all visible threads, newest first."""
    condition, parameters = _in_visible_thread(visible)
    statement = list_statement(status, condition) if thread_id is None else LIST_OF_THREAD
    parameters |= {"thread_id": thread_id, "status": status}
    return await fetch_page(connection, statement, parameters, part, WIDE)


def present_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run as clients see it, with what Holdfast adds: attempt, priority, error and usage."""
    shown = present(dict(run))
    kwargs = as_object(shown["kwargs"])
    config = as_object(kwargs.get("config"))
    configurable: dict[str, Any] = {
        **as_object(config.get("configurable")),
        **{key: str(run[key]) for key in ("run_id", "thread_id", "graph_id", "assistant_id")},
    }
    if "identity" in (user := as_object(kwargs.get("user"))):
        configurable["user_id"] = user["identity"]
    shown["kwargs"] = {key: kwargs.get(key) for key in SHOWN_KWARGS}
    if kwargs.get("budget"):
        shown["kwargs"]["budget"] = kwargs["budget"]
    shown["kwargs"]["config"] = {**config, "configurable": configurable}
    shown["langsmith_session_name"] = configurable.get(LANGSMITH_PROJECT_KEY)
    for internal in ("first_seq", "graph_id", "finished_at"):
        shown.pop(internal, None)
    if shown.get("parent_run_id") is None:
        shown.pop("parent_run_id", None)
    return shown
