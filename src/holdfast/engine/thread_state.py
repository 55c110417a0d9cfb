"""The state of threads: reading it from checkpoints, and updating it while no run is unfinished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from uuid import UUID

import psycopg
import structlog
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.pregel import Pregel
from langgraph.pregel.protocol import PregelProtocol
from langgraph.types import Interrupt, StateSnapshot, StateUpdate
from langgraph_sdk.runtime import AccessContext
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.visibility import EVERYTHING, Visibility, only_visible
from holdfast.engine.interrupts.rows import close_missing
from holdfast.engine.threads import ThreadSummary, get_thread_summary
from holdfast.errors import BadRequest, Conflict, NotFound, RequestError
from holdfast.graphs.catalog import Graph, GraphCatalog, built_for_client
from holdfast.graphs.exits import GraphCode
from holdfast.resources.checkpoints import PooledSaver, TransactionSaver
from holdfast.resources.run_configs import config_of
from holdfast.streams.serialize import to_json, to_jsonb
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS, describe, type_and_place

log = structlog.get_logger(__name__)

# Every run of the thread is created under this lock. A transaction that holds it, and in a later statement sees no
# unfinished run, has the thread's checkpoints for itself until it ends.
LOCK_THREAD = """
SELECT metadata ->> 'graph_id' AS graph_id FROM thread
WHERE thread_id = %(thread_id)s AND hidden_at IS NULL AND {visible} FOR NO KEY UPDATE
"""

UNFINISHED = """
SELECT run_id FROM run WHERE thread_id = %(thread_id)s AND status IN ('pending', 'running')
ORDER BY created_at, run_id LIMIT 1
"""

# Like the end of a run. An update of the state also clears the error of the thread.
SET_STATE = """
UPDATE thread SET status = %(status)s, resting_status = %(status)s, "values" = %(values)s::jsonb,
                  interrupts = %(interrupts)s::jsonb, error = NULL, has_state = true,
                  updated_at = now(), state_updated_at = now()
WHERE thread_id = %(thread_id)s
"""

PATCH_LAST_CHECKPOINT = """
UPDATE checkpoints SET metadata = metadata || %(metadata)s::jsonb
WHERE thread_id = %(thread_id)s::uuid::text AND checkpoint_ns = '' AND checkpoint_id = (
    SELECT checkpoint_id FROM checkpoints WHERE thread_id = %(thread_id)s::uuid::text AND checkpoint_ns = ''
    ORDER BY checkpoint_id DESC LIMIT 1)
"""

# Metadata that LangGraph and Holdfast rely on. Clients cannot change it.
FIXED_METADATA = frozenset({"source", "step", "parents", "graph_id"})

STORAGE = """
SELECT (SELECT coalesce(sum(pg_column_size(c.*)), 0)::bigint FROM checkpoints c
        WHERE c.thread_id = %(thread_id)s::uuid::text) AS checkpoints,
       (SELECT coalesce(sum(pg_column_size(b.*)), 0)::bigint FROM checkpoint_blobs b
        WHERE b.thread_id = %(thread_id)s::uuid::text) AS channel_values,
       (SELECT coalesce(sum(pg_column_size(w.*)), 0)::bigint FROM checkpoint_writes w
        WHERE w.thread_id = %(thread_id)s::uuid::text) AS pending_writes
"""

Checkpoint = Mapping[str, Any]
"""The keys `checkpoint_ns`, `checkpoint_id` and `checkpoint_map`, each optional."""

# The share of a lease that graph code may take to apply an update. The server ends a transaction that is idle for a
# whole lease.
UPDATE_TIMEOUT_LEASES = 0.5


@dataclass(frozen=True)
class OpenedGraph:
    """The graph of a thread, opened to read or update the thread's state."""

    thread_id: UUID
    graph_id: str
    graph: Graph
    saver: PooledSaver
    metadata: dict[str, Any]
    """The metadata of checkpoints that are written through it."""

    def subgraph(self, namespace: str) -> PregelProtocol[Any, Any, Any, Any]:
        """The subgraph of a checkpoint namespace. Raises NotFound."""
        if not namespace:
            return self.graph
        path = "|".join(part.split(":")[0] for part in namespace.split("|") if not part.isdigit())
        for _, found in self.graph.get_subgraphs(namespace=path, recurse=True):
            return found
        raise NotFound("Subgraph", f"'{path}' of graph '{self.graph_id}'")

    def config(self, checkpoint: Checkpoint) -> RunnableConfig:
        return {"configurable": _configurable(self.thread_id, checkpoint)}


