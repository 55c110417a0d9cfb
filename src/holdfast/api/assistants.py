"""/assistants

A path may contain the name of a graph in place of an assistant's UUID. The name means the graph's system assistant.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Literal, TypeVar, cast
from uuid import UUID, uuid4

import structlog
from fastapi import Body, Query
from langchain_core.runnables import RunnableConfig
from langgraph.channels.base import BaseChannel
from langgraph.graph import StateGraph
from langgraph.pregel.protocol import PregelProtocol
from psycopg.rows import DictRow
from pydantic import Field, TypeAdapter, create_model
from starlette.responses import Response

from holdfast.api.bodies import Contained, NullsAreAbsent, RunConfig, Selected, Whole
from holdfast.api.bulk import process_each
from holdfast.api.context import Web, WebContext
from holdfast.api.errors import Json
from holdfast.api.listing import Page, Search, clean_configurable, clean_metadata, only, page
from holdfast.api.response_models import (
    Assistant,
    AssistantSchemas,
    AssistantVersion,
    Drawing,
    GraphSchemas,
    SelectedAssistant,
    answers,
    pages,
    refusals,
)
from holdfast.api.routes import Routes
from holdfast.db.visibility import ALL_TENANTS, Visibility, is_visible
from holdfast.engine.runs import unfinished_by_thread
from holdfast.engine.threads import present
from holdfast.errors import BadRequest, Conflict, Denied, InvalidRequest, NotFound
from holdfast.graphs import assistants as system
from holdfast.graphs.catalog import Graph, GraphCatalog, built_for_client
from holdfast.graphs.client_config import client_config, client_options
from holdfast.graphs.exits import GraphCode
from holdfast.resources.assistants import (
    AssistantFilters,
    SortBy,
    change_assistant,
    count_assistants,
    create_assistant,
    delete_assistant,
    get_assistant,
    list_versions,
    resolve_assistant_row,
    search_assistants,
    set_latest,
    threads_of_assistant,
)
from holdfast.resources.known_assistants import LargeAssistant
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS, describe, type_and_place

log = structlog.get_logger(__name__)
routes = Routes(tags=["assistants"])

Column = Literal[
    "assistant_id",
    "graph_id",
    "name",
    "description",
    "config",
    "context",
    "metadata",
    "version",
    "created_at",
    "updated_at",
]
Answer = TypeVar("Answer")
# A number is the depth of subgraphs to expand; true expands all of them.
Xray = Annotated[Annotated[int, Field(ge=0, le=1000)] | bool, Query(union_mode="left_to_right")]


class AssistantCreate(NullsAreAbsent):
    graph_id: str
    assistant_id: UUID | None = None
    config: RunConfig | None = None
    context: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    if_exists: Literal["raise", "do_nothing"] = "raise"
    name: str = "Untitled"
    description: str | None = None


class AssistantPatch(NullsAreAbsent):
    graph_id: str | None = None
    config: RunConfig | None = None
    context: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    name: str | None = None
    description: str | None = None


class AssistantCount(NullsAreAbsent):
    metadata: Contained = Field(default_factory=dict)
    graph_id: str | None = None
    name: str | None = None


class AssistantSearch(Search):
    graph_id: str | None = None
    name: str | None = Field(default=None, description="Part of the name, in any case.")
    sort_by: SortBy = "created_at"
    select: Selected[Column] | None = None


class Versions(Page):
    metadata: Contained = Field(default_factory=dict)


class Latest(NullsAreAbsent):
    version: Whole = Field(ge=0, le=2**31 - 1)


@routes.post("/assistants", summary="Create an assistant", responses=answers(Assistant, 400, 404, 409))
async def create(web: Web, body: AssistantCreate) -> Response:
    _known_graph(web.catalog, body.graph_id)
    config, context = _mirrored(body.config, body.context)
    content = {
        "graph_id": body.graph_id,
        "name": body.name,
        "description": body.description,
        "config": {**(config or {}), **({"configurable": context} if context else {})},
        "context": context or {},
        "metadata": clean_metadata(body.metadata),
    }
    keep = body.if_exists == "do_nothing"
    identity = body.assistant_id or uuid4()
    asked: dict[str, Any] = {"assistant_id": identity, "if_exists": body.if_exists, **content}
    if web.caller.tenant is not None and identity.version == 5:
        # A client that created an assistant under the id of a later graph's system assistant would determine the runs
        # of that graph for all tenants.
        raise InvalidRequest("assistant_id: UUIDs of version 5 are kept for the graphs' own assistants.")
    visible = await web.caller.may("assistants", "create", asked)
    content = {key: asked[key] for key in content}
    owner = web.caller.tenant or ""
    async with web.database.connection() as connection:
        row = await create_assistant(connection, identity, content, tenant_id=owner)
    if row is None:
        if not keep:
            raise Conflict(f"Assistant {identity} exists already; if_exists 'do_nothing' returns it instead.")
        shown = await web.may_show_existing("assistants", {"assistant_id": identity, "metadata": {}})
        async with web.database.connection() as connection:
            for seen in (visible, shown):
                if not await is_visible(connection, "assistant", identity, seen):
                    raise Conflict(f"Assistant {identity} exists already.")
            row = await get_assistant(connection, identity)
    row.pop("tenant_id", None)
    return Json(present(row))


@routes.post("/assistants/search", summary="Search assistants", responses=pages(list[SelectedAssistant]))
async def search(web: Web, body: Annotated[AssistantSearch | None, Body()] = None) -> Response:
    body = body or AssistantSearch()
    filters = await _visible(web, body)
    async with web.database.connection() as connection:
        rows = await search_assistants(
            connection,
            filters,
            sort_by=body.sort_by,
            ascending=body.sort_order == "asc",
            part=body.within(web.settings),
        )
    found, headers = page(rows, body)
    return Json([only(present(row), body.select) for row in found], headers=headers)


@routes.post("/assistants/count", summary="Count assistants", responses=answers(int))
async def count(web: Web, body: Annotated[AssistantCount | None, Body()] = None) -> Response:
    filters = await _visible(web, body or AssistantCount())
    async with web.database.connection() as connection:
        return Json(await count_assistants(connection, filters))


async def _visible(web: WebContext, asked: AssistantSearch | AssistantCount) -> AssistantFilters:
    """The conditions of a search, restricted to what the caller may see."""
    value: dict[str, Any] = asked.model_dump(include={"metadata", "graph_id", "limit", "offset"})
    visible = await web.caller.may("assistants", "search", value)
    return AssistantFilters(
        metadata=value["metadata"] or {}, graph_id=value["graph_id"], name=asked.name, visible=visible
    )


@routes.get("/assistants/{assistant_id}", summary="Get an assistant", responses=answers(Assistant, 404))
async def get(web: Web, assistant_id: str) -> Response:
    return Json(present(await _assistant(web, assistant_id)))


@routes.patch("/assistants/{assistant_id}", summary="Change an assistant", responses=answers(Assistant, 400, 404, 409))
async def patch(web: Web, assistant_id: str, body: AssistantPatch) -> Response:
    if body.graph_id is not None:
        _known_graph(web.catalog, body.graph_id)
    config, context = _mirrored(body.config, body.context)
    changes = {
        "graph_id": body.graph_id,
        "name": body.name,
        "description": body.description,
        "config": config or None,
        "context": context,
        "metadata": clean_metadata(body.metadata),
    }
    row = await _assistant(web, assistant_id, "update", changes)
    async with web.database.connection() as connection:
        if body.graph_id not in (None, row["graph_id"]) and _is_system(web.catalog, row):
            raise Conflict(f"This assistant stands for graph '{row['graph_id']}': create one for '{body.graph_id}'.")
        return Json(present(await change_assistant(connection, row, changes)))


@routes.delete(
    "/assistants/{assistant_id}", status_code=204, summary="Delete an assistant", responses=refusals(404, 409)
)
async def delete(web: Web, assistant_id: str, delete_threads: bool = False) -> Response:
    """Cancels the assistant's unfinished runs first, and deletes the threads that last ran it if that is asked for:
    those that the caller could cancel or delete one by one. A graph's own assistant stays while the project has the
    graph: runs that name the graph need it, and the next start would bring it back."""
    row = await _assistant(web, assistant_id, "delete")
    if _is_system(web.catalog, row):
        raise Conflict(f"This assistant stands for graph '{row['graph_id']}' and exists for as long as the graph does.")
    identity: UUID = row["assistant_id"]
    doomed = await web.caller.may("threads", "delete", {"thread_id": None}) if delete_threads else None
    # The assistant is deleted after the runs and threads found first, so that an interrupted request can be repeated.
    # Runs that were created in the meantime are cancelled after it.
    await _cancel_runs(web, identity)
    if doomed is not None:
        await _delete_threads(web, identity, doomed)
    async with web.database.connection() as connection:
        await delete_assistant(connection, row)
    await _cancel_runs(web, identity)
    return Response(status_code=204)


@routes.post(
    "/assistants/{assistant_id}/versions",
    summary="List an assistant's versions",
    responses=pages(list[AssistantVersion], 404),
)
async def versions(web: Web, assistant_id: str, body: Annotated[Versions | None, Body()] = None) -> Response:
    body = body or Versions()
    # Do not keep the row, which can be large, while this waits for the database.
    identity: UUID = (await _assistant(web, assistant_id))["assistant_id"]
    async with web.database.connection() as connection:
        rows = await list_versions(connection, identity, metadata=body.metadata, part=body.within(web.settings))
    found, headers = page(rows, body)
    return Json([present(row) for row in found], headers=headers)


@routes.post("/assistants/{assistant_id}/latest", summary="Return to a version", responses=answers(Assistant, 404))
async def latest(web: Web, assistant_id: str, body: Latest) -> Response:
    row = await _assistant(web, assistant_id, "update", {"version": body.version})
    async with web.database.connection() as connection:
        return Json(present(await set_latest(connection, row, body.version)))


@routes.get("/assistants/{assistant_id}/graph", summary="Draw the graph", responses=answers(Drawing, 404))
async def graph(web: Web, assistant_id: str, xray: Xray = False) -> Response:
    row = await _assistant(web, assistant_id)
    async with _opened(web, row) as opened:
        return Json(await _aside(row, lambda: opened.get_graph(_config(row), xray=xray).to_json()))


@routes.get(
    "/assistants/{assistant_id}/schemas", summary="The graph's schemas", responses=answers(AssistantSchemas, 404)
)
async def schemas(web: Web, assistant_id: str) -> Response:
    row = await _assistant(web, assistant_id)
    async with _opened(web, row) as opened:
        return Json({"graph_id": row["graph_id"], **await _aside(row, lambda: _schemas(opened))})


@routes.get(
    "/assistants/{assistant_id}/subgraphs",
    summary="The schemas of the subgraphs",
    responses=answers(dict[str, GraphSchemas], 404),
)
async def subgraphs(web: Web, assistant_id: str, recurse: bool = False) -> Response:
    return await _subgraphs(web, assistant_id, None, recurse)


@routes.get(
    "/assistants/{assistant_id}/subgraphs/{namespace:path}",
    summary="The schemas of one subgraph",
    responses=answers(dict[str, GraphSchemas], 404),
)
async def subgraphs_in(web: Web, assistant_id: str, namespace: str, recurse: bool = False) -> Response:
    return await _subgraphs(web, assistant_id, namespace, recurse)


async def _subgraphs(web: WebContext, assistant_id: str, namespace: str | None, recurse: bool) -> Response:
    row = await _assistant(web, assistant_id)
    async with _opened(web, row) as opened:

        def described() -> dict[str, Any]:
            # LangGraph's own filter compares prefixes, and misses `inner` when a node `in` comes before it.
            found = opened.get_subgraphs(recurse=recurse or namespace is not None)
            return {name: _schemas(one) for name, one in found if namespace in (None, name)}

        return Json(await _aside(row, described))


def _mirrored(config: RunConfig | None, context: dict[str, Any] | None) -> tuple[dict[str, Any] | None, Any]:
    """A config and its options. `config.configurable` and `context` are the older and the newer name of the same
    options: either sets both, and None means that neither was given."""
    given = None if config is None else config.model_dump(exclude_none=True)
    if given is None or "configurable" not in given:
        return given, None if context is None else clean_configurable(context)
    given["configurable"] = clean_configurable(given["configurable"])
    if not given["configurable"] and context:
        return given, clean_configurable(context)
    if context:
        raise BadRequest("Give either config.configurable or context, not both: context is the newer name.")
    return given, given["configurable"]


def _known_graph(catalog: GraphCatalog, graph_id: str) -> None:
    if graph_id not in catalog.graph_ids:
        raise NotFound("Graph", f"'{graph_id}'", hint=f"The project has: {', '.join(catalog.graph_ids)}.")


def _is_system(catalog: GraphCatalog, row: DictRow) -> bool:
    """Whether this is the system assistant of a graph of the project. The assistant of a removed graph is not. Neither
    is an assistant of another graph that a client created with the id of this graph's system assistant."""
    graph_id: str = row["graph_id"]
    return graph_id in catalog.graph_ids and row["assistant_id"] == system.assistant_id(graph_id)


