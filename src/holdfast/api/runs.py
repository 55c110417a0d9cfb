"""/threads/{thread_id}/runs and /runs"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import APIRouter, Header, Query, Response
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.api.bodies import RunCreate
from holdfast.api.context import Web, WebContext
from holdfast.api.edge import JsonRoute
from holdfast.api.errors import Json
from holdfast.api.listing import clean_configurable, clean_metadata
from holdfast.api.streaming import locations, stream_response, wait_response
from holdfast.engine.create import NewRun, create_run
from holdfast.errors import BadRequest, InvalidRequest, NotFound
from holdfast.resources.assistants import inherit, resolve_assistant_row
from holdfast.resources.runs import get_run, list_runs
from holdfast.resources.threads import get_thread, present
from holdfast.streams.sse import select_modes

router = APIRouter(tags=["runs"], route_class=JsonRoute)

RunState = Literal["pending", "running", "success", "error", "timeout", "interrupted"]


def request_kwargs(body: RunCreate, *, stateless: bool, temporary: bool) -> dict[str, Any]:
    """What the worker needs of a request, as it is stored and shown; without what only the server sets."""
    if body.webhook is not None:
        raise InvalidRequest("webhook: this version does not deliver webhooks; leave it out.")
    if stateless and body.command is not None and body.command.resume is not None:
        raise BadRequest("A stateless run has no interrupt to resume: post command.resume to the run's thread.")
    config = body.config.model_dump(exclude_none=True) if body.config is not None else {}
    configurable: dict[str, Any] = dict(config.get("configurable") or {})
    if configurable and body.context:
        raise BadRequest("Give either config.configurable or context, not both: context is the newer name.")
    checkpoint = body.checkpoint.model_dump(mode="json", exclude_none=True) if body.checkpoint is not None else {}
    if body.checkpoint_id is not None:
        checkpoint["checkpoint_id"] = str(body.checkpoint_id)
    configurable.update(checkpoint)
    if configurable:
        config["configurable"] = clean_configurable(configurable)
    durability = body.durability or ("exit" if body.checkpoint_during is False else "async")
    return {
        "input": body.input,
        "command": None if body.command is None else body.command.model_dump(mode="json", exclude_none=True),
        "config": config,
        "context": None if body.context is None else clean_configurable(body.context),
        "stream_mode": body.stream_mode,
        "interrupt_before": body.interrupt_before,
        "interrupt_after": body.interrupt_after,
        "temporary": temporary,
        "subgraphs": body.stream_subgraphs,
        "resumable": body.stream_resumable,
        "durability": durability,
    }


async def create_from(web: WebContext, body: RunCreate, thread_id: UUID | None, *, protocol: bool = False) -> DictRow:
    """Create the run that a request describes, and tell the workers. `protocol`: for the thread-centric protocol, whose
    events are more than the modes a client of v1 can ask for."""
    async with web.database.connection() as connection:
        assistant = await resolve_assistant_row(connection, web.catalog, body.assistant_id)
    graph_id = assistant["graph_id"]
    if graph_id not in web.catalog.graph_ids:
        raise NotFound(f"Assistant {body.assistant_id} is for graph '{graph_id}', which this server does not have.")
    temporary = thread_id is None and body.on_completion != "keep"
    given = clean_metadata(body.metadata)
    kwargs = request_kwargs(body, stateless=thread_id is None, temporary=temporary)
    if protocol:
        kwargs["protocol"] = True
    kwargs = inherit(assistant, kwargs)
    metadata = {
        **clean_metadata(kwargs["config"].get("metadata") or {}),
        **given,
        "graph_id": graph_id,
        "assistant_id": str(assistant["assistant_id"]),
    }
    new = NewRun(
        thread_id=thread_id or uuid7(),
        assistant_id=assistant["assistant_id"],
        graph_id=graph_id,
        kwargs=kwargs,
        metadata=metadata,
        assistant_metadata=assistant["metadata"],
        multitask_strategy=body.multitask_strategy or "enqueue",
        after_seconds=body.after_seconds,
        priority=body.priority,
        create_thread=thread_id is None or body.if_not_exists == "create",
        temporary=temporary,
        thread_metadata=given,
    )
    created = await create_run(web.database, new)
    web.announce_cancelled(created.cancelled, "rollback" if new.multitask_strategy == "rollback" else "interrupt")
    if created.ready:
        web.signals.publish("work", f"{new.after_seconds:.3f}" if new.after_seconds else "")
    return created.run


def present_run(run: DictRow) -> dict[str, Any]:
    """A run as clients see it, with what Holdfast adds: attempt, priority and error."""
    shown = present(run)
    for internal in ("first_seq", "graph_id", "finished_at"):
        shown.pop(internal, None)
    shown["langsmith_session_name"] = None
    return shown


@router.post("/threads/{thread_id}/runs")
async def create(web: Web, thread_id: UUID, body: RunCreate) -> Response:
    run = await create_from(web, body, thread_id)
    return Json(present_run(run), headers={"content-location": locations(run, "")["content-location"]})


@router.post("/threads/{thread_id}/runs/stream")
async def stream(web: Web, thread_id: UUID, body: RunCreate) -> Response:
    run = await create_from(web, body, thread_id)
    return stream_response(web, run, after=None, cancel_on_disconnect=body.on_disconnect == "cancel")


@router.post("/threads/{thread_id}/runs/wait")
async def wait(web: Web, thread_id: UUID, body: RunCreate) -> Response:
    run = await create_from(web, body, thread_id)
    return wait_response(web, run, cancel_on_disconnect=body.on_disconnect == "cancel")


@router.post("/runs")
async def create_stateless(web: Web, body: RunCreate) -> Response:
    run = await create_from(web, body, None)
    return Json(present_run(run), headers={"content-location": locations(run, "", stateless=True)["content-location"]})


@router.post("/runs/stream")
async def stream_stateless(web: Web, body: RunCreate) -> Response:
    run = await create_from(web, body, None)
    cancel = body.on_disconnect == "cancel"
    return stream_response(web, run, after=None, cancel_on_disconnect=cancel, stateless=True)


@router.post("/runs/wait")
async def wait_stateless(web: Web, body: RunCreate) -> Response:
    run = await create_from(web, body, None)
    return wait_response(web, run, cancel_on_disconnect=body.on_disconnect == "cancel")


@router.get("/threads/{thread_id}/runs")
async def list_of_thread(
    web: Web,
    thread_id: UUID,
    status: RunState | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    select: Annotated[Sequence[str], Query()] = (),
) -> Response:
    async with web.database.connection() as connection:
        await get_thread(connection, thread_id)
        found = [present_run(run) for run in await list_runs(connection, thread_id, status, limit, offset)]
    wanted = set(split_list(select))
    return Json([{key: run[key] for key in run if key in wanted} for run in found] if wanted else found)


@router.get("/runs", description="All runs, newest first. A Holdfast extension.")
async def list_all(
    web: Web,
    status: RunState | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    async with web.database.connection() as connection:
        return Json([present_run(run) for run in await list_runs(connection, None, status, limit, offset)])


@router.get("/threads/{thread_id}/runs/{run_id}")
async def get(web: Web, thread_id: UUID, run_id: UUID) -> Response:
    async with web.database.connection() as connection:
        return Json(present_run(await get_run(connection, run_id, thread_id)))


@router.get("/runs/{run_id}", description="A run by its id alone. A Holdfast extension.")
async def get_by_id(web: Web, run_id: UUID) -> Response:
    async with web.database.connection() as connection:
        return Json(present_run(await get_run(connection, run_id)))


@router.get("/threads/{thread_id}/runs/{run_id}/join")
async def join(web: Web, thread_id: UUID, run_id: UUID, cancel_on_disconnect: bool = False) -> Response:
    async with web.database.connection() as connection:
        run = await get_run(connection, run_id, thread_id)
    return wait_response(web, run, cancel_on_disconnect=cancel_on_disconnect)


def split_list(values: Sequence[str]) -> list[str]:
    """A list in a query, however the client writes it: repeated, comma-separated or as a JSON array."""
    found: list[str] = []
    for value in values:
        if value.startswith("["):
            try:
                found += [str(item) for item in orjson.loads(value)]
            except orjson.JSONDecodeError:
                raise InvalidRequest(f"{value} is not a JSON array.") from None
        else:
            found += [item.strip() for item in value.split(",") if item.strip()]
    return found


def _cursor(last_event_id: str | None) -> int | None:
    """A Last-Event-ID as a number of the log; None for the run's beginning."""
    if last_event_id is None or last_event_id in ("-", "-1", "0", ""):
        return None
    try:
        return max(0, int(last_event_id))
    except ValueError:
        raise InvalidRequest(f"Last-Event-ID '{last_event_id}' is not the id of an event: those are numbers.") from None


