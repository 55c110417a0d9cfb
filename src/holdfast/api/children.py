"""/threads/{thread_id}/runs/{run_id}/children: what a run has spawned. Holdfast's own, not LangGraph's."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from holdfast.api.context import Web
from holdfast.api.errors import Json
from holdfast.api.listing import Page, page
from holdfast.api.response_models import Failure, pages
from holdfast.api.routes import Routes
from holdfast.engine.children.spawn import list_children
from holdfast.engine.runs import get_run
from holdfast.engine.threads import present

routes = Routes(tags=["runs"])

ChildStatus = Literal[
    "pending", "running", "paused", "success", "error", "timeout", "interrupted", "rolled_back", "deleted"
]


class ChildRun(BaseModel):
    """A child of a run. Once it has ended, nothing here changes any more."""

    key: str
    run_id: UUID
    thread_id: UUID
    assistant_id: UUID
    graph_id: str
    status: ChildStatus = Field(description="`paused`: it has not ended, because its thread waits for an answer.")
    error: Failure | None
    awaited: bool = Field(description="Whether the parent waits for it, or waited for it in its last wait.")
    children: int = Field(description="The number of its own children.")
    created_at: datetime
    ended_at: datetime | None


@routes.get(
    "/threads/{thread_id}/runs/{run_id}/children",
    summary="List a run's children",
    description="In the order in which they were spawned. A Holdfast extension.",
    responses=pages(list[ChildRun], 404),
)
async def children(
    web: Web,
    thread_id: UUID,
    run_id: UUID,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    part = Page(limit=limit, offset=offset)
    await web.may_thread(thread_id, "read", run_id=run_id)
    async with web.database.connection() as connection:
        await get_run(connection, run_id, thread_id)
        rows = await list_children(connection, run_id, part.within(web.settings))
    shown, headers = page(rows, part)
    return Json([present(row) for row in shown], headers=headers)