async def _assistant(
    web: WebContext, assistant: str, action: str = "read", changes: dict[str, Any] | None = None
) -> DictRow:
    """The assistant that a path names, if the caller is authorized for the action. The project's handler may alter
    `changes`."""
    async with web.database.connection() as connection:
        row = await resolve_assistant_row(connection, web.catalog, assistant)
    shared = row.pop("tenant_id") == ALL_TENANTS
    asked: dict[str, Any] = {"assistant_id": row["assistant_id"], "metadata": {}, **(changes or {})}
    await web.require("assistant", row["assistant_id"], await web.caller.may("assistants", action, asked))
    if shared and action != "read" and web.caller.tenant is not None:
        raise Denied(403, "This assistant is the graph's own, and the same for all tenants: create one of your own.")
    if changes is not None:
        changes.update({key: asked[key] for key in changes})
    return row


async def runnable_assistant(web: WebContext, assistant: str, *, remembered: bool = False) -> DictRow:
    """The assistant of a new run. Every caller who may create runs may use a graph's system assistant; any other
    assistant must be readable for the caller. `remembered`: the assistant may come from the cache; raises
    LargeAssistant for one that is too large for the cache."""
    row = web.assistants.get(assistant) if remembered else None
    if row is None:
        async with web.database.connection() as connection:
            row = await resolve_assistant_row(connection, web.catalog, assistant)
        if not web.assistants.keep(assistant, row) and remembered:
            raise LargeAssistant
    if web.auth is not None and not _is_system(web.catalog, row):
        asked = {"assistant_id": row["assistant_id"], "metadata": {}}
        await web.require("assistant", row["assistant_id"], await web.caller.may("assistants", "read", asked))
    return row


