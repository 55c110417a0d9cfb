"""Assistants: a graph with the configuration it runs with, in versions.

Each graph of the project has a *system* assistant, whose id is derived from the graph's id. Clients create all other
assistants. A change creates a new version and keeps the old ones. Any version can be made the current one again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.pages import PageLimits, PageRows, fetch_page
from holdfast.db.visibility import EVERYTHING, Visibility, only_visible
from holdfast.errors import Conflict, InvalidRequest, NotFound
from holdfast.graphs.assistants import assistant_id
from holdfast.graphs.catalog import GraphCatalog
from holdfast.resources.searching import count_rows, search_rows

SortBy = Literal["assistant_id", "created_at", "updated_at", "name", "graph_id"]

CONTENT = "graph_id, name, description, config, context, metadata"
COLUMNS = f"assistant_id, {CONTENT}, version, created_at, updated_at"
WIDE = ("name", "description", "config", "context", "metadata")
VERSION_COLUMNS = f"assistant_id, {CONTENT}, version, created_at"

GET = f"SELECT {COLUMNS}, tenant_id FROM assistant WHERE assistant_id = %(assistant_id)s"

# In the order of the ids, so that processes that start at the same time take the row locks in one order and do not
# deadlock. An assistant that a client has changed keeps its changes. An unchanged one takes over the project's name and
# description of its graph.
ENSURE_SYSTEM = """
WITH known AS (
    INSERT INTO assistant AS old (assistant_id, graph_id, name, description, metadata, tenant_id)
    SELECT assistant_id, graph_id, name, description, '{"created_by": "system"}', '*'
    FROM unnest(%(assistant_ids)s::uuid[], %(graph_ids)s::text[], %(names)s::text[], %(descriptions)s::text[])
         AS graph (assistant_id, graph_id, name, description)
    ORDER BY assistant_id
    ON CONFLICT (assistant_id) DO UPDATE SET
        name = CASE WHEN old.last_version = 1 THEN excluded.name ELSE old.name END,
        description = CASE WHEN old.last_version = 1 THEN excluded.description ELSE old.description END,
        tenant_id = excluded.tenant_id
        WHERE old.graph_id = excluded.graph_id AND (old.tenant_id = '' OR old.last_version = 1
          AND (old.name, old.description) IS DISTINCT FROM (excluded.name, excluded.description))
    RETURNING assistant_id, version, graph_id, name, description, config, context, metadata
)
INSERT INTO assistant_version (assistant_id, version, graph_id, name, description, config, context, metadata)
SELECT assistant_id, version, graph_id, name, description, config, context, metadata FROM known
ON CONFLICT (assistant_id, version) DO UPDATE SET name = excluded.name, description = excluded.description
"""

CREATE = f"""
WITH created AS (
    INSERT INTO assistant (assistant_id, {CONTENT}, tenant_id)
    VALUES (%(assistant_id)s, %(graph_id)s, %(name)s, %(description)s, %(config)s::jsonb, %(context)s::jsonb,
            %(metadata)s::jsonb, %(tenant_id)s)
    ON CONFLICT (assistant_id) DO NOTHING
    RETURNING {COLUMNS}
), kept AS (
    INSERT INTO assistant_version ({VERSION_COLUMNS}) SELECT {VERSION_COLUMNS} FROM created
)
SELECT {COLUMNS} FROM created
"""

COUNT = "SELECT count(*) AS found FROM assistant WHERE {where}"

SEARCH = f"""
SELECT {COLUMNS} FROM assistant WHERE {{where}}
ORDER BY {{sort_by}} {{order}}, assistant_id {{order}} LIMIT %(limit)s OFFSET %(offset)s
"""

# `created_at`, here and below, rules out another assistant that was created with the same id after the caller was
# authorized. Parameters that are not given leave their columns unchanged. The row lock serializes changes, so that each
# change builds on the one before and gets its own version number.
CHANGE = f"""
WITH changed AS (
    UPDATE assistant SET
        graph_id = coalesce(%(graph_id)s, graph_id),
        name = coalesce(%(name)s, name),
        description = coalesce(%(description)s, description),
        context = coalesce(%(context)s::jsonb, context),
        config = {{config}},
        metadata = metadata || %(metadata)s::jsonb,
        version = last_version + 1, last_version = last_version + 1, updated_at = clock_timestamp()
    WHERE assistant_id = %(assistant_id)s AND created_at = %(created_at)s
    RETURNING {COLUMNS}
), kept AS (
    INSERT INTO assistant_version (assistant_id, {CONTENT}, version, created_at)
    SELECT assistant_id, {CONTENT}, version, updated_at FROM changed
)
SELECT {COLUMNS} FROM changed
"""
# `config.configurable` and `context` are two names for the same options. A new config without `configurable` keeps the
# current options.
_OPTIONS = "coalesce(%(context)s::jsonb, context)"
REPLACE_CONFIG = CHANGE.format(
    config=f"""%(config)s::jsonb || CASE WHEN {_OPTIONS} = '{{}}' THEN '{{}}'
                                         ELSE jsonb_build_object('configurable', {_OPTIONS}) END"""
)
KEEP_CONFIG = CHANGE.format(
    config=f"""CASE WHEN %(context)s::jsonb IS NULL THEN config WHEN {_OPTIONS} = '{{}}' THEN config - 'configurable'
                    ELSE config || jsonb_build_object('configurable', {_OPTIONS}) END"""
)

SET_LATEST = f"""
UPDATE assistant SET
    graph_id = kept.graph_id, name = kept.name, description = kept.description, config = kept.config,
    context = kept.context, metadata = kept.metadata, version = kept.version, updated_at = clock_timestamp()
