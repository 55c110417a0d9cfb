"""The config that a checkpoint's run had: what a factory needs to build the graph that wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.stored_json import as_object
from holdfast.graphs.client_config import client_config, client_options

# Finds the nearest checkpoint that a run wrote: this one, or the one that it was updated from. For an id that does not
# exist, the search starts at the checkpoint before it. The head is named by a letter that sorts after those of a UUID,
# so that both cases use the primary key.
WRITTEN_BY_RUN = """
WITH RECURSIVE line AS (
    (SELECT thread_id, checkpoint_ns, parent_checkpoint_id, metadata, 1 AS length FROM checkpoints
     WHERE thread_id = %(thread_id)s::uuid::text AND checkpoint_ns = %(checkpoint_ns)s
       AND checkpoint_id <= coalesce(%(checkpoint_id)s, 'z')
     ORDER BY checkpoint_id DESC LIMIT 1)
    UNION ALL
    SELECT parent.thread_id, parent.checkpoint_ns, parent.parent_checkpoint_id, parent.metadata, line.length + 1
    FROM line JOIN checkpoints AS parent
      ON parent.thread_id = line.thread_id AND parent.checkpoint_ns = line.checkpoint_ns
     AND parent.checkpoint_id = line.parent_checkpoint_id
    WHERE NOT line.metadata ? 'run_id' AND line.length < 100
)
SELECT metadata FROM line ORDER BY length DESC LIMIT 1
"""

# Reads the kwargs whole, because Postgres cannot extract fields from JSON that contains a NUL character. A copied
# thread has the checkpoints of another thread's runs; both threads belong to one tenant.
RUN = """
SELECT run.assistant_id, run.kwargs FROM run JOIN thread ON thread.thread_id = %(thread_id)s
WHERE run.run_id = %(run_id)s AND run.tenant_id = thread.tenant_id
"""

# Another tenant can reuse the id of a deleted assistant. Do not read that tenant's config.
ASSISTANT_CONFIG = """
SELECT assistant.config FROM assistant JOIN thread ON thread.thread_id = %(thread_id)s
WHERE assistant.assistant_id = %(assistant_id)s
  AND (thread.tenant_id = '' OR assistant.tenant_id IN ('*', thread.tenant_id))
"""

# Keys of a checkpoint's metadata that are neither options nor metadata of its run.
OF_LANGGRAPH = frozenset({"source", "step", "parents", "writes"})


async def config_of(
    connection: AsyncConnection[DictRow], thread_id: UUID, assistant_id: str | None, checkpoint: Mapping[str, Any]
) -> dict[str, Any]:
    """The config of the run that wrote a checkpoint, or the thread's last one.

    If the run has been deleted: the plain options in the checkpoint's metadata, merged over the current config of the
    thread's assistant. If no run has written a checkpoint: the assistant's config alone.
    """
    place = {key: checkpoint.get(key) or None for key in ("checkpoint_ns", "checkpoint_id")}
    parameters = {**place, "thread_id": thread_id, "checkpoint_ns": place["checkpoint_ns"] or ""}
    row = await (await connection.execute(WRITTEN_BY_RUN, parameters)).fetchone()
    metadata = as_object(row["metadata"]) if row is not None else {}
    if (run_id := _uuid(metadata.get("run_id"))) is not None:
        run = await (await connection.execute(RUN, {"thread_id": thread_id, "run_id": run_id})).fetchone()
        if run is not None:
            return _as_run(run)
    given = await _of_assistant(connection, thread_id, assistant_id)
    kept = {} if run_id is None else {key: value for key, value in metadata.items() if key not in OF_LANGGRAPH}
    return {**given, "configurable": {**given.get("configurable", {}), **client_options(kept)}}


def _as_run(run: DictRow) -> dict[str, Any]:
    """The config that the worker built, except for the user: the graph is opened for the user of the request."""
    kwargs = as_object(run["kwargs"])
    given = client_config(as_object(kwargs.get("config")))
    configurable = {
        **client_options(as_object(kwargs.get("context"))),
        **given.get("configurable", {}),
        **{name: value for name, value in as_object(kwargs.get("forwarded")).items() if name != "langgraph_request_id"},
        "assistant_id": str(run["assistant_id"]),
    }
    return {**given, "configurable": configurable}


async def _of_assistant(
    connection: AsyncConnection[DictRow], thread_id: UUID, assistant_id: str | None
) -> dict[str, Any]:
    parameters = {"thread_id": thread_id, "assistant_id": _uuid(assistant_id)}
    row = await (await connection.execute(ASSISTANT_CONFIG, parameters)).fetchone()
    return {} if row is None else client_config(row["config"])


def _uuid(value: object) -> UUID | None:
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None
