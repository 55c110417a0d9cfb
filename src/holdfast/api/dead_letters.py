"""/dead-letters: runs that were given up, and what can be done with them. Holdfast's own, not part of the LangGraph
API.

The rights on a letter follow from those on its thread: a caller who may read the thread may read the letter, one who
may create a run in the thread may retry it, and one who may change the thread may discard it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Body as FromBody
from fastapi import Query
from psycopg.rows import DictRow
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from holdfast.api.bodies import Contained, Flag, Number, Whole
from holdfast.api.bulk import process_each
from holdfast.api.context import Web, WebContext
from holdfast.api.destructive import Destructive
from holdfast.api.errors import Json, sentence_about
from holdfast.api.listing import Page, metadata_filter, page
from holdfast.api.request_context import forward
from holdfast.api.response_models import PLACE, Failure, Run, answers, pages, refusals
from holdfast.api.routes import Routes
from holdfast.api.streaming import locations
from holdfast.api.submit import announce_requested_run
from holdfast.db.stored_json import as_object
from holdfast.engine.dead_letters.letters import (
    DeadLetterFilters,
    LetterState,
    discard,
    get_letter,
    list_letters,
    oldest_letters,
    present_letter,
)
from holdfast.engine.dead_letters.retry import RetryFrom, RetryOptions, retry_letter
from holdfast.engine.runs import present_run
from holdfast.engine.states import DeadLetter
from holdfast.errors import InvalidRequest, NotFound
from holdfast.graphs.assistants import assistant_named

routes = Routes(tags=["dead letters"])

# A hundred years of seconds.
MAX_AGE_SECONDS = 3_155_760_000


class Letter(BaseModel):
    """A run that was given up."""

    run_id: UUID
    thread_id: UUID
    assistant_id: UUID
    graph_id: str
    reason: DeadLetter = Field(
        description="`retries_exhausted`: it failed with transient errors too often. `poison`: its workers died of it. "
        "`graph_gone`: no worker has its graph."
    )
    state: LetterState = Field(description="`open` until it is retried, discarded or expires.")
    error: Failure | None
    traceback: str | None
    attempts: int
    retries: int
    crashes: int
    checkpoint_id: str | None = Field(description="The last checkpoint that the run wrote.")
    input: Any
    metadata: dict[str, Any]
    kwargs: dict[str, Any]
    created_at: datetime
    started_at: datetime | None
    dead_since: datetime
    settled_at: datetime | None = Field(description="When it was retried or discarded, or expired.")
    retried_by: UUID | None = Field(description="The run that retries it.")
    retry_of: UUID | None = Field(description="The dead letter that this run retried.")


class LetterRetry(Destructive):
    model_config = ConfigDict(populate_by_name=True)

    begin: RetryFrom = Field(
        default="checkpoint",
        alias="from",
        description="`checkpoint`: continue after the last checkpoint, without repeating durable steps. `start`: begin "
        "again with the state that the run began with.",
    )
    input: Any = Field(default=None, description="Another input, from the `start`.")
    fork: Flag = Field(
        default=False,
        description="Even if other runs came after in the thread: what they did stays in its history, but is not its "
        "state any more.",
    )


class LetterFilters(Destructive):
    """Which letters. Several conditions must all hold; to mean all letters, say so with `all`."""

    run_ids: list[UUID] | None = Field(default=None, max_length=1000)
    reason: DeadLetter | None = None
    assistant_id: str | None = Field(default=None, description="A graph's name, or an assistant's UUID.")
    graph_id: str | None = None
    thread_id: UUID | None = None
    metadata: Contained = Field(default_factory=dict, description="What the run's metadata must contain.")
    older_than: Number | None = Field(
        default=None, ge=0, le=MAX_AGE_SECONDS, description="Seconds since it was given up, at least."
    )
    newer_than: Number | None = Field(
        default=None, ge=0, le=MAX_AGE_SECONDS, description="Seconds since it was given up, at most."
    )
    all: Flag = False
    limit: Whole = Field(default=100, ge=1, le=1000, description="At most this many, the oldest first.")


class LettersRetry(LetterFilters):
    model_config = ConfigDict(populate_by_name=True)

    begin: RetryFrom = Field(default="checkpoint", alias="from")
    fork: Flag = False


class Skipped(BaseModel):
    run_id: UUID
    detail: str


class RetriedLetter(BaseModel):
    run_id: UUID
    retried_by: UUID


class Retried(BaseModel):
    retried: int
    runs: list[RetriedLetter]
    skipped: list[Skipped] = Field(description="The letters that were skipped, with the reason.")
    more: bool = Field(description="Whether there are more than `limit`.")


class Discarded(BaseModel):
    discarded: int
    runs: list[UUID]
    skipped: list[Skipped]
    more: bool


@routes.get(
    "/dead-letters",
    summary="List dead letters",
    description="Open dead letters, the latest first. A Holdfast extension.",
    responses=pages(list[Letter]),
)
async def list_open(
    web: Web,
    reason: DeadLetter | None = None,
    assistant_id: Annotated[str | None, Query(description="A graph's name, or an assistant's UUID.")] = None,
    graph_id: str | None = None,
    thread_id: UUID | None = None,
    metadata: Annotated[str | None, Query(description="A JSON object that the run's metadata must contain.")] = None,
    older_than: Annotated[
        float | None, Query(ge=0, le=MAX_AGE_SECONDS, description="Seconds since it was given up.")
    ] = None,
    newer_than: Annotated[float | None, Query(ge=0, le=MAX_AGE_SECONDS)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    body = LetterFilters(
        reason=reason,
        assistant_id=assistant_id,
        graph_id=graph_id,
        thread_id=thread_id,
        metadata=metadata_filter(metadata),
        older_than=older_than,
        newer_than=newer_than,
    )
    filters = await _filters(web, body)
    part = Page(limit=limit, offset=offset)
    async with web.database.connection() as connection:
        rows = await list_letters(connection, filters, part.within(web.settings))
    shown, headers = page(rows, part)
    return Json([present_letter(row) for row in shown], headers=headers)


@routes.post(
    "/dead-letters/retry",
    summary="Retry dead letters",
    description="Each separately: a letter that cannot be retried does not prevent the others. A Holdfast extension.",
    responses=answers(Retried),
)
async def retry_many(web: Web, body: LettersRetry) -> Response:
    await web.caller.may("threads", "create_run", {"thread_id": None, "metadata": {}, "kwargs": {}})
    found, more = await _found(web, body)

    async def retry_one(run_id: UUID) -> UUID:
        run = await _retry(web, run_id, body.begin, fork=body.fork)
        retried_by: UUID = run["run_id"]
        return retried_by

    dealt = await process_each(web.database, found, retry_one)
    runs = [{"run_id": run_id, "retried_by": retried_by} for run_id, retried_by in dealt.done.items()]
    return Json({"retried": len(runs), "runs": runs, "skipped": _skipped(dealt.failed), "more": more})


@routes.post(
    "/dead-letters/discard",
    summary="Discard dead letters",
    description="The runs stay failed. A Holdfast extension.",
    responses=answers(Discarded),
)
async def discard_many(web: Web, body: LetterFilters) -> Response:
    await web.caller.may("threads", "update", {"thread_id": None})
    found, more = await _found(web, body)

    async def close(run_id: UUID) -> None:
        await _discard(web, run_id)

    dealt = await process_each(web.database, found, close)
    runs = list(dealt.done)
    return Json({"discarded": len(runs), "runs": runs, "skipped": _skipped(dealt.failed), "more": more})


@routes.get(
    "/dead-letters/{run_id}",
    summary="Get a dead letter",
    description="Open or not, for as long as the run is kept. A Holdfast extension.",
    responses=answers(Letter, 404),
)
async def get(web: Web, run_id: UUID) -> Response:
    letter = await _letter(web, run_id)
    await _may(web, letter, "read")
    return Json(present_letter(letter))


@routes.post(
    "/dead-letters/{run_id}/retry",
    summary="Retry a dead letter",
    description="Creates a new run in the same thread. A Holdfast extension.",
    responses=answers(Run, 404, 409, headers=PLACE),
)
async def retry(web: Web, run_id: UUID, body: Annotated[LetterRetry | None, FromBody()] = None) -> Response:
    body = body or LetterRetry()
    edited = "input" in body.model_fields_set
    if edited and body.begin != "start":
        raise InvalidRequest("input: another input can only be given with from 'start'; the state has the first one.")
    run = await _retry(web, run_id, body.begin, fork=body.fork, given={"input": body.input} if edited else None)
    return Json(present_run(run), headers={"content-location": locations(run, "")["content-location"]})


@routes.post(
    "/dead-letters/{run_id}/discard",
    summary="Discard a dead letter",
    description="The run stays failed. A Holdfast extension.",
    responses=answers(Letter, 404, 409),
)
async def discard_one(web: Web, run_id: UUID) -> Response:
    return Json(present_letter(await _discard(web, run_id)))


@routes.delete(
    "/dead-letters/{run_id}",
    status_code=204,
    summary="Discard a dead letter, without an answer",
    responses=refusals(404, 409),
)
async def delete(web: Web, run_id: UUID) -> Response:
    await _discard(web, run_id)
    return Response(status_code=204)


async def _filters(web: WebContext, body: LetterFilters) -> DeadLetterFilters:
    """The conditions of a request, restricted to what the caller may see."""
    named = body.assistant_id
    assistant_id = None if named is None else assistant_named(web.catalog.graph_ids, named)
    asked: dict[str, Any] = {"metadata": {}, "status": None, "limit": body.limit, "offset": 0}
    visible = await web.caller.may("threads", "search", asked)
    return DeadLetterFilters(
        run_ids=body.run_ids,
        reason=body.reason,
        assistant_id=assistant_id,
        graph_id=body.graph_id,
        thread_id=body.thread_id,
        metadata=body.metadata,
        older_than=body.older_than,
        newer_than=body.newer_than,
        visible=visible,
    )


async def _found(web: WebContext, body: LetterFilters) -> tuple[list[UUID], bool]:
    """The letters that a request selects, and whether there are more. They are sorted by thread: a request with an
    idempotency key processes them in one transaction, which must take the locks in this order to avoid deadlocks."""
    asked = body.model_dump(exclude={"limit", "all", "begin", "fork"}, exclude_none=True, exclude_defaults=True)
    if not asked and not body.all:
        raise InvalidRequest(
            "Say which letters: by run_ids, reason, graph_id or another filter, or all of them by all."
        )
    async with web.database.connection() as connection:
        rows = await oldest_letters(connection, await _filters(web, body), body.limit + 1)
    shown = sorted(rows[: body.limit], key=lambda row: (row["thread_id"], row["run_id"]))
    return [row["run_id"] for row in shown], len(rows) > body.limit


def _skipped(failed: Mapping[UUID, Exception]) -> list[dict[str, Any]]:
    return [{"run_id": run_id, "detail": sentence_about(error)} for run_id, error in failed.items()]


async def _letter(web: WebContext, run_id: UUID) -> DictRow:
    async with web.database.connection() as connection:
        return await get_letter(connection, run_id)


async def _may(web: WebContext, letter: DictRow, access: Literal["read", "update"]) -> None:
    try:
        await web.may_thread(letter["thread_id"], access, run_id=letter["run_id"])
    except NotFound:
        raise _invisible(letter) from None


def _invisible(letter: DictRow) -> NotFound:
    return NotFound("Dead letter", letter["run_id"])


async def _discard(web: WebContext, run_id: UUID) -> DictRow:
    await _may(web, await _letter(web, run_id), "update")
    async with web.database.transaction() as connection:
        return await discard(connection, run_id)


async def _retry(
    web: WebContext, run_id: UUID, begin: RetryFrom, *, fork: bool, given: Mapping[str, Any] | None = None
) -> DictRow:
    """Retry a letter, and notify the workers. The run keeps the user and the forwarded headers of the letter's creator,
    unless the caller gives another input: that runs as the caller, with the headers of this request."""
    letter = await _letter(web, run_id)
    kwargs = {**as_object(letter["kwargs"]), **(given or {})}
    user = None if given is None else web.caller.user
    asked: dict[str, Any] = {
        "thread_id": letter["thread_id"],
        "assistant_id": letter["assistant_id"],
        "status": "pending",
        "metadata": as_object(letter["metadata"]),
        "prevent_insert_if_inflight": False,
        "multitask_strategy": "enqueue",
        "if_not_exists": "reject",
        "after_seconds": 0,
        "kwargs": kwargs if user is None else forward(kwargs),
    }
    visible = await web.caller.may("threads", "create_run", asked)
    try:
        await web.require("thread", letter["thread_id"], visible)
    except NotFound:
        raise _invisible(letter) from None
    if user is not None:
        asked["kwargs"]["user"] = user.stored()
    how = RetryOptions(
        start=begin == "start",
        fork=fork,
        edited=given is not None,
        kwargs=asked["kwargs"],
        metadata=asked["metadata"] or {},
        visible=visible,
        tenant_id=web.caller.tenant or "",
        quota=web.quota,
    )
    return announce_requested_run(web, await retry_letter(web.database, letter, how))