async def _cancel_runs(web: WebContext, identity: UUID) -> None:
    """Cancel the assistant's unfinished runs that the caller may cancel. Other runs continue: a run has its own copy of
    its assistant's configuration."""
    try:
        visible = await web.caller.may("threads", "update", {"thread_id": None, "action": "interrupt"})
    except Denied:
        return
    async with web.database.connection() as connection:
        found = await unfinished_by_thread(connection, "all", visible, identity)
    allowed = await web.may_each(found, "update", visible, action="interrupt")
    cancelled = await process_each(web.database, allowed, lambda one: web.cancel(one, found[one], "interrupt"))
    cancelled.raise_first()


async def _delete_threads(web: WebContext, identity: UUID, visible: Visibility) -> None:
    async with web.database.connection() as connection:
        found = await threads_of_assistant(connection, identity, visible)

    async def delete_one(thread_id: UUID) -> None:
        with suppress(NotFound):  # Another request has deleted the thread.
            await web.delete_thread(thread_id, visible)

    deleted = await process_each(web.database, await web.may_each(found, "delete", visible), delete_one)
    deleted.raise_first()


def _config(row: DictRow) -> RunnableConfig:
    identity = {"graph_id": row["graph_id"], "assistant_id": str(row["assistant_id"])}
    return cast(
        RunnableConfig, {**client_config(row["config"]), "configurable": {**client_options(row["context"]), **identity}}
    )


