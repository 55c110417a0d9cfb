"""/threads/{thread_id}/runs/crons and /runs/crons"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import APIRouter, Response
from fastapi import Body as FromBody
from psycopg.rows import DictRow
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from holdfast.api.bodies import RunCreate
from holdfast.api.context import Web, WebContext
from holdfast.api.edge import JsonRoute
from holdfast.api.errors import Json
from holdfast.api.listing import NullsAreAbsent, Search, clean_configurable, clean_metadata, only, page
from holdfast.api.runs import request_kwargs
from holdfast.errors import BadRequest, InvalidRequest, NotFound
from holdfast.graphs import assistants as system
from holdfast.resources.assistants import resolve_assistant_row
from holdfast.resources.crons import (
    CronContent,
    Filters,
    SortBy,
    change_cron,
    count_crons,
    create_cron,
    delete_cron,
    get_cron,
    get_cron_for_change,
    new_cron_id,
    search_crons,
)
from holdfast.resources.threads import get_thread, present

router = APIRouter(tags=["crons"], route_class=JsonRoute)

Column = Literal[
    "cron_id",
    "assistant_id",
    "thread_id",
    "user_id",
    "end_time",
    "schedule",
    "timezone",
    "payload",
    "next_run_date",
    "metadata",
    "on_run_completed",
    "enabled",
    "created_at",
    "updated_at",
    "now",
]


def _in_utc(value: datetime) -> datetime:
    # Postgres knows more years than Python, and an offset can lead out of those Python knows.
    if not 1970 <= value.year <= 9000:
        raise ValueError("must be between the years 1970 and 9000")
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


SCHEDULE = "Five fields of cron, or six with the seconds last; or @daily and its like."
ScheduleText = Annotated[str, Field(max_length=500, description=SCHEDULE)]
Timezone = Annotated[str, Field(max_length=100, description="An IANA name. Without it the schedule is in UTC.")]
EndTime = Annotated[datetime, AfterValidator(_in_utc), Field(description="No firings later. In UTC unless it says so.")]
OnRunCompleted = Annotated[
    Literal["delete", "keep"],
    Field(
        description="What becomes of the thread of each run. A cron of a thread keeps its thread whatever this says."
    ),
]


class CronCreate(NullsAreAbsent, RunCreate):
    """A run, and when it is to be."""

    schedule: ScheduleText
    timezone: Timezone | None = None
    end_time: EndTime | None = None
    enabled: bool | None = None
    on_run_completed: OnRunCompleted | None = None


class CronPatch(RunCreate):
    """What is left out stays as it is, and so does what is null, except `end_time`."""

    # What a newer client sends counts as something, though it changes nothing.
    model_config = ConfigDict(extra="allow")

    assistant_id: str = Field(default="", exclude=True, description="Cannot be changed: ignored.")
    schedule: ScheduleText | None = None
    timezone: Timezone | None = None
    end_time: EndTime | None = None
    enabled: bool | None = None
    on_run_completed: OnRunCompleted | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key == "end_time"}


class CronCount(NullsAreAbsent):
    assistant_id: str | None = None
    thread_id: UUID | None = None
    enabled: bool | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class CronSearch(Search):
    assistant_id: str | None = None
    thread_id: UUID | None = None
    enabled: bool | None = None
    sort_by: SortBy = "created_at"
    select: list[Column] | None = None


@router.post("/threads/{thread_id}/runs/crons")
async def create_for_thread(web: Web, thread_id: UUID, body: CronCreate) -> Response:
    return await _create(web, body, thread_id)


@router.post("/runs/crons")
async def create(web: Web, body: CronCreate) -> Response:
    return await _create(web, body, None)


@router.post("/runs/crons/search")
async def search(web: Web, body: Annotated[CronSearch | None, FromBody()] = None) -> Response:
    body = body or CronSearch()
    async with web.database.connection() as connection:
        rows = await search_crons(
            connection,
            _filters(web, body),
            sort_by=body.sort_by,
            ascending=body.sort_order == "asc",
            limit=body.fetch,
            offset=body.offset,
        )
    found, headers = page(rows, body)
    return Json([only(_shown(row, now="now" in (body.select or ())), body.select) for row in found], headers=headers)


@router.post("/runs/crons/count")
async def count(web: Web, body: Annotated[CronCount | None, FromBody()] = None) -> Response:
    filters = _filters(web, body or CronCount())
    async with web.database.connection() as connection:
        return Json(await count_crons(connection, filters))


@router.get("/runs/crons/{cron_id}")
async def get(web: Web, cron_id: UUID) -> Response:
    async with web.database.connection() as connection:
        return Json(_shown(await get_cron(connection, cron_id)))


@router.patch("/runs/crons/{cron_id}")
async def patch(web: Web, cron_id: UUID, body: CronPatch) -> Response:
    if not body.model_fields_set:
        raise BadRequest("The request body is empty: there is nothing to change.")
    async with web.database.transaction() as connection:
        old = await get_cron_for_change(connection, cron_id)
        changed = _changed(old["payload"], body)
        metadata = {**old["metadata"], **clean_metadata(body.metadata)}
        content = _content(cron_id, UUID(changed.assistant_id), changed, metadata, stateless=old["thread_id"] is None)
        return Json(_shown(await change_cron(connection, old, content)))


@router.delete("/runs/crons/{cron_id}", status_code=204)
async def delete(web: Web, cron_id: UUID) -> Response:
    async with web.database.connection() as connection:
        await delete_cron(connection, cron_id)
    return Response(status_code=204)


async def _create(web: WebContext, body: CronCreate, thread_id: UUID | None) -> Response:
    async with web.database.connection() as connection:
        if thread_id is not None:
            await get_thread(connection, thread_id)
        assistant = await resolve_assistant_row(connection, web.catalog, body.assistant_id)
        graph_id, assistant_id = assistant["graph_id"], assistant["assistant_id"]
        if graph_id not in web.catalog.graph_ids:
            raise NotFound(f"Assistant {body.assistant_id} is for graph '{graph_id}', which this server does not have.")
        cron_id = new_cron_id()
        content = _content(cron_id, assistant_id, body, clean_metadata(body.metadata), stateless=thread_id is None)
        return Json(_shown(await create_cron(connection, cron_id, assistant_id, thread_id, content)))


def _content(
    cron_id: UUID, assistant_id: UUID, body: CronCreate, metadata: Mapping[str, Any], *, stateless: bool
) -> CronContent:
    completed: Literal["delete", "keep"] | None = (body.on_run_completed or "delete") if stateless else None
    kwargs = request_kwargs(body, stateless=stateless, temporary=completed == "delete")
    if b"\\u0000" in orjson.dumps(kwargs["config"].get("metadata") or {}):
        # It becomes the metadata of runs when nobody is there to be told.
        raise InvalidRequest("config.metadata: it holds a NUL character, which cannot be stored.")
    # After the request is looked at: its own options and context exclude each other, this does not count.
    identity = {"cron_id": str(cron_id)}
    kwargs["config"]["configurable"] = {**(kwargs["config"].get("configurable") or {}), **identity}
    payload = _given(body)
    config: dict[str, Any] = payload.get("config") or {}
    payload["assistant_id"] = str(assistant_id)
    payload["config"] = {**config, "configurable": {**clean_configurable(config.get("configurable") or {}), **identity}}
    if "metadata" in payload:
        payload["metadata"] = clean_metadata(payload["metadata"])
    return CronContent(
        schedule=body.schedule,
        timezone=body.timezone,
        end_time=body.end_time,
        enabled=body.enabled is not False,
        on_run_completed=completed,
        metadata=metadata,
        payload=payload,
        template={
            "kwargs": kwargs,
            "multitask_strategy": body.multitask_strategy or "enqueue",
            "after_seconds": body.after_seconds,
            "priority": body.priority,
        },
    )


def _changed(payload: dict[str, Any], patch: CronPatch) -> CronCreate:
    """The request that would have created the cron as it is to be."""
    changes = _given(patch)
    merged = {**payload, **changes}
    if "end_time" in patch.model_fields_set and patch.end_time is None:
        merged.pop("end_time", None)
    config: dict[str, Any] = dict(merged.get("config") or {})
    configurable = {key: value for key, value in (config.pop("configurable", None) or {}).items() if key != "cron_id"}
    # Two names of one thing: the one that is given takes the place of the other.
    if "context" in changes and not (changes.get("config") or {}).get("configurable"):
        configurable = {}
    elif configurable and "config" in changes and "context" not in changes:
        merged.pop("context", None)
    merged["config"] = {**config, **({"configurable": configurable} if configurable else {})}
    return CronCreate.model_validate(merged)


def _given(body: RunCreate) -> dict[str, Any]:
    """What a request says, without nulls and without what this server does not know."""
    fields = {name for name in body.model_fields_set if name in type(body).model_fields}
    shown = body.model_dump(mode="json", exclude_unset=True, include=fields)
    if isinstance(body, CronCreate | CronPatch) and body.end_time is not None:
        shown["end_time"] = body.end_time.isoformat()
    return {name: value for name, value in shown.items() if value is not None}


def _filters(web: WebContext, body: CronSearch | CronCount) -> Filters:
    assistant_id: UUID | None = None
    if body.assistant_id is not None:
        own = body.assistant_id in web.catalog.graph_ids
        try:
            assistant_id = system.assistant_id(body.assistant_id) if own else UUID(body.assistant_id)
        except ValueError:
            raise InvalidRequest(f"assistant_id: '{body.assistant_id}' is neither a UUID nor a graph.") from None
    return Filters(assistant_id=assistant_id, thread_id=body.thread_id, enabled=body.enabled, metadata=body.metadata)


def _shown(row: DictRow, *, now: bool = False) -> dict[str, Any]:
    return {key: value for key, value in present(row).items() if now or key != "now"}