FROM assistant_version kept
WHERE assistant.assistant_id = %(assistant_id)s AND assistant.created_at = %(created_at)s
  AND kept.assistant_id = assistant.assistant_id AND kept.version = %(version)s
RETURNING {", ".join(f"assistant.{column}" for column in COLUMNS.split(", "))}
"""

VERSIONS = f"""
SELECT {VERSION_COLUMNS} FROM assistant_version
WHERE assistant_id = %(assistant_id)s AND metadata @> %(metadata)s::jsonb
ORDER BY version DESC LIMIT %(limit)s OFFSET %(offset)s
"""

DELETE = """
DELETE FROM assistant WHERE assistant_id = %(assistant_id)s AND created_at = %(created_at)s RETURNING assistant_id
"""

# Another tenant can reuse the id of a deleted assistant. So the assistant's id does not identify the owner of a thread.
THREADS = """
SELECT thread_id FROM thread
WHERE metadata @> jsonb_build_object('assistant_id', %(assistant_id)s::uuid::text) AND hidden_at IS NULL AND {visible}
ORDER BY thread_id
"""


async def ensure_system_assistants(database: Database, catalog: GraphCatalog) -> None:
    """Create the system assistant of each graph of the project. Several processes may do this at the same time. The
    assistant of a removed graph stays, so that its runs' references to it remain valid."""
    async with database.connection() as connection:
        await _ensure_system(connection, catalog)


async def _ensure_system(connection: AsyncConnection[DictRow], catalog: GraphCatalog) -> None:
    graph_ids = catalog.graph_ids
    await connection.execute(
        ENSURE_SYSTEM,
        {
            "assistant_ids": [assistant_id(graph_id) for graph_id in graph_ids],
            "graph_ids": list(graph_ids),
            "names": [catalog.name(graph_id) for graph_id in graph_ids],
            "descriptions": [catalog.targets[graph_id].description for graph_id in graph_ids],
        },
    )


async def resolve_assistant_row(connection: AsyncConnection[DictRow], catalog: GraphCatalog, assistant: str) -> DictRow:
    """The assistant that a UUID or a graph's name means.

    Raises NotFound for a UUID without an assistant, InvalidRequest for a name that is neither a UUID nor a graph of the
    project, and Conflict when the id of the graph's system assistant belongs to an assistant of another graph.
    """
    own = assistant in catalog.graph_ids
    try:
        identity = assistant_id(assistant) if own else UUID(assistant)
    except ValueError:
        known = ", ".join(catalog.graph_ids)
        raise InvalidRequest(f"Assistant '{assistant}' is neither a UUID nor one of: {known}.") from None
    row = await _one(connection, GET, {"assistant_id": identity})
    if row is None and own:
        # A process of an older deployment that does not have the graph may have allowed a client to delete it.
        await _ensure_system(connection, catalog)
        row = await _one(connection, GET, {"assistant_id": identity})
    if row is None:
        raise _missing(identity)
    if own and row["graph_id"] != assistant:
        # Otherwise a client that guessed the graph's name before the graph was deployed could make all its runs use the
        # client's assistant.
        raise Conflict(
            f"Assistant {identity} has the id of graph '{assistant}', but was created for graph '{row['graph_id']}'. "
            "Delete it by its id, and the graph gets an assistant of its own."
        )
    return row


