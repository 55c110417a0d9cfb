"""The children of a run: creating one once for its key, and reading what became of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.db.connect import Database
from holdfast.db.pages import PageLimits, PageRows, fetch_page
from holdfast.db.visibility import Visibility, is_visible
from holdfast.engine.budget import share_budget
from holdfast.engine.create import create_thread
from holdfast.engine.new_run import CreatedRun, RunRequest
from holdfast.engine.submit import create_run_within, make_run
from holdfast.errors import Cancelled, ChildRefused, LeaseLost, NotFound
from holdfast.graphs.assistants import assistant_id
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.client_config import client_metadata
from holdfast.resources.assistants import resolve_assistant_row
from holdfast.streams.serialize import to_json

# The time to live, in minutes without activity, of a child's thread whose parent's thread is temporary. Not shorter,
# because the child may wait for a resume.
ORPHAN_TTL = (1440.0, "delete")

# Serialises what concerns the parent: spawning the same key twice, its own end, the ends of its children.
LOCK_PARENT = """
SELECT run.status, run.fence, run.cancel_action, run.children, run.depth, run.priority, run.thread_id, run.pots,
       thread.metadata, thread.tenant_id, thread.temporary, thread.ttl_minutes, thread.ttl_strategy
FROM run JOIN thread USING (thread_id) WHERE run.run_id = %(run_id)s FOR NO KEY UPDATE OF run
"""

FIND = "SELECT key, run_id, thread_id, digest FROM child WHERE parent_run_id = %(run_id)s AND key = %(key)s"

# Executed before the run is inserted: the run takes both columns from its thread, and so do later runs of the thread,
# which resume it.
ADOPT_THREAD = "UPDATE thread SET parent_run_id = %(run_id)s, depth = %(depth)s WHERE thread_id = %(thread_id)s"

INSERT = """
INSERT INTO child (parent_run_id, key, run_id, thread_id, assistant_id, graph_id, digest)
VALUES (%(parent_run_id)s, %(key)s, %(run_id)s, %(thread_id)s, %(assistant_id)s, %(graph_id)s, %(digest)s)
"""

COUNT = "UPDATE run SET children = children + 1 WHERE run_id = %(run_id)s"

READ = """
SELECT key, run_id, thread_id, status, error, "values" FROM child
WHERE parent_run_id = %(run_id)s AND key = ANY(%(keys)s)
"""

# A child whose thread waits for a resume is `paused`. While another run of the thread is executing it is `running`.
LIST = """
SELECT child.key, child.run_id, child.thread_id, child.assistant_id, child.graph_id, child.awaited > 0 AS awaited,
       child.error, child.created_at, child.ended_at, coalesce(run.children, 0) AS children,
       coalesce(child.status,
                CASE WHEN thread.thread_id IS NULL THEN 'deleted'
                     WHEN run.finished_at IS NULL AND run.status IS NOT NULL THEN run.status
                     WHEN thread.status = 'busy' THEN 'running'
                     ELSE 'paused' END) AS status
FROM child
LEFT JOIN run ON run.run_id = child.run_id
LEFT JOIN thread ON thread.thread_id = child.thread_id
WHERE child.parent_run_id = %(run_id)s
ORDER BY child.created_at, child.key LIMIT %(limit)s OFFSET %(offset)s
"""


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The run that spawns, with its fence, and with its own budget if it has one."""

    run_id: UUID
    fence: int
    budget: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ChildRequest:
    """A child that graph code asks for. `kwargs`: of its run, without what its assistant adds."""

    assistant: str
    key: str
    kwargs: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    # None: the parent's priority.
    priority: int | None = None
    after_seconds: float = 0.0


@dataclass(frozen=True)
class SpawnedChild:
    """`created` is None when the child existed already."""

    key: str
    run_id: UUID
    thread_id: UUID
    created: CreatedRun | None = None