async def read_state(
    database: Database, catalog: GraphCatalog, thread_id: UUID, checkpoint: Checkpoint, *, subgraphs: bool
) -> StateSnapshot:
    """A thread's state, now or at a checkpoint.

    Empty if no graph has run in the thread, or if the checkpoint does not exist. Raises NotFound for a thread, graph or
    subgraph that does not exist.
    """
    async with open_graph(database, catalog, thread_id, "threads.read", checkpoint) as opened:
        if opened is None:
            return _empty(thread_id, checkpoint)
        opened.subgraph(checkpoint.get("checkpoint_ns") or "")
        config = opened.config(checkpoint)
        try:
            with GraphCode():
                return await opened.graph.aget_state(config, subgraphs=subgraphs)
        except GRAPH_CODE_EXCEPTIONS as error:
            if _is_ours(error):
                raise
            _log_unreadable(opened, error)
            with _answering_unreadable(thread_id):
                saved = await opened.saver.aget_tuple(config)
                return _empty(thread_id, checkpoint) if saved is None else _as_stored(opened, saved)


async def read_history(
    database: Database,
    catalog: GraphCatalog,
    thread_id: UUID,
    *,
    namespace: str,
    before: str | None,
    metadata: Mapping[str, Any],
    limit: int,
) -> tuple[list[StateSnapshot], bool]:
    """A thread's states, newest first, and whether there are more.

    Only states with checkpoint ids below `before` and whose metadata contains `metadata`; at most `limit`, and no more
    bytes than a page may have.
    """
    earlier: RunnableConfig | None = None if before is None else {"configurable": {"checkpoint_id": before}}
    asked: dict[str, Any] = {"filter": dict(metadata) or None, "before": earlier, "limit": limit}
    async with database.connection() as connection:
        thread = await get_thread_summary(connection, thread_id)
    if thread.graph_id is None:
        return [], False
    saver = PooledSaver(database)
    config: RunnableConfig = {"configurable": _configurable(thread_id, {"checkpoint_ns": namespace})}
    max_bytes = database.settings.max_page_bytes
    if not catalog.is_factory(thread.graph_id):
        async with _opened(database, catalog, thread_id, thread, "threads.read", {}) as opened:
            opened.subgraph(namespace)
            asked["limit"], more = await saver.fitting(config, **asked, max_bytes=max_bytes)
            return (await _states(opened, config, asked) if asked["limit"] else []), more
    asked["limit"], more = await saver.fitting(config, **asked, max_bytes=max_bytes)
    written = await saver.runs_of(config, **asked)
    states: list[StateSnapshot] = []
    for given, number in await _by_config(database, thread_id, thread, namespace, written):
        async with _opened(database, catalog, thread_id, thread, "threads.read", given) as opened:
            opened.subgraph(namespace)
            states += await _states(opened, config, {**asked, "limit": number})
        if states:
            asked["before"] = states[-1].config
    return states, more


