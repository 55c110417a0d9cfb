"""/threads/{thread_id}/state, /history and /storage"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any
from uuid import UUID

from fastapi import Body as FromBody
from fastapi import Query
from langgraph.types import PregelTask, StateSnapshot, StateUpdate
from starlette.responses import Response

from holdfast.api.bodies import MAX_SELECTED, Checkpoint
from holdfast.api.context import Web
from holdfast.api.errors import Json
from holdfast.api.listing import clean_metadata, only
from holdfast.api.response_models import EARLIER, State, Storage, Updated, answers, refusals
from holdfast.api.routes import Routes
from holdfast.api.thread_bodies import HistoryRead, StatePatch, StateRead, StateUpdateBody
from holdfast.db.stored_json import as_object
from holdfast.engine.thread_state import (
    checkpoint_of,
    patch_metadata,
    present_interrupts,
    read_history,
    read_state,
    storage_of,
    update_state,
)
from holdfast.errors import InvalidRequest

routes = Routes(tags=["threads"])

FIELDS = (
    "values",
    "next",
    "tasks",
    "metadata",
    "created_at",
    "checkpoint",
    "parent_checkpoint",
    "interrupts",
    "checkpoint_id",
    "parent_checkpoint_id",
)

HISTORY = answers(list[State], 404, headers=EARLIER)

Select = Annotated[Sequence[str], Query(description="Fields, or `values.<key>` for one key of the state.")]


@routes.get("/threads/{thread_id}/state", summary="Get the state", responses=answers(State, 404))
async def get(web: Web, thread_id: UUID, subgraphs: bool = False, select: Select = ()) -> Response:
    return await _state(web, thread_id, None, subgraphs, select)


@routes.get(
    "/threads/{thread_id}/state/{checkpoint_id}", summary="Get the state at a checkpoint", responses=answers(State, 404)
)
async def get_at(
    web: Web, thread_id: UUID, checkpoint_id: UUID, subgraphs: bool = False, select: Select = ()
) -> Response:
    return await _state(web, thread_id, Checkpoint(checkpoint_id=checkpoint_id), subgraphs, select)


@routes.post(
    "/threads/{thread_id}/state/checkpoint",
    summary="Get the state at a checkpoint, or of a subgraph",
    responses=answers(State, 404),
)
async def get_at_checkpoint(web: Web, thread_id: UUID, body: StateRead) -> Response:
    return await _state(web, thread_id, body.checkpoint, body.subgraphs, body.select)


async def _state(
    web: Web, thread_id: UUID, checkpoint: Checkpoint | None, subgraphs: bool, select: Iterable[str] | None
) -> Response:
    selected = _selection(select)
    await web.may_thread(thread_id, "read")
    state = await read_state(web.database, web.catalog, thread_id, _place(checkpoint), subgraphs=subgraphs)
    return Json(_selected(present_state(state), selected))


@routes.post("/threads/{thread_id}/state", summary="Update the state", responses=answers(Updated, 400, 404, 409))
async def update(web: Web, thread_id: UUID, body: StateUpdateBody) -> Response:
    visible = await web.caller.may("threads", "update", {"thread_id": thread_id})
    place = _place(body.checkpoint)
    if body.checkpoint_id is not None:
        place["checkpoint_id"] = str(body.checkpoint_id)
    change = StateUpdate(body.values, body.as_node)  # type: ignore[arg-type]
    reached = await update_state(web.database, web.catalog, thread_id, [[change]], place, visible)
    web.touched(thread_id)
    return Json({"checkpoint": reached, "configurable": reached, "checkpoint_id": reached.get("checkpoint_id")})


@routes.patch(
    "/threads/{thread_id}/state",
    status_code=204,
    summary="Patch the metadata of the state",
    description="Merged into the metadata of the thread's last checkpoint.",
    responses=refusals(400, 404, 409),
)
async def patch(web: Web, thread_id: UUID, body: StatePatch) -> Response:
    visible = await web.caller.may("threads", "update", {"thread_id": thread_id})
    await patch_metadata(web.database, thread_id, clean_metadata(body.metadata), visible)
    web.touched(thread_id)
    return Response(status_code=204)


@routes.get("/threads/{thread_id}/history", summary="Get past states", responses=HISTORY)
async def history(
    web: Web,
    thread_id: UUID,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1,
    before: UUID | None = None,
    select: Select = (),
) -> Response:
    earlier = None if before is None else str(before)
    return await _history(web, thread_id, HistoryRead(limit=limit), earlier, select)


@routes.post("/threads/{thread_id}/history", summary="Search past states", responses=HISTORY)
async def search_history(web: Web, thread_id: UUID, body: Annotated[HistoryRead | None, FromBody()] = None) -> Response:
    body = body or HistoryRead()
    return await _history(web, thread_id, body, None if body.before is None else body.before.id, body.select)


async def _history(
    web: Web, thread_id: UUID, asked: HistoryRead, before: str | None, select: Iterable[str] | None
) -> Response:
    selected = _selection(select)
    await web.may_thread(thread_id, "read")
    states, more = await read_history(
        web.database,
        web.catalog,
        thread_id,
        namespace=_place(asked.checkpoint).get("checkpoint_ns", ""),
        before=before,
        metadata=asked.metadata,
        limit=asked.limit,
    )
    last = checkpoint_of(states[-1].config) if more else None
    headers = None if last is None else {"x-pagination-next": str(last["checkpoint_id"])}
    return Json([_selected(present_state(state), selected) for state in states], headers=headers)


@routes.get(
    "/threads/{thread_id}/storage",
    summary="Get a thread's size",
    description="Bytes that the thread's history takes in the database.",
    responses=answers(Storage, 404),
)
async def storage(web: Web, thread_id: UUID) -> Response:
    visible = await web.caller.may("threads", "read", {"thread_id": thread_id})
    async with web.database.connection() as connection:
        return Json(await storage_of(connection, thread_id, visible))


def _place(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """A checkpoint that a client names. The thread is always that of the path; a thread id in the checkpoint is
    ignored."""
    return {} if checkpoint is None else checkpoint.model_dump(mode="json", exclude_none=True)


def _selection(given: Iterable[str] | None) -> list[str] | None:
    """The selected fields; None for all."""
    if given is None:
        return None
    names = [name.strip() for part in given for name in part.split(",") if name.strip()]
    if len(names) > MAX_SELECTED:
        raise InvalidRequest(f"select: {MAX_SELECTED:,} fields are possible, and the request has {len(names):,}.")
    for name in names:
        if name not in FIELDS and not name.startswith("values."):
            raise InvalidRequest(f"select: '{name}' is neither values.<key> nor one of {', '.join(FIELDS)}.")
    return names or None


def _selected(state: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    if names is None:
        return state
    shown = only(state, names)
    keys = [name.removeprefix("values.") for name in names if name.startswith("values.")]
    if keys and "values" not in shown:
        values = state["values"] if isinstance(state["values"], dict) else {}
        shown["values"] = only(values, keys)
    return shown


def present_state(state: StateSnapshot) -> dict[str, Any]:
    """A state as clients see it."""
    checkpoint, parent = checkpoint_of(state.config), checkpoint_of(state.parent_config)
    if state.created_at is None and checkpoint is not None and checkpoint["checkpoint_id"] is None:
        checkpoint = None
    metadata = None
    if state.metadata is not None and checkpoint is not None:
        metadata = {**as_object(state.metadata), "thread_id": checkpoint["thread_id"]}
    return {
        "values": state.values,
        "next": list(state.next),
        "tasks": [_present_task(task) for task in state.tasks],
        "metadata": metadata,
        "created_at": state.created_at,
        "checkpoint": checkpoint,
        "parent_checkpoint": parent,
        "interrupts": present_interrupts(state.interrupts),
        "checkpoint_id": None if checkpoint is None else checkpoint["checkpoint_id"],
        "parent_checkpoint_id": None if parent is None else parent["checkpoint_id"],
    }


def _present_task(task: PregelTask) -> dict[str, Any]:
    """A task. Its state is there when subgraphs were asked for; else `checkpoint` says where to ask for it."""
    nested = isinstance(task.state, StateSnapshot)
    return {
        "id": task.id,
        "name": task.name,
        "path": task.path,
        "error": repr(task.error) if isinstance(task.error, BaseException) else task.error,
        "interrupts": present_interrupts(task.interrupts),
        "checkpoint": None if nested or task.state is None else checkpoint_of(task.state),  # type: ignore[arg-type]
        "state": present_state(task.state) if nested else None,  # type: ignore[arg-type]
        "result": task.result,
    }
