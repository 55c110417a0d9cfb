"""/runs/{run_id}/timeline and /activity: where the time goes. Holdfast's own, not part of the LangGraph API."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, Field
from starlette.responses import Response

from holdfast.api.context import Web, WebContext
from holdfast.api.errors import Json
from holdfast.api.fleet import may_fleet
from holdfast.api.response_models import RunStatus, answers
from holdfast.api.routes import Routes
from holdfast.api.runs import run_of
from holdfast.engine.threads import present
from holdfast.insight.timeline import SpanKind, run_timeline

routes = Routes(tags=["runs"])
activity_routes = Routes(tags=["fleet"])


class TimelineSpan(BaseModel):
    """A stretch of a run's time."""

    kind: SpanKind
    what: str
    attempt: int | None = Field(description="The attempt that it is part of; null between attempts.")
    worker_id: UUID | None = Field(description="For an attempt: its worker, if known.")
    began_at: datetime
    ended_at: datetime | None = Field(description="Null while it is under way.")
    seconds: float


class RunTimeline(BaseModel):
    """Where a run's time went. Spans are in order; those of steps lie within their attempt's."""

    run_id: UUID
    thread_id: UUID
    status: RunStatus
    attempts: int
    retries: int
    crashes: int
    created_at: datetime = Field(description="When it was due, if it was created for later.")
    started_at: datetime | None
    finished_at: datetime | None
    seconds: float
    queued_seconds: float
    working_seconds: float
    between_seconds: float = Field(description="Between attempts: pauses before retries, take-overs, hand-overs.")
    journal_wait_seconds: float | None = Field(
        description="What all attempts waited for their checkpoints and events to be written; null while unknown. An "
        "attempt whose worker was lost is not counted: `notes` names it."
    )
    spans: list[TimelineSpan]
    notes: list[str] = Field(description="What is not known, and why.")


class RunningRun(BaseModel):
    run_id: UUID
    thread_id: UUID
    graph_id: str
    attempt: int
    worker_id: UUID
    seconds: float = Field(description="Since it first started.")


class Activity(BaseModel):
    """At most about a second old."""

    window_seconds: int
    created: int = Field(description="Runs that became due within the window.")
    finished: dict[str, int] = Field(description="Runs that ended within the window, by status.")
    created_per_second: float
    finished_per_second: float
    median_seconds: dict[str, float] = Field(description="From first start to end, by status.")
    running: list[RunningRun] = Field(description="The longest running runs.")


async def _timeline(web: WebContext, run_id: UUID, thread_id: UUID | None) -> Response:
    await run_of(web, run_id, thread_id)
    async with web.database.connection() as connection:
        return Json(present(await run_timeline(connection, run_id)))


@routes.get(
    "/threads/{thread_id}/runs/{run_id}/timeline",
    summary="Where a run's time went",
    description="From the run's row, its events and its checkpoints, as far as they are kept. A Holdfast extension.",
    responses=answers(RunTimeline, 404),
)
async def timeline(web: Web, thread_id: UUID, run_id: UUID) -> Response:
    return await _timeline(web, run_id, thread_id)


@routes.get(
    "/runs/{run_id}/timeline",
    summary="Where a run's time went, by its id",
    description="By the id of the run only. A Holdfast extension.",
    responses=answers(RunTimeline, 404),
)
async def timeline_by_id(web: Web, run_id: UUID) -> Response:
    return await _timeline(web, run_id, None)


@activity_routes.get(
    "/activity",
    summary="What the fleet is doing",
    description="Rates over the last minute, and the runs that are running. A Holdfast extension.",
    responses=answers(Activity),
)
async def activity(web: Web) -> Response:
    await may_fleet(web, "queue", "read")
    return Json(await web.activity.figures(web.database))