async def _by_config(
    database: Database,
    thread_id: UUID,
    thread: ThreadSummary,
    namespace: str,
    written: Iterable[tuple[str, str | None]],
) -> list[tuple[dict[str, Any], int]]:
    """For a graph made by a factory: the configs of the runs that wrote the states, in order, each with the number of
    consecutive states it is for. The factory may build another graph for each config."""
    parts: list[tuple[dict[str, Any], int]] = []
    async with database.connection() as connection:
        for _, of_run in groupby(written, key=lambda one: one[1]):
            ids = [checkpoint_id for checkpoint_id, _ in of_run]
            place = {"checkpoint_ns": namespace, "checkpoint_id": ids[0]}
            given, number = await config_of(connection, thread_id, thread.assistant_id, place), len(ids)
            if parts and parts[-1][0] == given:
                number += parts.pop()[1]
            parts.append((given, number))
    return parts


async def _states(opened: OpenedGraph, config: RunnableConfig, asked: dict[str, Any]) -> list[StateSnapshot]:
    try:
        with GraphCode():
            return [state async for state in opened.graph.aget_state_history(config, **asked)]
    except GRAPH_CODE_EXCEPTIONS as error:
        if _is_ours(error):
            raise
        _log_unreadable(opened, error)
        with _answering_unreadable(opened.thread_id):
            found = [saved async for saved in opened.saver.alist(config, **asked)]
            return [await _state_at(opened, saved) for saved in found]


async def update_state(
    database: Database,
    catalog: GraphCatalog,
    thread_id: UUID,
    supersteps: Sequence[Sequence[StateUpdate]],
    checkpoint: Checkpoint,
    visible: Visibility = EVERYTHING,
) -> dict[str, Any]:
    """Apply updates to a thread's state, at its last or an earlier checkpoint, and return the resulting checkpoint.

    All updates are applied or none. The thread's status, values and interrupts change in the same transaction.

    Raises NotFound for a thread that is not visible and a checkpoint that does not exist, Conflict while the thread has
    an unfinished run, BadRequest if the thread has no graph or its graph refuses the update.
    """
    async with open_graph(database, catalog, thread_id, "threads.update", checkpoint, visible) as opened:
        if opened is None:
            raise BadRequest(
                f"Thread {thread_id} has no graph. Run one in it, or name one in its metadata as graph_id, before "
                "updating its state."
            )
        opened.subgraph(checkpoint.get("checkpoint_ns") or "")
        async with database.transaction() as connection:
            graph_id = await _lock_idle(connection, thread_id, visible)
            if graph_id != opened.graph_id:
                raise Conflict(f"Thread {thread_id} changed to graph '{graph_id}' meanwhile. Try again.")
            opened.graph.checkpointer = TransactionSaver(database, connection).with_allowlist(catalog.checkpoint_types)
            try:
                async with asyncio.timeout(database.settings.lease * UPDATE_TIMEOUT_LEASES):
                    with GraphCode():
                        reached = await _apply(opened, supersteps, checkpoint)
                        state = await opened.graph.aget_state(opened.config({}))
            except GRAPH_CODE_EXCEPTIONS as error:
                # If the transaction has failed, one of our statements did: graph code does not use this connection.
                refused = connection.info.transaction_status is not TransactionStatus.INTRANS
                if _is_ours(error) or (refused and isinstance(error, psycopg.Error)):
                    raise
                raise BadRequest(f"Graph '{opened.graph_id}' does not take the update: {_said(error)}") from error
            await connection.execute(
                SET_STATE,
                {
                    "thread_id": thread_id,
                    "status": "interrupted" if state.next else "idle",
                    "values": to_jsonb(to_json(state.values)),
                    "interrupts": to_jsonb(to_json(_interrupts(state))),
                },
            )
            await close_missing(connection, thread_id)
    return reached


async def patch_metadata(database: Database, thread_id: UUID, metadata: Mapping[str, Any], visible: Visibility) -> None:
    """Merge metadata into that of a thread's last checkpoint.

    Raises NotFound, Conflict while the thread has an unfinished run, BadRequest if it has no checkpoint.
    """
    noted = {key: value for key, value in metadata.items() if key not in FIXED_METADATA}
    async with database.transaction() as connection:
        await _lock_idle(connection, thread_id, visible)
        patched = await connection.execute(
            PATCH_LAST_CHECKPOINT, {"thread_id": thread_id, "metadata": to_jsonb(to_json(noted))}
        )
    if not patched.rowcount:
        raise BadRequest(f"Thread {thread_id} has no state yet. Run a graph in it before patching the metadata.")


