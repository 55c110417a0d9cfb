"""/webhooks/deliveries: what became of the webhooks. Holdfast's own, not part of the LangGraph API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from holdfast.api.context import Web
from holdfast.api.errors import Json
from holdfast.api.listing import Page, page
from holdfast.api.response_models import pages, refusals
from holdfast.api.routes import Routes
from holdfast.engine.outbox import announce_webhooks
from holdfast.engine.threads import present
from holdfast.webhooks.deliveries import get_delivery, list_deliveries, redeliver

routes = Routes(tags=["webhooks"])

DeliveryState = Literal["pending", "delivered", "failed"]


class WebhookDelivery(BaseModel):
    """The webhook of one run that has ended."""

    delivery_id: UUID = Field(description="The `webhook-id` of every try.")
    run_id: UUID
    thread_id: UUID
    url: str
    state: DeliveryState
    attempts: int = Field(description="Tries, since the last redelivery by hand if there was one.")
    next_attempt_at: datetime | None = Field(description="Only while it is pending.")
    last_status: int | None = Field(description="The status of the last answer, if there was one.")
    last_error: str | None = Field(description="Why the last try failed, if it did.")
    created_at: datetime
    delivered_at: datetime | None


@routes.get(
    "/webhooks/deliveries",
    summary="List webhook deliveries",
    description="Newest first. Finished deliveries are kept for WEBHOOK_TTL_SECONDS. A Holdfast extension.",
    responses=pages(list[WebhookDelivery]),
)
async def deliveries(
    web: Web,
    run_id: UUID | None = None,
    state: DeliveryState | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    # A caller who may see a thread may see its runs and their deliveries.
    asked: dict[str, Any] = {"metadata": {}, "status": None, "limit": limit, "offset": offset}
    visible = await web.caller.may("threads", "search", asked)
    part = Page(limit=limit, offset=offset)
    async with web.database.connection() as connection:
        rows = await list_deliveries(connection, run_id, state, part.within(web.settings), visible)
    shown, headers = page(rows, part)
    return Json([present(row) for row in shown], headers=headers)


@routes.post(
    "/webhooks/deliveries/{delivery_id}/redeliver",
    status_code=202,
    summary="Send a webhook again",
    description="At once, under the same id, and with the retries of a new delivery. A Holdfast extension.",
    responses={202: {"model": WebhookDelivery, "description": "It will be sent soon."}, **refusals(404)},
)
async def redeliver_one(web: Web, delivery_id: UUID) -> Response:
    async with web.database.connection() as connection:
        found = await get_delivery(connection, delivery_id)
    asked = {"thread_id": found["thread_id"], "run_id": found["run_id"]}
    visible = await web.caller.may("threads", "update", asked)
    async with web.database.connection() as connection:
        await get_delivery(connection, delivery_id, visible)
        again = await redeliver(connection, delivery_id)
    announce_webhooks(web.signals)
    return Json(present(again), status_code=202)