Modes = Annotated[Sequence[str], Query()]
LastEventId = Annotated[str | None, Header()]


@router.get("/threads/{thread_id}/runs/{run_id}/stream")
async def join_stream(
    web: Web,
    thread_id: UUID,
    run_id: UUID,
    stream_mode: Modes = (),
    cancel_on_disconnect: bool = False,
    last_event_id: LastEventId = None,
) -> Response:
    async with web.database.connection() as connection:
        run = await get_run(connection, run_id, thread_id)
    modes, cursor = select_modes(split_list(stream_mode)), _cursor(last_event_id)
    return stream_response(web, run, after=cursor, modes=modes, cancel_on_disconnect=cancel_on_disconnect)


@router.get("/runs/{run_id}/stream")
async def join_stream_by_id(
    web: Web,
    run_id: UUID,
    stream_mode: Modes = (),
    last_event_id: LastEventId = None,
) -> Response:
    async with web.database.connection() as connection:
        run = await get_run(connection, run_id)
    modes, cursor = select_modes(split_list(stream_mode)), _cursor(last_event_id)
    return stream_response(web, run, after=cursor, modes=modes, stateless=True)


@router.post("/threads/{thread_id}/runs/{run_id}/cancel", status_code=202)
async def cancel(
    web: Web,
    thread_id: UUID,
    run_id: UUID,
    wait: bool = False,
    action: Literal["interrupt", "rollback"] = "interrupt",
) -> Response:
    async with web.database.connection() as connection:
        run = await get_run(connection, run_id, thread_id)
    cancelled = await web.cancel(thread_id, [run_id], action)
    if not cancelled.ended and not cancelled.requested:
        raise NotFound(f"Run {run_id} has ended already, as {run['status']}.")
    if wait:
        return wait_response(web, run)
    return Response(status_code=202)