async def storage_of(connection: AsyncConnection[DictRow], thread_id: UUID, visible: Visibility) -> dict[str, Any]:
    """How many bytes a thread's history takes, by kind. Raises NotFound."""
    await get_thread_summary(connection, thread_id, visible)
    row = await (await connection.execute(STORAGE, {"thread_id": thread_id})).fetchone()
    assert row is not None
    return {"thread_id": str(thread_id), "total_bytes": sum(row.values()), **row}


@asynccontextmanager
async def open_graph(
    database: Database,
    catalog: GraphCatalog,
    thread_id: UUID,
    access_context: AccessContext,
    checkpoint: Checkpoint,
    visible: Visibility = EVERYTHING,
) -> AsyncIterator[OpenedGraph | None]:
    """Open the graph of a thread, built with the config of the run that wrote the checkpoint. None: it has no graph.

    Raises NotFound if there is no such thread, or no such graph on this server, and InvalidRequest if the graph cannot
    be built.
    """
    async with database.connection() as connection:
        thread = await get_thread_summary(connection, thread_id, visible)
        given = {}
        # Only a factory reads the config.
        if thread.graph_id is not None and catalog.is_factory(thread.graph_id):
            given = await config_of(connection, thread_id, thread.assistant_id, checkpoint)
    if thread.graph_id is None:
        yield None
        return
    async with _opened(database, catalog, thread_id, thread, access_context, given) as opened:
        yield opened


@asynccontextmanager
async def _opened(
    database: Database,
    catalog: GraphCatalog,
    thread_id: UUID,
    thread: ThreadSummary,
    access_context: AccessContext,
    given: Mapping[str, Any],
) -> AsyncIterator[OpenedGraph]:
    assert thread.graph_id is not None
    named = {"graph_id": thread.graph_id, "assistant_id": thread.assistant_id}
    stamp = {key: value for key, value in named.items() if value is not None}
    configurable = {**stamp, **given.get("configurable", {}), "graph_id": thread.graph_id, "thread_id": str(thread_id)}
    saver = PooledSaver(database)
    opening = catalog.open(
        thread.graph_id,
        config={**given, "configurable": configurable},  # type: ignore[typeddict-item]
        access_context=access_context,
        checkpointer=saver,
    )
    async with built_for_client(opening, thread.graph_id, f"thread {thread_id}") as graph:
        yield OpenedGraph(thread_id, thread.graph_id, graph, saver, stamp)


async def _lock_idle(connection: AsyncConnection[DictRow], thread_id: UUID, visible: Visibility) -> str | None:
    """Lock a thread without unfinished runs, and return its graph id."""
    statement, owner = only_visible(LOCK_THREAD, visible)
    parameters = {"thread_id": thread_id}
    thread = await (await connection.execute(statement, {**owner, **parameters})).fetchone()
    if thread is None:
        raise NotFound("Thread", thread_id)
    unfinished = await (await connection.execute(UNFINISHED, parameters)).fetchone()
    if unfinished is not None:
        raise Conflict(
            f"Run {unfinished['run_id']} of thread {thread_id} is not finished. Wait for it or cancel it before "
            "updating the state."
        )
    graph_id: str | None = thread["graph_id"]
    return graph_id


async def _apply(
    opened: OpenedGraph, supersteps: Sequence[Sequence[StateUpdate]], checkpoint: Checkpoint
) -> dict[str, Any]:
    config = opened.config(checkpoint)
    # Otherwise LangGraph would start from an empty state and make it the thread's latest.
    if checkpoint.get("checkpoint_id") and (await opened.graph.aget_state(config)).created_at is None:
        raise NotFound("Checkpoint", f"{checkpoint['checkpoint_id']} of thread {opened.thread_id}")
    reached = await opened.graph.abulk_update_state({**config, "metadata": opened.metadata}, supersteps)
    return checkpoint_of(reached) or {}


