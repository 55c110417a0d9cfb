"""/threads/{thread_id}/runs/crons and /runs/crons"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import Body as FromBody
from psycopg.rows import DictRow
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.responses import Response

from holdfast.api.assistants import runnable_assistant
from holdfast.api.bodies import Contained, Flag, NullsAreAbsent, RunCreate, Selected
from holdfast.api.budgets import fill_budget, keep_budget
from holdfast.api.context import Web, WebContext
from holdfast.api.errors import Json
from holdfast.api.listing import Search, clean_configurable, clean_metadata, only, page
from holdfast.api.request_context import forward
from holdfast.api.response_models import Cron, SelectedCron, answers, pages, refusals
from holdfast.api.routes import Routes
from holdfast.api.run_kwargs import request_kwargs
from holdfast.db.stored_json import as_object
from holdfast.engine.threads import get_thread, present
from holdfast.errors import BadRequest, InvalidRequest, NotFound
from holdfast.graphs.assistants import assistant_named
from holdfast.graphs.checkpointer import ThreadTtl
from holdfast.graphs.client_config import client_config
from holdfast.resources.crons import (
    CronContent,
    CronFilters,
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
from holdfast.streams.serialize import to_json

routes = Routes(tags=["crons"])

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

# Fields that do not affect the runs of a cron.
TIMING = frozenset({"schedule", "timezone", "end_time", "enabled", "metadata"})


def _in_utc(value: datetime) -> datetime:
    # Postgres supports more years than Python, and a timezone offset can lead to a year that Python does not support.
    if not 1970 <= value.year <= 9000:
        raise ValueError("must be between the years 1970 and 9000")
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _as_text(value: Any) -> Any:
    # pydantic interprets a number as seconds since 1970, or as milliseconds if it is large.
    if isinstance(value, (int, float)):
        raise ValueError("must be a date and time in ISO 8601")  # noqa: TRY004 (pydantic reports no other)
    return value


SCHEDULE = "Five fields of cron, or six with the seconds last; or @daily and its like."
ScheduleText = Annotated[str, Field(max_length=500, description=SCHEDULE)]
Timezone = Annotated[str, Field(max_length=100, description="An IANA name. Without it the schedule is in UTC.")]
EndTime = Annotated[
    datetime,
    BeforeValidator(_as_text),
    AfterValidator(_in_utc),
    Field(description="No runs after this moment. In UTC unless it has a time zone."),
]
OnRunCompleted = Annotated[
    Literal["delete", "keep"],
    Field(description="Whether the thread of each run is deleted or kept. A cron of a thread always keeps its thread."),
]


class CronCreate(RunCreate):
    """A run, and when it is to be."""

    schedule: ScheduleText
    timezone: Timezone | None = None
    end_time: EndTime | None = None
    enabled: Flag | None = None
    on_run_completed: OnRunCompleted | None = None


class CronPatch(RunCreate):
    """What is left out stays as it is, and so does what is null, except `end_time`."""

    # Unknown fields of newer clients count as content, although they change nothing.
    model_config = ConfigDict(extra="allow")

    assistant_id: str = Field(default="", exclude=True, description="Cannot be changed: ignored.")
    schedule: ScheduleText | None = None
    timezone: Timezone | None = None
    end_time: EndTime | None = None
    enabled: Flag | None = None
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
    enabled: Flag | None = None
    metadata: Contained = Field(default_factory=dict)


class CronSearch(Search):
    assistant_id: str | None = None
    thread_id: UUID | None = None
    enabled: Flag | None = None
    sort_by: SortBy = "created_at"
    select: Selected[Column] | None = None


@routes.post("/threads/{thread_id}/runs/crons", summary="Create a cron of a thread", responses=answers(Cron, 400, 404))
async def create_for_thread(web: Web, thread_id: UUID, body: CronCreate) -> Response:
    return await _create(web, body, thread_id)


@routes.post("/runs/crons", summary="Create a stateless cron", responses=answers(Cron, 400, 404))
async def create(web: Web, body: CronCreate) -> Response:
    return await _create(web, body, None)


@routes.post("/runs/crons/search", summary="Search crons", responses=pages(list[SelectedCron]))
async def search(web: Web, body: Annotated[CronSearch | None, FromBody()] = None) -> Response:
    body = body or CronSearch()
    filters = await _filters(web, body)
    async with web.database.connection() as connection:
        rows = await search_crons(
            connection,
            filters,
            sort_by=body.sort_by,
            ascending=body.sort_order == "asc",
            part=body.within(web.settings),
        )
    found, headers = page(rows, body)
    return Json([only(_shown(row, now="now" in (body.select or ())), body.select) for row in found], headers=headers)


@routes.post("/runs/crons/count", summary="Count crons", responses=answers(int))
async def count(web: Web, body: Annotated[CronCount | None, FromBody()] = None) -> Response:
    filters = await _filters(web, body or CronCount())
    async with web.database.connection() as connection:
        return Json(await count_crons(connection, filters))


@routes.get("/runs/crons/{cron_id}", summary="Get a cron", responses=answers(Cron, 404))
async def get(web: Web, cron_id: UUID) -> Response:
    await _may(web, cron_id, "read")
    async with web.database.connection() as connection:
        return Json(_shown(await get_cron(connection, cron_id)))


@routes.patch("/runs/crons/{cron_id}", summary="Change a cron", responses=answers(Cron, 400, 404))
async def patch(web: Web, cron_id: UUID, body: CronPatch) -> Response:
    if not body.model_fields_set:
        raise BadRequest("The request body is empty: there is nothing to change.")
    web.check_webhook(body.webhook)
    asked = await _may(web, cron_id, "update", metadata=clean_metadata(body.metadata), schedule=body.schedule)
    if _given(body).keys() - TIMING:
        await _may_run(web, cron_id)
    async with web.database.transaction() as connection:
        old = await get_cron_for_change(connection, cron_id)
        payload = _stored_payload(old)
        changed = _changed(payload, body)
        metadata = {**as_object(old["metadata"]), **(asked["metadata"] or {})}
        content = _content(
            cron_id, UUID(changed.assistant_id), changed, metadata, web.thread_ttl, stateless=old["thread_id"] is None
        )
        kwargs, before = content.template["kwargs"], as_object(as_object(old["template"]).get("kwargs"))
        keep_budget(kwargs, body.metadata, before)
        user_id = old["user_id"]
        if web.caller.user is not None and _runs_otherwise(payload, content.payload, body):
            user_id = web.caller.user_id
            _run_as_caller(web, kwargs)
        else:
            kwargs["forwarded"] = as_object(before.get("forwarded"))
            if before.get("user") is not None:
                kwargs["user"] = before["user"]
        return Json(_shown(await change_cron(connection, old, content, user_id)))


@routes.delete("/runs/crons/{cron_id}", status_code=204, summary="Delete a cron", responses=refusals(404))
async def delete(web: Web, cron_id: UUID) -> Response:
    await _may(web, cron_id, "delete")
    async with web.database.connection() as connection:
        await delete_cron(connection, cron_id)
    return Response(status_code=204)


async def _create(web: WebContext, body: CronCreate, thread_id: UUID | None) -> Response:
    web.check_webhook(body.webhook)
    assistant = await runnable_assistant(web, body.assistant_id)
    cron_id = new_cron_id()
    asked: dict[str, Any] = {
        "cron_id": cron_id,
        "thread_id": thread_id,
        "user_id": web.caller.user_id,
        "schedule": body.schedule,
        "end_time": body.end_time,
        "payload": _given(body),
        "metadata": clean_metadata(body.metadata),
    }
    await web.caller.may("crons", "create", asked)
    if thread_id is not None:
        await web.may_thread(thread_id, "create_run", assistant_id=assistant["assistant_id"], metadata={}, kwargs={})
    async with web.database.connection() as connection:
        if thread_id is not None:
            await get_thread(connection, thread_id)
        graph_id, assistant_id = assistant["graph_id"], assistant["assistant_id"]
        if graph_id not in web.catalog.graph_ids:
            raise NotFound("Graph", f"'{graph_id}' of assistant {body.assistant_id}")
        content = _content(
            cron_id, assistant_id, body, asked["metadata"] or {}, web.thread_ttl, stateless=thread_id is None
        )
        _run_as_caller(web, content.template["kwargs"])
        fill_budget(content.template["kwargs"], body.metadata, assistant, web.settings)
        owner = web.caller.tenant or ""
        row = await create_cron(
            connection, cron_id, assistant_id, thread_id, web.caller.user_id, content, tenant_id=owner
        )
        return Json(_shown(row))


def _run_as_caller(web: WebContext, kwargs: dict[str, Any]) -> None:
    """Let the caller own the runs of a cron. They get the headers that the current request forwards."""
    if web.caller.user is not None:
        kwargs["user"] = web.caller.user.stored()
    kwargs.update(forward(kwargs))


def _runs_otherwise(old: Mapping[str, Any], new: Mapping[str, Any], patch: CronPatch) -> bool:
    """Whether a patch changes the runs of a cron, and not only their times. Compared as JSON, because 1 equals True in
    Python."""
    return any(to_json(old.get(name)) != to_json(new.get(name)) for name in _given(patch).keys() - TIMING)


async def _may_run(web: WebContext, cron_id: UUID) -> None:
    """Authorize the caller to create runs in the thread of a cron, if it has one. Raises Denied and NotFound."""
    async with web.database.connection() as connection:
        cron = await get_cron(connection, cron_id)
    if cron["thread_id"] is not None:
        about: dict[str, Any] = {"assistant_id": cron["assistant_id"], "metadata": {}, "kwargs": {}}
        await web.may_thread(cron["thread_id"], "create_run", **about)


async def _may(web: WebContext, cron_id: UUID, action: str, **value: Any) -> dict[str, Any]:
    asked = {"cron_id": cron_id, **value}
    await web.require("cron", cron_id, await web.caller.may("crons", action, asked))
    return asked


def _content(
    cron_id: UUID,
    assistant_id: UUID,
    body: CronCreate,
    metadata: Mapping[str, Any],
    ttl: ThreadTtl | None,
    *,
    stateless: bool,
) -> CronContent:
    completed: Literal["delete", "keep"] | None = (body.on_run_completed or "delete") if stateless else None
    kwargs = request_kwargs(body, stateless=stateless, temporary=completed == "delete")
    if b"\\u0000" in orjson.dumps(kwargs["config"].get("metadata") or {}):
        # Checked now, because it becomes the metadata of runs, whose creation cannot report an error to the client.
        raise InvalidRequest("config.metadata: it holds a NUL character, which cannot be stored.")
    # Added after the request was validated: a request must not have both options and context, and this addition must
    # not count.
    identity = {"cron_id": str(cron_id)}
    kwargs["config"]["configurable"] = {**(kwargs["config"].get("configurable") or {}), **identity}
    payload = _given(body)
    config: dict[str, Any] = payload.get("config") or {}
    payload["assistant_id"] = str(assistant_id)
    options: dict[str, Any] = config.get("configurable") or {}
    start = {"checkpoint_id": options["checkpoint_id"]} if options.get("checkpoint_id") else {}
    payload["config"] = {**client_config(config), "configurable": {**clean_configurable(options), **start, **identity}}
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
            "thread_ttl": ttl,
        },
    )


def _stored_payload(cron: DictRow) -> dict[str, Any]:
    """The request that created a cron. If the stored value has another shape, the request is rebuilt from the columns.
    The assistant of a cron cannot be changed."""
    columns = {name: cron[name] for name in (*TIMING - {"metadata"}, "on_run_completed") if cron[name] is not None}
    return {**(as_object(cron["payload"]) or columns), "assistant_id": str(cron["assistant_id"])}


def _changed(payload: dict[str, Any], patch: CronPatch) -> CronCreate:
    """The request that would create the changed cron."""
    changes = _given(patch)
    merged = {**payload, **changes}
    if "end_time" in patch.model_fields_set and patch.end_time is None:
        merged.pop("end_time", None)
    config = dict(as_object(merged.get("config")))
    configurable = {
        key: value for key, value in as_object(config.pop("configurable", None)).items() if key != "cron_id"
    }
    # Two names of the same options: the given one replaces the other.
    if "context" in changes and not (changes.get("config") or {}).get("configurable"):
        configurable = {}
    elif configurable and "config" in changes and "context" not in changes:
        merged.pop("context", None)
    merged["config"] = {**config, **({"configurable": configurable} if configurable else {})}
    try:
        return CronCreate.model_validate(merged)
    except ValidationError as error:
        # An earlier version accepted this value.
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise InvalidRequest(f"{where}: {problem['msg']}. The cron has it from before: send another value.") from None


def _given(body: RunCreate) -> dict[str, Any]:
    """The fields of a request, without nulls and without fields that this server does not know."""
    fields = {name for name in body.model_fields_set if name in type(body).model_fields}
    shown = body.model_dump(mode="json", exclude_unset=True, include=fields)
    if isinstance(body, CronCreate | CronPatch) and body.end_time is not None:
        shown["end_time"] = body.end_time.isoformat()
    return {name: value for name, value in shown.items() if value is not None}


async def _filters(web: WebContext, body: CronSearch | CronCount) -> CronFilters:
    named = body.assistant_id
    assistant_id = None if named is None else assistant_named(web.catalog.graph_ids, named)
    asked = body.model_dump(include={"metadata", "limit", "offset", "thread_id"}) | {"assistant_id": assistant_id}
    visible = await web.caller.may("crons", "search", asked)
    return CronFilters(
        assistant_id=assistant_id,
        thread_id=body.thread_id,
        enabled=body.enabled,
        metadata=asked["metadata"] or {},
        visible=visible,
    )


def _shown(row: DictRow, *, now: bool = False) -> dict[str, Any]:
    return {key: value for key, value in present(row).items() if now or key != "now"}
