"""/threads"""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import psycopg
from fastapi import APIRouter, Header, Query, Response
from fastapi import Body as FromBody
from langgraph.types import Command, Send, StateUpdate
from uuid_utils.compat import uuid7

from holdfast.api.context import Web, WebContext
from holdfast.api.edge import JsonRoute
from holdfast.api.errors import Json
from holdfast.api.listing import clean_metadata, only, page
from holdfast.api.thread_bodies import (
    Superstep,
    ThreadCount,
    ThreadCreate,
    ThreadPatch,
    ThreadPrune,
    ThreadSearch,
    Update,
)
from holdfast.engine.cancel import CancelledRuns
from holdfast.engine.create import create_thread
from holdfast.errors import BadRequest, Conflict, InvalidRequest, NotFound, RequestError
from holdfast.resources.pruning import keep_latest
from holdfast.resources.state import update_state
from holdfast.resources.threads import (
    COLUMNS,
    change_thread,
    copy_thread,
    count_threads,
    delete_thread,
    get_thread,
    get_ttl,
    present,
    search_threads,
)

router = APIRouter(tags=["threads"], route_class=JsonRoute)


@router.post("/threads")
async def create(web: Web, body: Annotated[ThreadCreate | None, FromBody()] = None) -> Response:
    body = body or ThreadCreate()
    thread_id = body.thread_id or uuid7()
    metadata = clean_metadata(body.metadata)
    if body.supersteps:
        _require_graph(web, metadata)
    supersteps = [_superstep(superstep) for superstep in body.supersteps]
    async with web.database.transaction() as connection:
        created = await create_thread(connection, thread_id, metadata)
        if not created and body.if_exists == "raise":
            raise Conflict(f"Thread {thread_id} exists already; if_exists 'do_nothing' returns it instead.")
        if created and body.ttl is not None:
            await change_thread(connection, thread_id, {}, (body.ttl.ttl, body.ttl.strategy))
        thread = await get_thread(connection, thread_id)
    if created and supersteps:
        try:
            await update_state(web.database, web.catalog, thread_id, supersteps, {})
        except (RequestError, psycopg.DataError) as error:
            # The thread is there, so this is no failure to create it; clients look for a `detail`.
            return Json({"detail": f"Thread {thread_id} was created without its supersteps: {error}"}, status_code=201)
        async with web.database.connection() as connection:
            thread = await get_thread(connection, thread_id)
    return Json(present(thread))


def _require_graph(web: WebContext, metadata: dict[str, Any]) -> None:
    graph_id = metadata.get("graph_id")
    if not isinstance(graph_id, str):
        raise BadRequest("supersteps: metadata.graph_id must say which graph's state they make up.")
    if graph_id not in web.catalog.graph_ids:
        raise NotFound(f"Graph '{graph_id}' not found. Expected one of: {list(web.catalog.graph_ids)}")


def _superstep(superstep: Superstep) -> list[StateUpdate]:
    # LangGraph takes a Command wherever it takes values, though its types do not say so.
    return [StateUpdate(_values(update), update.as_node) for update in superstep.updates]


def _values(update: Update) -> Any:
    command = update.command
    if command is None:
        return update.values
    targets = command.goto if isinstance(command.goto, list) else [] if command.goto is None else [command.goto]
    goto: list[str | Send] = []
    for target in targets:
        if isinstance(target, str):
            goto.append(target)
        elif isinstance(target.get("node"), str):
            goto.append(Send(target["node"], target.get("input")))
        else:
            raise InvalidRequest("command.goto: name a node, or give an object with node and input.")
    return Command(resume=command.resume, update=command.update, goto=goto)


@router.post("/threads/search")
async def search(web: Web, body: Annotated[ThreadSearch | None, FromBody()] = None) -> Response:
    body = body or ThreadSearch()
    columns = COLUMNS if body.select is None else [column for column in COLUMNS if column in body.select]
    async with web.database.connection() as connection:
        rows = await search_threads(
            connection,
            body.filters(),
            columns=columns or ["thread_id"],
            extract=body.places(),
            sort_by=body.sort_by or "updated_at",
            descending=body.sort_order != "asc",
            limit=body.fetch,
            offset=body.offset,
        )
    found, headers = page(rows, body)
    fields = None if body.select is None else [*body.select, "extracted"]
    return Json([only(present(row), fields) for row in found], headers=headers)


@router.post("/threads/count")
async def count(web: Web, body: Annotated[ThreadCount | None, FromBody()] = None) -> Response:
    async with web.database.connection() as connection:
        return Json(await count_threads(connection, (body or ThreadCount()).filters()))


@router.post("/threads/prune")
async def prune(web: Web, body: ThreadPrune) -> Response:
    pruned = 0
    for thread_id in dict.fromkeys(body.thread_ids):
        if body.strategy == "keep_latest":
            pruned += await keep_latest(web.database, thread_id)
        else:
            try:
                await _delete(web, thread_id)
            except NotFound:
                continue
            pruned += 1
    return Json({"pruned_count": pruned})


@router.get("/threads/{thread_id}")
async def get(web: Web, thread_id: UUID, include: Annotated[list[str] | None, Query()] = None) -> Response:
    async with web.database.connection() as connection:
        thread = present(await get_thread(connection, thread_id))
        if "ttl" in {name.strip() for part in include or () for name in part.split(",")}:
            ttl = await get_ttl(connection, thread_id)
            thread["ttl"] = None if ttl is None else present(ttl)
    return Json(thread)


@router.patch("/threads/{thread_id}")
async def patch(
    web: Web, thread_id: UUID, body: ThreadPatch, prefer: Annotated[str | None, Header()] = None
) -> Response:
    ttl = None if body.ttl is None else (body.ttl.ttl, body.ttl.strategy)
    async with web.database.connection() as connection:
        thread = await change_thread(connection, thread_id, clean_metadata(body.metadata), ttl)
    if "return=minimal" in (prefer or "").lower().replace(" ", ""):
        return Response(status_code=204)
    return Json(present(thread))


@router.delete("/threads/{thread_id}", status_code=204)
async def delete(web: Web, thread_id: UUID) -> Response:
    await _delete(web, thread_id)
    return Response(status_code=204)


async def _delete(web: WebContext, thread_id: UUID) -> None:
    unfinished = await delete_thread(web.database, thread_id)
    running = [run for run in unfinished if run["status"] == "running"]
    web.announce_cancelled(CancelledRuns([run["run_id"] for run in unfinished], running), "rollback")


@router.post("/threads/{thread_id}/copy")
async def copy(web: Web, thread_id: UUID) -> Response:
    async with web.database.connection() as connection:
        return Json(present(await copy_thread(connection, thread_id)))