async def create_assistant(
    connection: AsyncConnection[DictRow], identity: UUID, content: Mapping[str, Any], *, tenant_id: str = ""
) -> DictRow | None:
    """Create an assistant. None if one with this id exists."""
    return await _one(connection, CREATE, {"assistant_id": identity, "tenant_id": tenant_id, **_stored(content)})


async def get_assistant(connection: AsyncConnection[DictRow], identity: UUID) -> DictRow:
    """An assistant, or NotFound."""
    row = await _one(connection, GET, {"assistant_id": identity})
    if row is None:
        raise _missing(identity)
    return row


@dataclass(frozen=True, kw_only=True)
class AssistantFilters:
    """Conditions of a search for assistants. None: any value."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    graph_id: str | None = None
    name: str | None = None
    visible: Visibility = EVERYTHING

    def where(self) -> tuple[str, dict[str, Any]]:
        """The conditions that were given. With `OR … IS NULL` for the others, the planner would not use the indexes. No
        character of a name is a pattern."""
        conditions = ["true"]
        if self.metadata:
            conditions.append("metadata @> %(metadata)s::jsonb")
        if self.graph_id is not None:
            conditions.append("graph_id = %(graph_id)s")
        if self.name is not None:
            conditions.append("strpos(lower(name), lower(%(name)s)) > 0")
        parameters = {"metadata": self.metadata, "graph_id": self.graph_id, "name": self.name}
        condition, more = self.visible.condition(shared=True)
        return " AND ".join([*conditions, condition]), {**_stored(parameters), **more}


async def search_assistants(
    connection: AsyncConnection[DictRow],
    filters: AssistantFilters,
    *,
    sort_by: SortBy,
    ascending: bool,
    part: PageLimits,
) -> PageRows:
    """Assistants whose metadata contains `metadata` and whose name contains `name`, ignoring case."""
    return await search_rows(connection, SEARCH, filters, sort_by=sort_by, ascending=ascending, part=part, wide=WIDE)


async def count_assistants(connection: AsyncConnection[DictRow], filters: AssistantFilters) -> int:
    return await count_rows(connection, COUNT, filters)


async def change_assistant(
    connection: AsyncConnection[DictRow], assistant: DictRow, changes: Mapping[str, Any]
) -> DictRow:
    """Create a new version and make it the current one. Arguments that are None leave their fields unchanged; metadata
    is merged. Raises NotFound."""
    statement = KEEP_CONFIG if changes["config"] is None else REPLACE_CONFIG
    row = await _one(connection, statement, {**_exactly(assistant), **_stored(changes)})
    if row is None:
        raise _missing(assistant["assistant_id"])
    return row


async def list_versions(
    connection: AsyncConnection[DictRow], identity: UUID, *, metadata: Mapping[str, Any], part: PageLimits
) -> PageRows:
    """The versions of an assistant, newest first."""
    asked = _stored({"assistant_id": identity, "metadata": metadata})
    return await fetch_page(connection, VERSIONS, asked, part, WIDE)


async def set_latest(connection: AsyncConnection[DictRow], assistant: DictRow, version: int) -> DictRow:
    """Make an earlier version the current one, with all its fields. Raises NotFound."""
    row = await _one(connection, SET_LATEST, {**_exactly(assistant), "version": version})
    if row is None:
        raise NotFound("Version", f"{version} of assistant {assistant['assistant_id']}")
    return row


async def delete_assistant(connection: AsyncConnection[DictRow], assistant: DictRow) -> None:
    """Delete an assistant with its versions. Its runs and threads are not touched. Raises NotFound."""
    if await _one(connection, DELETE, _exactly(assistant)) is None:
        raise _missing(assistant["assistant_id"])


def _exactly(assistant: DictRow) -> dict[str, Any]:
    return {key: assistant[key] for key in ("assistant_id", "created_at")}


async def threads_of_assistant(connection: AsyncConnection[DictRow], identity: UUID, visible: Visibility) -> list[UUID]:
    """The visible threads that last ran this assistant."""
    statement, owner = only_visible(THREADS, visible)
    cursor = await connection.execute(statement, {**owner, "assistant_id": identity})
    return [row["thread_id"] for row in await cursor.fetchall()]


def _missing(identity: UUID) -> NotFound:
    return NotFound("Assistant", identity)


def _stored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a statement, with mappings converted to JSON."""
    return {key: orjson.dumps(value).decode() if isinstance(value, Mapping) else value for key, value in values.items()}


async def _one(connection: AsyncConnection[DictRow], statement: str, parameters: Mapping[str, Any]) -> DictRow | None:
    return await (await connection.execute(statement, parameters)).fetchone()
