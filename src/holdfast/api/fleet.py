"""/workers and /queue: what the fleet is doing. Holdfast's own, not part of the LangGraph API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from holdfast.api.context import Web, WebContext
from holdfast.api.errors import Json
from holdfast.api.listing import Page, page
from holdfast.api.response_models import answers, pages, refusals
from holdfast.api.routes import Routes
from holdfast.engine.threads import present
from holdfast.errors import Denied
from holdfast.insight.fleet import drain_worker, list_workers

routes = Routes(tags=["fleet"])

WorkerStatus = Literal["online", "draining", "offline", "lost"]


class Worker(BaseModel):
    """A worker process. One that has left is shown for a while."""

    worker_id: UUID
    status: WorkerStatus
    host: str
    pid: int
    version: str
    graphs: list[str] = Field(description="The graphs that it has; it claims no other runs.")
    capacity: int = Field(description="Its slots: how many runs it executes at once.")
    active: int = Field(description="How many runs it executes now.")
    run_ids: list[UUID]
    claims_last_minute: int
    lease_left: float = Field(description="Seconds until it counts as lost without a renewal.")
    problem: str | None = Field(description="Why an online worker cannot work and claims nothing.")
    started_at: datetime
    stopped_at: datetime | None


class Draining(BaseModel):
    worker_id: UUID
    status: WorkerStatus


class QueueFigures(BaseModel):
    """At most about a second old."""

    ready: int = Field(description="Runs that a worker could claim now.")
    scheduled: int = Field(description="Runs that are not due yet.")
    waiting: int = Field(description="Runs behind another run of their thread.")
    running: int
    oldest_seconds: float = Field(description="How long the first ready run has been ready.")
    claims_per_second: float = Field(description="Of all workers, over the last minute.")
    capacity: int = Field(description="Runs that all online workers can execute at once.")
    workers_online: int
    workers_draining: int
    unserved: dict[str, int] = Field(description="Ready runs by graph, of graphs that no online worker has.")


async def may_fleet(web: WebContext, resource: Literal["workers", "queue"], action: str, **value: Any) -> None:
    """Authorize a request about the fleet. With custom auth, a handler decides. A filter counts as a refusal, because
    the fleet has no owner and cannot be filtered."""
    visible = await web.caller.may(resource, action, value)
    if visible.restricted:
        raise Denied(403, f"Forbidden: {resource}.{action}")


@routes.get("/workers", summary="List workers", responses=pages(list[Worker]))
async def workers(
    web: Web,
    status: WorkerStatus | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    await may_fleet(web, "workers", "search")
    part = Page(limit=limit, offset=offset)
    async with web.database.connection() as connection:
        rows = await list_workers(connection, status, part.within(web.settings))
    shown, headers = page(rows, part)
    return Json([present(row) for row in shown], headers=headers)


@routes.post(
    "/workers/{worker_id}/drain",
    status_code=202,
    summary="Drain a worker",
    responses={202: {"model": Draining, "description": "It drains from its next heartbeat on."}, **refusals(404, 409)},
)
async def drain(web: Web, worker_id: UUID) -> Response:
    await may_fleet(web, "workers", "update", worker_id=worker_id)
    async with web.database.connection() as connection:
        status = await drain_worker(connection, worker_id)
    return Json({"worker_id": worker_id, "status": status}, status_code=202)


@routes.get("/queue", summary="Figures of the queue", responses=answers(QueueFigures))
async def queue(web: Web) -> Response:
    await may_fleet(web, "queue", "read")
    return Json(await web.queue.figures(web.database))
