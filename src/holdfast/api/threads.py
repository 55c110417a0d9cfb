"""/threads"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any
from uuid import UUID, uuid4

import psycopg
from fastapi import Body as FromBody
from fastapi import Header, Query
from langgraph.types import Command, Send, StateUpdate
from psycopg.rows import DictRow
from starlette.responses import Response
from uuid_utils.compat import uuid7

from holdfast.api.bulk import process_each
from holdfast.api.context import Web, WebContext
from holdfast.api.errors import Json
from holdfast.api.listing import clean_metadata, only, page
from holdfast.api.response_models import Detail, Pruned, SelectedThread, Thread, ThreadWithTtl, answers, pages, refusals
from holdfast.api.routes import Routes
from holdfast.api.thread_bodies import (
    Superstep,
    ThreadCount,
    ThreadCreate,
    ThreadPatch,
    ThreadPrune,
    ThreadSearch,
    Update,
)
from holdfast.engine.create import THREAD_COLUMNS, create_thread
from holdfast.engine.new_run import NewThread
from holdfast.engine.thread_state import update_state
from holdfast.engine.threads import (
    ThreadFilters,
    change_thread,
    copy_thread,
    count_threads,
    get_thread,
    get_ttl,
    log_refused_checkpoints,
    present,
    search_threads,
)
from holdfast.errors import BadRequest, Conflict, NotFound, RequestError
from holdfast.resources.pruning import keep_latest

routes = Routes(tags=["threads"])


@routes.post(
    "/threads",
    summary="Create a thread",
    responses=answers(Thread, 400, 404, 409)
    | {201: {"model": Detail, "description": "The thread was created, but its supersteps do not fit the graph."}},
)
async def create(web: Web, body: Annotated[ThreadCreate | None, FromBody()] = None) -> Response:
    body = body or ThreadCreate()
    thread_id = body.thread_id or uuid7()
    metadata = clean_metadata(body.metadata)
    if body.supersteps:
        _require_graph(web, metadata)
    supersteps = [_superstep(superstep) for superstep in body.supersteps]
    asked: dict[str, Any] = {
        "thread_id": thread_id,
        "metadata": metadata,
        "if_exists": body.if_exists,
        "ttl": None if body.ttl is None else body.ttl.model_dump(),
    }
    visible = await web.caller.may("threads", "create", asked)
    metadata = asked["metadata"] or {}
    ttl = web.thread_ttl if body.ttl is None else (body.ttl.ttl, body.ttl.strategy)
    new = NewThread(thread_id, metadata, ttl, web.caller.tenant or "", adopting=web.caller.adopting)
    thread = await _create(web, new)
    if thread is None:
        async with web.database.connection() as connection:
            await log_refused_checkpoints(connection, new)
        if body.if_exists == "raise":
            raise Conflict(f"Thread {thread_id} exists already; if_exists 'do_nothing' returns it instead.")
        shown = await web.may_show_existing("threads", {"thread_id": thread_id})
        async with web.database.connection() as connection:
            try:
                await get_thread(connection, thread_id, visible)
                thread = await get_thread(connection, thread_id, shown)
            except NotFound:
                raise Conflict(f"Thread {thread_id} exists already.") from None
    elif supersteps:
        try:
            await update_state(web.database, web.catalog, thread_id, supersteps, {})
        except (RequestError, psycopg.DataError) as error:
            # The thread is there, so this is no failure to create it; clients look for a `detail`.
            return Json({"detail": f"Thread {thread_id} was created without its supersteps: {error}"}, status_code=201)
        async with web.database.connection() as connection:
            thread = await get_thread(connection, thread_id)
    return Json(present(thread))


async def _create(web: WebContext, new: NewThread) -> DictRow | None:
    if web.committer is not None:
        return await web.committer.create_thread(new)
    async with web.database.connection() as connection:
        return await create_thread(connection, new)


def _require_graph(web: WebContext, metadata: dict[str, Any]) -> None:
    graph_id = metadata.get("graph_id")
    if not isinstance(graph_id, str):
        raise BadRequest("supersteps: metadata.graph_id must say which graph's state they make up.")
    if graph_id not in web.catalog.graph_ids:
        raise NotFound("Graph", f"'{graph_id}'", hint=f"Expected one of: {list(web.catalog.graph_ids)}")


def _superstep(superstep: Superstep) -> list[StateUpdate]:
    # LangGraph accepts a Command in place of values, although its types do not include it.
    return [StateUpdate(_values(update), update.as_node) for update in superstep.updates]


def _values(update: Update) -> Any:
    command = update.command
    if command is None:
        return update.values
    targets = command.goto if isinstance(command.goto, list) else [] if command.goto is None else [command.goto]
    goto = [target if isinstance(target, str) else Send(target.node, target.input) for target in targets]
    return Command(resume=command.resume, update=command.update, goto=goto)


@routes.post("/threads/search", summary="Search threads", responses=pages(list[SelectedThread]))
async def search(web: Web, body: Annotated[ThreadSearch | None, FromBody()] = None) -> Response:
    body = body or ThreadSearch()
    filters = await _visible(web, body)
    columns = THREAD_COLUMNS if body.select is None else [column for column in THREAD_COLUMNS if column in body.select]
    async with web.database.connection() as connection:
        rows = await search_threads(
            connection,
            filters,
            columns=columns or ["thread_id"],
            extract=body.places(),
            sort_by=body.sort_by or "updated_at",
            descending=body.sort_order != "asc",
            part=body.within(web.settings),
        )
    found, headers = page(rows, body)
    fields = None if body.select is None else [*body.select, "extracted"]
    return Json([only(present(row), fields) for row in found], headers=headers)


@routes.post("/threads/count", summary="Count threads", responses=answers(int))
async def count(web: Web, body: Annotated[ThreadCount | None, FromBody()] = None) -> Response:
    filters = await _visible(web, body or ThreadCount())
    async with web.database.connection() as connection:
        return Json(await count_threads(connection, filters))


async def _visible(web: WebContext, asked: ThreadSearch | ThreadCount) -> ThreadFilters:
    """The conditions of a search, restricted to what the caller may see."""
    value: dict[str, Any] = asked.model_dump(include={"metadata", "values", "status", "limit", "offset", "ids"})
    visible = await web.caller.may("threads", "search", value)
    return replace(asked.filters(), metadata=value["metadata"] or {}, values=value["values"] or {}, visible=visible)


@routes.post("/threads/prune", summary="Delete or shorten threads", responses=answers(Pruned, 409))
async def prune(web: Web, body: ThreadPrune) -> Response:
    access = "update" if body.strategy == "keep_latest" else "delete"
    # All of them are authorised before one is touched: a refusal leaves everything as it is.
    threads = {one: await web.caller.may("threads", access, {"thread_id": one}) for one in body.thread_ids}

    async def prune_one(thread_id: UUID) -> bool:
        if body.strategy == "keep_latest":
            return await keep_latest(web.database, thread_id, threads[thread_id])
        with suppress(NotFound):
            await web.delete_thread(thread_id, threads[thread_id])
            return True
        return False

    pruned = await process_each(web.database, threads, prune_one)
    pruned.raise_first()
    return Json({"pruned_count": sum(pruned.done.values())})


@routes.get("/threads/{thread_id}", summary="Get a thread", responses=answers(ThreadWithTtl, 404))
async def get(web: Web, thread_id: UUID, include: Annotated[Sequence[str], Query()] = ()) -> Response:
    visible = await web.caller.may("threads", "read", {"thread_id": thread_id})
    async with web.database.connection() as connection:
        thread = present(await get_thread(connection, thread_id, visible))
        if "ttl" in {name.strip() for part in include for name in part.split(",")}:
            ttl = await get_ttl(connection, thread_id)
            thread["ttl"] = None if ttl is None else present(ttl)
    return Json(thread)


@routes.patch(
    "/threads/{thread_id}",
    summary="Change a thread",
    responses=answers(Thread, 404) | {204: {"description": "Changed; `Prefer: return=minimal` was asked for."}},
)
async def patch(
    web: Web, thread_id: UUID, body: ThreadPatch, prefer: Annotated[str | None, Header()] = None
) -> Response:
    ttl = None if body.ttl is None else (body.ttl.ttl, body.ttl.strategy)
    asked: dict[str, Any] = {"thread_id": thread_id, "metadata": clean_metadata(body.metadata)}
    visible = await web.caller.may("threads", "update", asked)
    async with web.database.connection() as connection:
        thread = await change_thread(connection, thread_id, asked["metadata"] or {}, ttl, visible)
    if "return=minimal" in (prefer or "").lower().replace(" ", ""):
        return Response(status_code=204)
    return Json(present(thread))


@routes.delete("/threads/{thread_id}", status_code=204, summary="Delete a thread", responses=refusals(404))
async def delete(web: Web, thread_id: UUID) -> Response:
    await web.delete_thread(thread_id, await web.caller.may("threads", "delete", {"thread_id": thread_id}))
    return Response(status_code=204)


@routes.post("/threads/{thread_id}/copy", summary="Copy a thread", responses=answers(Thread, 409))
async def copy(web: Web, thread_id: UUID) -> Response:
    visible = await web.caller.may("threads", "read", {"thread_id": thread_id})
    asked: dict[str, Any] = {"thread_id": uuid4(), "metadata": {}}
    await web.caller.may("threads", "create", asked)
    async with web.database.transaction() as connection:
        thread = await copy_thread(connection, thread_id, asked["thread_id"], visible)
        if asked["metadata"]:
            thread = await change_thread(connection, asked["thread_id"], asked["metadata"], None)
    return Json(present(thread))