async def spawn_child(database: Database, catalog: GraphCatalog, parent: Parent, request: ChildRequest) -> SpawnedChild:
    """Create the child of a run under a key, or return the one that exists.

    Raises LeaseLost if the parent's fence is stale, Cancelled if the parent must stop, ChildRefused if the key belongs
    to another request or there would be too many children, NotFound and InvalidRequest for an assistant that does not
    exist. Nothing has changed then.
    """
    settings = database.settings
    digest = _digest(catalog, request)
    async with database.transaction() as connection:
        async with connection.pipeline():
            locked = await connection.execute(LOCK_PARENT, {"run_id": parent.run_id})
            found = await connection.execute(FIND, {"run_id": parent.run_id, "key": request.key})
            row, known = await locked.fetchone(), await found.fetchone()
        if row is None or row["status"] != "running" or row["fence"] != parent.fence:
            raise LeaseLost(f"run {parent.run_id} is no longer held")
        if known is not None:
            if known["digest"] != digest:
                raise ChildRefused(
                    f"Child '{request.key}' of this run was spawned with another assistant or input. A node runs again "
                    "from its start after a wait or a crash: give every child a key of its own, and have its input "
                    "be the same each time, by computing it in an earlier node."
                )
            return SpawnedChild(known["key"], known["run_id"], known["thread_id"])
        if row["cancel_action"] is not None:
            raise Cancelled(row["cancel_action"])
        _check_limits(row, settings.max_child_depth, settings.max_children)
        assistant = await resolve_assistant_row(connection, catalog, request.assistant)
        whose = Visibility(tenant=row["tenant_id"] or None)
        if not await is_visible(connection, "assistant", assistant["assistant_id"], whose):
            raise NotFound("Assistant", request.assistant)
        if assistant["graph_id"] not in catalog.graph_ids:
            raise ChildRefused(
                f"Assistant {request.assistant} is for graph '{assistant['graph_id']}', "
                "which this worker does not have."
            )
        new = make_run(_run_request(parent, row, request), assistant)
        await create_thread(connection, new.thread)
        await connection.execute(
            ADOPT_THREAD, {"run_id": parent.run_id, "depth": row["depth"] + 1, "thread_id": new.thread_id}
        )
        created = await create_run_within(connection, new)
        await connection.execute(
            INSERT,
            {
                "parent_run_id": parent.run_id,
                "key": request.key,
                "run_id": new.run_id,
                "thread_id": new.thread_id,
                "assistant_id": new.assistant_id,
                "graph_id": new.graph_id,
                "digest": digest,
            },
        )
        await connection.execute(COUNT, {"run_id": parent.run_id})
        await share_budget(connection, parent.run_id, row["pots"], parent.budget, new.run_id)
    return SpawnedChild(request.key, new.run_id, new.thread_id, created)


async def read_children(connection: AsyncConnection[DictRow], run_id: UUID, keys: Sequence[str]) -> dict[str, DictRow]:
    """The existing children with these keys. `status` is None until a child has ended."""
    cursor = await connection.execute(READ, {"run_id": run_id, "keys": list(keys)})
    return {row["key"]: row for row in await cursor.fetchall()}


async def list_children(connection: AsyncConnection[DictRow], run_id: UUID, part: PageLimits) -> PageRows:
    """The children of a run, oldest first."""
    return await fetch_page(connection, LIST, {"run_id": run_id}, part, ["key", "error"])


def _digest(catalog: GraphCatalog, request: ChildRequest) -> str:
    """A digest of the request that a key belongs to. A graph's name and the id of its own assistant are the same."""
    own = request.assistant in catalog.graph_ids
    identity = str(assistant_id(request.assistant)) if own else request.assistant.lower()
    content = [identity, json.loads(to_json(request.kwargs["input"]))]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_limits(parent: DictRow, deepest: int, most: int) -> None:
    if parent["depth"] >= deepest:
        raise ChildRefused(
            f"This run is {parent['depth']} generations below the first, and HOLDFAST_MAX_CHILD_DEPTH is {deepest}: "
            "it may not have children."
        )
    if parent["children"] >= most:
        raise ChildRefused(
            f"This run may have no more children: it has {parent['children']}, and HOLDFAST_MAX_CHILDREN is {most}. "
            "Give each more to do, or let children have children."
        )


def _run_request(parent: Parent, row: DictRow, request: ChildRequest) -> RunRequest:
    """The child's run, on a thread of its own. That has the metadata of the parent's thread, so that the same users see
    both."""
    metadata = client_metadata(request.metadata)
    ttl = None if row["ttl_minutes"] is None else (row["ttl_minutes"], row["ttl_strategy"])
    return RunRequest(
        by="parent",
        kwargs=request.kwargs,
        metadata=metadata,
        after_seconds=request.after_seconds,
        priority=row["priority"] if request.priority is None else request.priority,
        thread_id=uuid7(),
        thread_metadata={
            **metadata,
            **row["metadata"],
            "parent_run_id": str(parent.run_id),
            "parent_thread_id": str(row["thread_id"]),
        },
        thread_ttl=ORPHAN_TTL if row["temporary"] else ttl,
        tenant_id=row["tenant_id"],
    )
