"""/interrupts and /threads/{thread_id}/runs/{run_id}/resume: what runs ask people. Holdfast's own, not part of the
LangGraph API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Query
from psycopg.rows import DictRow
from pydantic import BaseModel, Field
from starlette.responses import Response

from holdfast.api.bodies import Command, RunCreate
from holdfast.api.context import Web
from holdfast.api.errors import Json
from holdfast.api.listing import Page, metadata_filter, page
from holdfast.api.response_models import PLACE, Run, answers, pages
from holdfast.api.routes import Routes
from holdfast.api.runs import run_of
from holdfast.api.streaming import locations
from holdfast.api.submit import submit_run
from holdfast.engine.interrupts.inbox import InterruptFilters, interrupts_of_run, search_interrupts
from holdfast.engine.interrupts.resume import names_interrupts
from holdfast.engine.runs import present_run
from holdfast.engine.threads import present
from holdfast.errors import Conflict, InvalidRequest
from holdfast.graphs.assistants import assistant_named

routes = Routes(tags=["interrupts"])

# Seconds. Nothing is older than this; Postgres cannot count much further.
MAX_AGE_SECONDS = 3e9


class Question(BaseModel):
    """A question that a run asked."""

    interrupt_id: str
    thread_id: UUID
    run_id: UUID = Field(description="The run that asked.")
    assistant_id: UUID
    graph_id: str
    state: Literal["waiting", "answered", "closed"] = Field(
        description="`closed`: the thread continued without an answer."
    )
    value: Any = Field(description="The value that the graph passed to `interrupt()`.")
    form: dict[str, Any] | None = Field(description="`fields` or `schema`, if the interrupt has a form.")
    asked_at: datetime
    deadline_at: datetime | None
    escalated_at: datetime | None
    escalated_to: str | None
    answered_at: datetime | None
    answered_by: UUID | None = Field(description="The run that answers.")
    defaulted: bool = Field(description="The default was given at the deadline.")
    metadata: dict[str, Any] = Field(description="The thread's.")


class Resume(RunCreate):
    """An answer, and the options of the run that continues with it. Options that are left out are those of the run that
    asked."""

    assistant_id: str = Field("", description="By default that of the run that asked.")
    answer: Any = Field(None, description="The answer to the only waiting interrupt of the run.")
    answers: dict[str, Any] | None = Field(None, description="Answers to several interrupts, by their ids.")


# Options of a run, and where they are in its kwargs.
KEPT = {
    "config": ("config",),
    "context": ("context",),
    "stream_mode": ("stream_mode",),
    "stream_subgraphs": ("subgraphs",),
    "interrupt_before": ("interrupt_before",),
    "interrupt_after": ("interrupt_after",),
    "durability": ("durability", "checkpoint_during"),
    "webhook": ("webhook",),
}


@routes.get(
    "/interrupts",
    summary="List interrupts that wait for an answer",
    description="The inbox: interrupts without an answer, the oldest first. A Holdfast extension.",
    responses=pages(list[Question]),
)
async def inbox(
    web: Web,
    state: Literal["waiting", "answered", "closed", "all"] = "waiting",
    assistant_id: Annotated[str | None, Query(description="A graph's name, or an assistant's UUID.")] = None,
    graph_id: str | None = None,
    thread_id: UUID | None = None,
    run_id: UUID | None = None,
    interrupt_id: str | None = None,
    older_than: Annotated[
        float | None, Query(ge=0, le=MAX_AGE_SECONDS, description="Seconds since it was asked.")
    ] = None,
    newer_than: Annotated[
        float | None, Query(ge=0, le=MAX_AGE_SECONDS, description="Seconds since it was asked.")
    ] = None,
    escalated: bool | None = None,
    metadata: Annotated[str | None, Query(description="JSON that the thread's metadata must contain.")] = None,
    order: Literal["asc", "desc"] = "asc",
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    wanted = metadata_filter(metadata)
    # A caller who may see a thread may see its interrupts.
    asked: dict[str, Any] = {"metadata": wanted, "status": None, "limit": limit, "offset": offset}
    visible = await web.caller.may("threads", "search", asked)
    filters = InterruptFilters(
        state=None if state == "all" else state,
        interrupt_id=interrupt_id,
        thread_id=thread_id,
        run_id=run_id,
        assistant_id=None if assistant_id is None else assistant_named(web.catalog.graph_ids, assistant_id),
        graph_id=graph_id,
        older_than=older_than,
        newer_than=newer_than,
        escalated=escalated,
        metadata=asked["metadata"] or {},
        visible=visible,
    )
    part = Page(limit=limit, offset=offset)
    async with web.database.connection() as connection:
        rows = await search_interrupts(connection, filters, ascending=order == "asc", part=part.within(web.settings))
    shown, headers = page(rows, part)
    return Json([present(row) for row in shown], headers=headers)


@routes.post(
    "/threads/{thread_id}/runs/{run_id}/resume",
    summary="Answer the interrupts of a run",
    description="Creates the run that continues with the answer. Only the first answer is accepted: later ones get 409 "
    "with its `run_id`. A Holdfast extension.",
    responses=answers(Run, 400, 404, 409, headers=PLACE),
)
async def resume(web: Web, thread_id: UUID, run_id: UUID, body: Resume) -> Response:
    if body.command is not None or body.input is not None:
        raise InvalidRequest("Give answer, or answers by interrupt id; not input or command.")
    asking = await run_of(web, run_id, thread_id)
    async with web.database.connection() as connection:
        questions = await interrupts_of_run(connection, thread_id, run_id)
    given = _by_id(asking, questions, body)
    described = body.model_copy(
        update={
            "assistant_id": body.assistant_id or str(asking["assistant_id"]),
            "command": Command(resume=given),
            "if_not_exists": None,
        }
    )
    kept = {key: asking["kwargs"].get(key) for name, keys in KEPT.items() for key in keys if _is_left_out(body, name)}
    protocol = bool(asking["kwargs"].get("protocol"))
    run = await submit_run(web, described, thread_id, protocol=protocol, answers_run=run_id, kept=kept)
    return Json(present_run(run), headers={"content-location": locations(run, "")["content-location"]})


def _is_left_out(body: Resume, name: str) -> bool:
    said = body.model_fields_set
    if name in ("config", "context"):
        # Two names of the same options: the given one sets both.
        return said.isdisjoint({"config", "context", "checkpoint", "checkpoint_id"})
    return name not in said and not (name == "durability" and "checkpoint_during" in said)


def _by_id(asking: DictRow, questions: list[DictRow], body: Resume) -> dict[str, Any]:
    """The answers by interrupt id. Whether the questions still wait is decided when the run is created."""
    run_id = asking["run_id"]
    if (body.answer is None) == (body.answers is None):
        raise InvalidRequest("Give either answer, or answers by interrupt id. null is no answer.")
    if not questions:
        if asking["status"] in ("pending", "running"):
            raise Conflict(f"Run {run_id} is {asking['status']}. What it asks can be answered when it has ended.")
        raise InvalidRequest(f"Run {run_id} has not asked anything that could be answered.")
    if body.answers is not None:
        if not names_interrupts(body.answers):
            raise InvalidRequest("answers must be an object with an answer for each interrupt id.")
        return body.answers
    waiting = [question["interrupt_id"] for question in questions if question["waits"]]
    if len(waiting) > 1:
        raise InvalidRequest(f"Run {run_id} left several questions: give answers by their ids, {', '.join(waiting)}.")
    return {(waiting or [questions[-1]["interrupt_id"]])[0]: body.answer}
