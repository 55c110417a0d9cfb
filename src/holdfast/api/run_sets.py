"""Several runs at once: /runs/batch, /runs/cancel, and the deletion of one."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from fastapi import Body, Query
from pydantic import FailFast, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from holdfast.api.bodies import MAX_IDS, RunCreate
from holdfast.api.bulk import process_each
from holdfast.api.context import Web, WebContext
from holdfast.api.destructive import Destructive
from holdfast.api.errors import Json
from holdfast.api.response_models import Run, answers, refusals
from holdfast.api.routes import Routes
from holdfast.api.submit import announce_requested_run, make_requested_run
from holdfast.engine.new_run import NewRun
from holdfast.engine.runs import delete_run, present_run, unfinished_by_thread
from holdfast.engine.submit import create_runs_within
from holdfast.errors import InvalidRequest, NotFound

# Bodies of the largest size that the runs of one batch may be as large as together. Each has a copy of its assistant's
# config and context, so a small request can ask for a great deal.
MAX_BODIES = 2

routes = Routes(tags=["runs"])


class BulkCancel(Destructive):
    """Runs of one thread by their ids, or all runs in a state."""

    thread_id: UUID | None = None
    run_ids: list[UUID] | None = Field(default=None, max_length=MAX_IDS)
    status: Literal["pending", "running", "all"] | None = None


@routes.post("/runs/batch", summary="Create stateless runs", responses=answers(list[Run], 400, 404))
async def create_batch(
    web: Web, body: Annotated[list[RunCreate], FailFast(), Body(min_length=1, max_length=1000)]
) -> Response:
    """All of them, or none."""
    async with web.assistants.looked_up:
        return await _create_all(web, body)


async def _create_all(web: WebContext, body: list[RunCreate]) -> Response:
    new_runs: list[NewRun] = []
    left = MAX_BODIES * web.settings.max_body_bytes
    for one in body:
        new_runs.append(await make_requested_run(web, one, None))
        left -= new_runs[-1].size
        if left < 0:
            raise HTTPException(
                413,
                f"The runs, with what their assistants add to them, are larger than {MAX_BODIES} times "
                f"MAX_BODY_BYTES={web.settings.max_body_bytes} together. Create fewer at once.",
            )
    async with web.database.transaction() as connection:
        created = await create_runs_within(connection, new_runs)
    return Json([present_run(announce_requested_run(web, run)) for run in created])


@routes.post("/runs/cancel", status_code=204, summary="Cancel runs", responses=refusals(404, 409))
async def cancel_many(
    web: Web, body: BulkCancel, action: Annotated[Literal["interrupt", "rollback"], Query()] = "interrupt"
) -> Response:
    if (body.status is None) == (body.thread_id is None and body.run_ids is None):
        raise InvalidRequest("Give either thread_id with run_ids, or status.")
    if body.status is None and (body.thread_id is None or not body.run_ids):
        raise InvalidRequest("thread_id and run_ids belong together.")
    if body.thread_id is not None:
        await web.may_thread(body.thread_id, "update", action=action)
        wanted: dict[UUID, list[UUID]] = {body.thread_id: body.run_ids or []}
    else:
        visible = await web.caller.may("threads", "update", {"thread_id": None, "action": action})
        async with web.database.connection() as connection:
            found_runs = await unfinished_by_thread(connection, body.status or "all", visible)
        wanted = {one: found_runs[one] for one in await web.may_each(found_runs, "update", visible, action=action)}
    cancelled = await process_each(web.database, wanted, lambda one: web.cancel(one, wanted[one], action))
    cancelled.raise_first()
    if not any(runs.ended or runs.requested for runs in cancelled.done.values()):
        raise NotFound("Unfinished run", hint="All runs that the request selects have ended, or it selects none.")
    return Response(status_code=204)


@routes.delete(
    "/threads/{thread_id}/runs/{run_id}",
    status_code=204,
    summary="Delete a run that has ended",
    responses=refusals(404, 409),
)
async def delete(web: Web, thread_id: UUID, run_id: UUID) -> Response:
    await web.may_thread(thread_id, "delete", run_id=run_id)
    await delete_run(web.database, thread_id, run_id)
    return Response(status_code=204)