@asynccontextmanager
async def _opened(web: WebContext, row: DictRow) -> AsyncIterator[Graph]:
    """The assistant's graph, for inspection. Raises InvalidRequest when a factory cannot build it from the assistant's
    configuration."""
    _known_graph(web.catalog, row["graph_id"])
    opening = web.catalog.open(row["graph_id"], config=_config(row), access_context="assistants.read")
    async with built_for_client(opening, row["graph_id"], "this assistant") as opened:
        yield opened


async def _aside(row: DictRow, work: Callable[[], Answer]) -> Answer:
    """Run a function in a thread, because it takes long for large graphs and would delay the streams on the event
    loop."""
    try:
        with GraphCode():
            return await asyncio.to_thread(work)
    except GRAPH_CODE_EXCEPTIONS as error:
        log.warning("graph.not_introspected", graph_id=row["graph_id"], exc_info=error)
        raise InvalidRequest(f"Graph '{row['graph_id']}' cannot be looked into: {describe(error)}") from error


def _schemas(graph: PregelProtocol[Any, Any, Any, Any]) -> dict[str, Any]:
    """JSON Schemas of a graph's input, output, state and options; null for types that JSON Schema cannot describe."""
    context = _first(lambda: graph.get_context_jsonschema())  # type: ignore[attr-defined]
    return {
        "input_schema": _first(graph.get_input_jsonschema, lambda: _channels_schema(graph, "Input")),
        "output_schema": _first(graph.get_output_jsonschema, lambda: _channels_schema(graph, "Output")),
        "state_schema": _first(lambda: _state_schema(graph), lambda: _channels_schema(graph, "State")),
        # The older name of the same options, which is never null.
        "config_schema": context or {"title": "Configurable", "type": "object", "properties": {}},
        "context_schema": context,
    }


def _first(*ways: Callable[[], Any]) -> Any:
    """The result of the first function that does not raise; None when all raise. User code defines the types, so every
    exception is possible."""
    for way in ways:
        try:
            return way()
        except GRAPH_CODE_EXCEPTIONS as error:
            log.debug("graph.schema_failed", error=type_and_place(error))
    return None


def _state_schema(graph: Any) -> dict[str, Any]:
    builder: StateGraph[Any, Any, Any, Any] = graph.builder
    return TypeAdapter[Any](builder.state_schema).json_schema()


def _channels_schema(graph: Any, what: str) -> dict[str, Any]:
    """A schema built from the graph's channels, for graphs without a state class and for classes that pydantic does not
    support."""
    named: Iterable[str] = graph.stream_channels_list
    if hasattr(graph, "builder") and what != "State":
        named = graph.builder.schemas[getattr(graph.builder, f"{what.lower()}_schema")]
    channels = {name: graph.channels[name] for name in named if isinstance(graph.channels.get(name), BaseChannel)}
    fields: dict[str, Any] = {name: (channel.UpdateType, None) for name, channel in channels.items()}
    schema: dict[str, Any] = create_model(graph.get_name(what), **fields).model_json_schema()
    return schema
