"""/threads/{thread_id}/usage and /threads/{thread_id}/runs/{run_id}/usage: what was used, by model. Holdfast's own, not
part of the LangGraph API."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from pydantic import BaseModel, Field
from starlette.responses import Response

from holdfast.api.context import Web
from holdfast.api.errors import Json
from holdfast.api.response_models import ModelUsage, Usage, answers
from holdfast.api.routes import Routes
from holdfast.db.stored_json import as_object
from holdfast.engine.budget import limits_of, remaining
from holdfast.engine.usage import NOTHING_USED, SHARED, read_shared_usage, usage_by_model, usage_totals
from holdfast.insight.usage import run_usage, thread_usage

routes = Routes()


class Budget(BaseModel):
    """The limits that there are."""

    max_cost_usd: float | None = None
    max_tokens: int | None = None
    max_seconds: float | None = None
    max_steps: int | None = None


class ThreadUsage(Usage):
    """The sum over the thread's runs, also those that were rolled back or deleted since."""

    thread_id: UUID
    models: dict[str, ModelUsage] = Field(description="By `provider:model`.")


class RunUsage(ThreadUsage):
    """What a run has used by now, and what its budget leaves it."""

    run_id: UUID
    budget: Budget
    remaining: Budget = Field(
        description="What is left for the run and those that it shares its budget with. Of a run that has ended and "
        "shared none: as it was at its end."
    )


def _used(stored: Any) -> dict[str, Any]:
    return {**(usage_totals(stored) or NOTHING_USED), "models": usage_by_model(stored)}


@routes.get(
    "/threads/{thread_id}/usage",
    tags=["threads"],
    summary="What a thread has used",
    description="Tokens, cost and steps of all runs that the thread has ever had, as far as they are durable. A "
    "Holdfast extension.",
    responses=answers(ThreadUsage, 404),
)
async def of_thread(web: Web, thread_id: UUID) -> Response:
    await web.may_thread(thread_id, "read")
    async with web.database.connection() as connection:
        stored = await thread_usage(connection, thread_id)
    return Json({"thread_id": thread_id, **_used(stored)})


@routes.get(
    "/threads/{thread_id}/runs/{run_id}/usage",
    tags=["runs"],
    summary="What a run has used",
    description="Tokens, cost and steps, as far as they are durable, and the run's budget. A Holdfast extension.",
    responses=answers(RunUsage, 404),
)
async def of_run(web: Web, thread_id: UUID, run_id: UUID) -> Response:
    await web.may_thread(thread_id, "read", run_id=run_id)
    async with web.database.connection() as connection:
        run = await run_usage(connection, thread_id, run_id)
        shared = await read_shared_usage(connection, run_id) if run["pots"] else []
    budget = limits_of(as_object(run["kwargs"]).get("budget"))
    used = _used(run["usage"])
    left = remaining(budget, used, elapsed=run["elapsed"])
    for pot in shared:
        # Its limits are the run's as well, where they are the smaller ones.
        together = {name: used[name] + float(getattr(pot, name)) for name in SHARED}
        for limit, rest in remaining(pot.limits, together, elapsed=run["elapsed"]).items():
            budget = {limit: limits_of(pot.limits)[limit], **budget}
            left[limit] = min(rest, left.get(limit, rest))
    return Json({"thread_id": thread_id, "run_id": run_id, **used, "budget": budget, "remaining": left})
