"""/tenant: what the caller's tenant uses, and may use. Holdfast's own, not part of the LangGraph API."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import BaseModel, Field
from starlette.responses import Response

from holdfast.api.context import Web
from holdfast.api.errors import Json
from holdfast.api.response_models import answers
from holdfast.api.routes import Routes
from holdfast.errors import NotFound
from holdfast.resources.tenants import default_limits, effective_limits, list_tenants

routes = Routes(tags=["tenants"])


class TenantUse(BaseModel):
    """A null limit means no limit."""

    tenant_id: str
    queued: int = Field(description="Runs that have not started, including scheduled ones.")
    running: int
    weight: int = Field(description="Runs that are started in each of the tenant's turns. The operator sets it.")
    spent_today_usd: float = Field(description="Since midnight UTC.")
    max_queued: int | None
    max_running: int | None
    requests_per_second: float | None = Field(description="To each web process.")
    spend_per_day_usd: float | None


@routes.get(
    "/tenant",
    summary="What the caller's tenant uses",
    description="And its limits. 404 for a caller without a tenant. A Holdfast extension.",
    responses=answers(TenantUse, 404),
)
async def use(web: Web) -> Response:
    await web.caller.may_unfiltered("tenants", "read", {"tenant_id": web.caller.tenant})
    if web.caller.tenant is None:
        raise NotFound("Tenant", hint="You belong to none: there is no API key, and no authentication that names one.")
    async with web.database.connection() as connection:
        rows = await list_tenants(connection, web.caller.tenant)
    if not rows:
        raise NotFound("Tenant", web.caller.tenant)
    used = {name: rows[0][name] for name in ("tenant_id", "queued", "running", "weight", "spent_today_usd")}
    return Json({**used, **asdict(effective_limits(rows[0], default_limits(web.settings)))})
