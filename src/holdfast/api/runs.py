"""/threads/{thread_id}/runs and /runs"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import Header, Query
from psycopg.rows import DictRow
from starlette.responses import Response

from holdfast.api.bodies import RunCreate
from holdfast.api.context import Web, WebContext
from holdfast.api.errors import Json
from holdfast.api.listing import Page, page
from holdfast.api.response_models import (
    PLACE,
    Run,
    SelectedRun,
    answers,
    awaited_run,
    cancelled_run,
    pages,
    streamed_run,
)
from holdfast.api.routes import Routes
from holdfast.api.streaming import check_followed, locations, run_resumed_at, stream_response, wait_response
from holdfast.api.submit import submit_run
from holdfast.engine.runs import get_run, list_runs, present_run, thread_of_run
from holdfast.engine.threads import get_thread
from holdfast.errors import Denied, InvalidRequest, NotFound
from holdfast.insight.fleet import waits_for
from holdfast.streams.sse import select_modes

routes = Routes(tags=["runs"])

# Follow an interrupted run to the end of the run that resumes it.
Follow = Annotated[bool, Query(description="Continue with the runs that answer its interrupts. A Holdfast extension.")]
RunState = Literal["pending", "running", "success", "error", "timeout", "interrupted"]


@routes.post("/threads/{thread_id}/runs", summary="Create a run", responses=answers(Run, 400, 404, 409, headers=PLACE))
async def create(web: Web, thread_id: UUID, body: RunCreate) -> Response:
    run = await submit_run(web, body, thread_id)
    return Json(present_run(run), headers={"content-location": locations(run, "")["content-location"]})


@routes.post(
    "/threads/{thread_id}/runs/stream",
    summary="Create a run and stream it",
    response_class=Response,
    responses=streamed_run(400, 404, 409),
)
async def stream(web: Web, thread_id: UUID, body: RunCreate, follow: Follow = False) -> Response:
    run = await submit_run(web, body, thread_id, streamed=True)
    cancel = body.on_disconnect == "cancel"
    return stream_response(web, run, after=None, cancel_on_disconnect=cancel, follow=follow)


@routes.post(
    "/threads/{thread_id}/runs/wait", summary="Create a run and wait for it", responses=awaited_run(400, 404, 409)
)
async def wait(web: Web, thread_id: UUID, body: RunCreate, follow: Follow = False) -> Response:
    run = await submit_run(web, body, thread_id, watched=True)
    return wait_response(web, run, cancel_on_disconnect=body.on_disconnect == "cancel", follow=follow)


@routes.post("/runs", summary="Create a stateless run", responses=answers(Run, 400, 404, headers=PLACE))
async def create_stateless(web: Web, body: RunCreate) -> Response:
    run = await submit_run(web, body, None)
    return Json(present_run(run), headers={"content-location": locations(run, "", stateless=True)["content-location"]})


@routes.post(
    "/runs/stream",
    summary="Create a stateless run and stream it",
    response_class=Response,
    responses=streamed_run(400, 404),
)
async def stream_stateless(web: Web, body: RunCreate) -> Response:
    run = await submit_run(web, body, None, streamed=True)
    cancel = body.on_disconnect == "cancel"
    return stream_response(web, run, after=None, cancel_on_disconnect=cancel, stateless=True)


@routes.post("/runs/wait", summary="Create a stateless run and wait for it", responses=awaited_run(400, 404))
async def wait_stateless(web: Web, body: RunCreate) -> Response:
    run = await submit_run(web, body, None, watched=True)
    return wait_response(web, run, cancel_on_disconnect=body.on_disconnect == "cancel")


@routes.get("/threads/{thread_id}/runs", summary="List a thread's runs", responses=pages(list[SelectedRun], 404))
async def list_of_thread(
    web: Web,
    thread_id: UUID,
    status: RunState | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    select: Annotated[Sequence[str], Query()] = (),
) -> Response:
    part = Page(limit=limit, offset=offset)
    await web.may_thread(thread_id, "read")
    async with web.database.connection() as connection:
        await get_thread(connection, thread_id)
        rows = await list_runs(connection, thread_id, status, part.within(web.settings))
    shown, headers = page(rows, part)
    found = [present_run(run) for run in shown]
    wanted = set(split_list(select))
    selected = [{key: run[key] for key in run if key in wanted} for run in found] if wanted else found
    return Json(selected, headers=headers)


@routes.get(
    "/runs",
    summary="List runs",
    description="All runs, newest first. A Holdfast extension.",
    responses=pages(list[Run]),
)
async def list_all(
    web: Web,
    status: RunState | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    asked: dict[str, Any] = {"metadata": {}, "status": None, "limit": limit, "offset": offset}
    visible = await web.caller.may("threads", "search", asked)
    part = Page(limit=limit, offset=offset)
    async with web.database.connection() as connection:
        rows = await list_runs(connection, None, status, part.within(web.settings), visible)
    shown, headers = page(rows, part)
    return Json([present_run(run) for run in shown], headers=headers)


@routes.get("/threads/{thread_id}/runs/{run_id}", summary="Get a run", responses=answers(Run, 404))
async def get(web: Web, thread_id: UUID, run_id: UUID) -> Response:
    return Json(await _explained(web, run_id, thread_id))


@routes.get(
    "/runs/{run_id}",
    summary="Get a run by its id",
    description="By the id of the run only. A Holdfast extension.",
    responses=answers(Run, 404),
)
async def get_by_id(web: Web, run_id: UUID) -> Response:
    return Json(await _explained(web, run_id))


@routes.get("/threads/{thread_id}/runs/{run_id}/join", summary="Wait for a run", responses=awaited_run(404))
async def join(
    web: Web, thread_id: UUID, run_id: UUID, cancel_on_disconnect: bool = False, follow: Follow = False
) -> Response:
    run = await run_of(web, run_id, thread_id)
    if cancel_on_disconnect:
        await may_cancel_later(web, run)
    return wait_response(web, run, cancel_on_disconnect=cancel_on_disconnect, follow=follow)


async def may_cancel_later(web: WebContext, run: DictRow) -> None:
    """Authorize a caller who may read a run to cancel it by disconnecting. Raises Denied."""
    try:
        await web.may_thread(run["thread_id"], "update", run_id=run["run_id"], action="interrupt")
    except Denied as refusal:
        reason = f"cancel_on_disconnect: {refusal} Leave it out to watch the run without being able to cancel it."
        raise Denied(refusal.status, reason, refusal.headers) from None


async def run_of(
    web: WebContext, run_id: UUID, thread_id: UUID | None = None, *, access: str = "read", **value: Any
) -> DictRow:
    """A run that the caller may see, or change. What may be done with a run is what may be done with its thread."""
    await _may_run(web, run_id, thread_id, access=access, **value)
    async with web.database.connection() as connection:
        return await get_run(connection, run_id, thread_id)


async def _may_run(web: WebContext, run_id: UUID, thread_id: UUID | None, *, access: str, **value: Any) -> None:
    """Have it decided whether the caller may do something with a run. The run itself, which can be large, is read
    afterwards, so that it is not held while this waits for the database. Raises Denied and NotFound."""
    if thread_id is not None:
        await web.may_thread(thread_id, access, run_id=run_id, **value)
        return
    async with web.database.connection() as connection:
        thread_id = await thread_of_run(connection, run_id)
    try:
        await web.may_thread(thread_id, access, run_id=run_id, **value)
    except NotFound:
        # A separate message, because the message about the thread contains its id, which the caller may not see.
        raise NotFound("Run", run_id) from None


async def _explained(web: WebContext, run_id: UUID, thread_id: UUID | None = None) -> dict[str, Any]:
    """A run, with what it waits for if it does. `waiting_for` is a Holdfast extension."""
    await _may_run(web, run_id, thread_id, access="read")
    waiting: dict[str, Any] = {}
    async with web.database.connection() as connection:
        run = await get_run(connection, run_id, thread_id)
        if run["status"] == "pending":
            waiting["waiting_for"] = await waits_for(connection, run_id, run["graph_id"])
    return {**present_run(run), **waiting}


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


# No thread has as many events as there are milliseconds since 1970, which the ids of another server begin with.
EVENT_ID = re.compile(r"[0-9]{1,12}")


def event_cursor(last_event_id: str | None) -> int | None:
    """A Last-Event-ID as a number of the log; None for the beginning.

    What is not such a number means the beginning, too: `-` and `-1`, as clients ask for it, and the ids of another
    server, which a client may still hold after a migration. A repeated event is better than a stream that is refused.
    """
    if last_event_id is None or EVENT_ID.fullmatch(last_event_id) is None:
        return None
    return int(last_event_id) or None


Modes = Annotated[Sequence[str], Query()]
LastEventId = Annotated[str | None, Header()]


@routes.get(
    "/threads/{thread_id}/runs/{run_id}/stream",
    summary="Stream a run",
    response_class=Response,
    responses=streamed_run(404, 410),
)
async def join_stream(
    web: Web,
    thread_id: UUID,
    run_id: UUID,
    stream_mode: Modes = (),
    cancel_on_disconnect: bool = False,
    follow: Follow = False,
    last_event_id: LastEventId = None,
) -> Response:
    run = await run_of(web, run_id, thread_id)
    modes = select_modes(split_list(stream_mode))
    cursor = await run_resumed_at(web, run, event_cursor(last_event_id))
    if follow:
        await check_followed(web, run, cursor)
    if cancel_on_disconnect:
        await may_cancel_later(web, run)
    cancel = cancel_on_disconnect
    return stream_response(web, run, after=cursor, modes=modes, cancel_on_disconnect=cancel, follow=follow)


@routes.get(
    "/runs/{run_id}/stream",
    summary="Stream a run by its id",
    response_class=Response,
    responses=streamed_run(404, 410),
)
async def join_stream_by_id(
    web: Web,
    run_id: UUID,
    stream_mode: Modes = (),
    follow: Follow = False,
    last_event_id: LastEventId = None,
) -> Response:
    run = await run_of(web, run_id)
    modes = select_modes(split_list(stream_mode))
    cursor = await run_resumed_at(web, run, event_cursor(last_event_id))
    if follow:
        await check_followed(web, run, cursor)
    return stream_response(web, run, after=cursor, modes=modes, stateless=True, follow=follow)


@routes.post(
    "/threads/{thread_id}/runs/{run_id}/cancel",
    status_code=202,
    summary="Cancel a run",
    response_class=Response,
    responses=cancelled_run(404),
)
async def cancel(
    web: Web,
    thread_id: UUID,
    run_id: UUID,
    wait: bool = False,
    action: Literal["interrupt", "rollback"] = "interrupt",
) -> Response:
    run = await run_of(web, run_id, thread_id, access="update", action=action)
    cancelled = await web.cancel(thread_id, [run_id], action)
    if not cancelled.ended and not cancelled.requested:
        raise NotFound("Unfinished run", run_id, hint=f"The run has ended already, as {run['status']}.")
    if wait:
        return wait_response(web, run)
    return Response(status_code=202)