def _configurable(thread_id: UUID, checkpoint: Checkpoint) -> dict[str, Any]:
    given = {key: checkpoint[key] for key in ("checkpoint_id", "checkpoint_map") if checkpoint.get(key)}
    return {"thread_id": str(thread_id), "checkpoint_ns": checkpoint.get("checkpoint_ns") or "", **given}


def _empty(thread_id: UUID, checkpoint: Checkpoint) -> StateSnapshot:
    config: RunnableConfig = {"configurable": _configurable(thread_id, checkpoint)}
    return StateSnapshot({}, (), config, None, None, None, (), ())


async def _state_at(opened: OpenedGraph, saved: CheckpointTuple) -> StateSnapshot:
    try:
        with GraphCode():
            return await opened.graph.aget_state(saved.config)
    except GRAPH_CODE_EXCEPTIONS as error:
        if _is_ours(error):
            raise
        return _as_stored(opened, saved)


def _as_stored(opened: OpenedGraph, saved: CheckpointTuple) -> StateSnapshot:
    """The stored values of a checkpoint that the graph cannot interpret, because it refuses its input or has changed
    since. One such checkpoint must not hide the thread."""
    graph = opened.subgraph(saved.config["configurable"].get("checkpoint_ns") or "")
    stored = saved.checkpoint["channel_values"]
    shown = graph.stream_channels_list if isinstance(graph, Pregel) else list(stored)
    values = {channel: stored[channel] for channel in shown if channel in stored}
    return StateSnapshot(values, (), saved.config, saved.metadata, saved.checkpoint["ts"], saved.parent_config, (), ())


@contextmanager
def _answering_unreadable(thread_id: UUID) -> Iterator[None]:
    """Raise Conflict for checkpoints that LangGraph cannot read, for example those of a later version."""
    try:
        with GraphCode():
            yield
    except (psycopg.Error, RequestError):
        # Raised by our own statements.
        raise
    except GRAPH_CODE_EXCEPTIONS as error:
        raise Conflict(
            f"The state of thread {thread_id} cannot be read: its checkpoints are not of the form that this version of "
            f"LangGraph stores ({type(error).__name__})."
        ) from error


def _is_ours(error: BaseException) -> bool:
    """Whether the error is a refusal of Holdfast or an outage of the database, and not the fault of the graph. Graph
    code may raise other errors of psycopg and Holdfast."""
    return isinstance(error, RequestError) or (isinstance(error, psycopg.Error) and is_outage(error))


def _log_unreadable(opened: OpenedGraph, error: BaseException) -> None:
    about = {"thread_id": str(opened.thread_id), "graph_id": opened.graph_id}
    log.warning("state.unreadable", **about, error=type_and_place(error))


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    return describe(error)


def _interrupts(state: StateSnapshot) -> dict[str, list[dict[str, Any]]]:
    return {task.id: present_interrupts(task.interrupts) for task in state.tasks if task.interrupts}


def present_interrupts(interrupts: Sequence[Interrupt[Any]]) -> list[dict[str, Any]]:
    """Interrupts as clients see them."""
    return [
        {"id": one.id, "value": one.value}
        | ({} if one.response_schema is None else {"response_schema": one.response_schema})
        for one in interrupts
        if isinstance(one, Interrupt)
    ]


def checkpoint_of(config: RunnableConfig | None) -> dict[str, Any] | None:
    """The checkpoint that a config names, as clients see it."""
    if config is None:
        return None
    configurable = config["configurable"]
    shown = {key: configurable.get(key) for key in ("thread_id", "checkpoint_ns", "checkpoint_id")}
    if configurable.get("checkpoint_map"):
        shown["checkpoint_map"] = configurable["checkpoint_map"]
    return shown
