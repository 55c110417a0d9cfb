"""Several runs at once: /runs/batch, /runs/cancel, and the deletion of one."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Body, Query, Response

from holdfast.api.bodies import Body as RequestBody
from holdfast.api.bodies import RunCreate
from holdfast.api.context import Web
from holdfast.api.edge import JsonRoute
from holdfast.api.errors import Json
from holdfast.api.runs import create_from, present_run
from holdfast.errors import InvalidRequest, NotFound
from holdfast.resources.runs import delete_run, unfinished_by_thread

router = APIRouter(tags=["runs"], route_class=JsonRoute)


class BulkCancel(RequestBody):
    """Runs of one thread by their ids, or all runs in a state."""

    thread_id: UUID | None = None
    run_ids: list[UUID] | None = None
    status: Literal["pending", "running", "all"] | None = None


@router.post("/runs/batch")
async def create_batch(web: Web, body: Annotated[list[RunCreate], Body(min_length=1, max_length=1000)]) -> Response:
    return Json([present_run(await create_from(web, one, None)) for one in body])


@router.post("/runs/cancel", status_code=204)
async def cancel_many(
    web: Web, body: BulkCancel, action: Annotated[Literal["interrupt", "rollback"], Query()] = "interrupt"
) -> Response:
    if (body.status is None) == (body.thread_id is None and not body.run_ids):
        raise InvalidRequest("Give either thread_id with run_ids, or status.")
    if body.status is None and (body.thread_id is None or not body.run_ids):
        raise InvalidRequest("thread_id and run_ids belong together.")
    if body.thread_id is not None:
        wanted: dict[UUID, list[UUID]] = {body.thread_id: body.run_ids or []}
    else:
        async with web.database.connection() as connection:
            wanted = await unfinished_by_thread(connection, body.status or "all")
    found = 0
    for thread_id, run_ids in wanted.items():
        cancelled = await web.cancel(thread_id, run_ids, action)
        found += len(cancelled.ended) + len(cancelled.requested)
    if not found:
        raise NotFound("None of these runs is unfinished.")
    return Response(status_code=204)


@router.delete("/threads/{thread_id}/runs/{run_id}", status_code=204)
async def delete(web: Web, thread_id: UUID, run_id: UUID) -> Response:
    await delete_run(web.database, thread_id, run_id)
    return Response(status_code=204)
