"""What the routes answer, for `/openapi.json` and for tests that compare answers with it.

Endpoints return JSON that is ready to send. These classes only describe it: no answer is validated or serialized by
them.

    @routes.post("/threads/{thread_id}/copy", summary="Copy a thread", responses=answers(Thread, 409))
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

# Postgres counts events in 64 bits; no thread has this many.
LAST_EVENT = 2**53
Responses = dict[int | str, dict[str, Any]]

RunStatus = Literal["pending", "running", "success", "error", "timeout", "interrupted"]
ThreadStatus = Literal["idle", "busy", "interrupted", "error"]
MultitaskStrategy = Literal["reject", "enqueue", "interrupt", "rollback"]


def _nothing_required(schema: dict[str, Any]) -> None:
    schema.pop("required", None)


class Selection(BaseModel):
    """An object of which a client may select fields: those that it names are there, all of them when it names none."""

    model_config = ConfigDict(json_schema_extra=_nothing_required)


class Detail(BaseModel):
    """What is wrong with the request, and what to change."""

    detail: str


class Failure(BaseModel):
    """How a run failed."""

    error: str
    message: str


class Health(BaseModel):
    ok: bool
    services: dict[str, Literal["healthy", "unhealthy", "skipped"]]


class Information(BaseModel):
    version: str
    langgraph_py_version: str
    flags: dict[str, bool]
    host: dict[str, str | None]


class Assistant(BaseModel):
    assistant_id: UUID
    graph_id: str
    name: str
    description: str | None
    config: dict[str, Any]
    context: dict[str, Any]
    metadata: dict[str, Any]
    version: int
    created_at: datetime
    updated_at: datetime


class SelectedAssistant(Selection, Assistant):
    pass


class AssistantVersion(BaseModel):
    assistant_id: UUID
    graph_id: str
    name: str
    description: str | None
    config: dict[str, Any]
    context: dict[str, Any]
    metadata: dict[str, Any]
    version: int
    created_at: datetime


class Drawing(BaseModel):
    """A graph as nodes and edges."""

    nodes: list[dict[str, Any]]
    edges: list[dict[str, Any]]


class GraphSchemas(BaseModel):
    """JSON Schemas; null for what JSON Schema cannot describe."""

    input_schema: dict[str, Any] | None
    output_schema: dict[str, Any] | None
    state_schema: dict[str, Any] | None
    config_schema: dict[str, Any]
    context_schema: dict[str, Any] | None


class AssistantSchemas(GraphSchemas):
    graph_id: str


class Interrupt(BaseModel):
    id: str
    value: Any


class ModelUsage(BaseModel):
    """Calls of models and their tokens. Those of models without a known price are `unpriced_tokens` too."""

    calls: int
    input_tokens: int
    output_tokens: int
    total_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    unpriced_tokens: int
    cost_usd: float


class Usage(ModelUsage):
    """What was used. Steps are counted where a model was called or steps are limited."""

    steps: int


class ThreadTtl(BaseModel):
    strategy: Literal["delete", "keep_latest"]
    ttl_minutes: float
    expires_at: datetime


class Thread(BaseModel):
    thread_id: UUID
    created_at: datetime
    updated_at: datetime
    state_updated_at: datetime | None
    metadata: dict[str, Any]
    config: dict[str, Any]
    status: ThreadStatus
    values: Any
    interrupts: dict[str, list[Interrupt]]
    error: Failure | None
    usage: Usage | None


class ThreadWithTtl(Thread):
    """`ttl` only when `include` asks for it."""

    ttl: ThreadTtl | None = None


class SelectedThread(Selection, Thread):
    extracted: dict[str, Any]


class Pruned(BaseModel):
    pruned_count: int


class CheckpointPlace(BaseModel):
    thread_id: UUID
    checkpoint_ns: str
    checkpoint_id: str | None


class Task(BaseModel):
    id: str
    name: str
    path: list[Any]
    error: Any
    interrupts: list[Interrupt]
    checkpoint: dict[str, Any] | None
    state: dict[str, Any] | None
    result: Any


class State(Selection):
    values: Any
    next: list[str]
    tasks: list[Task]
    metadata: dict[str, Any] | None
    created_at: datetime | None
    checkpoint: CheckpointPlace | None
    parent_checkpoint: CheckpointPlace | None
    interrupts: list[Interrupt]
    checkpoint_id: str | None
    parent_checkpoint_id: str | None


class Updated(BaseModel):
    """The checkpoint that an update led to."""

    checkpoint: CheckpointPlace
    configurable: CheckpointPlace
    checkpoint_id: str


class Storage(BaseModel):
    """Bytes in the database."""

    thread_id: UUID
    total_bytes: int
    checkpoints: int
    channel_values: int
    pending_writes: int


class Run(BaseModel):
    """A run. `attempt`, `priority`, `error`, `usage` and `waiting_for` are Holdfast's own."""

    run_id: UUID
    thread_id: UUID
    assistant_id: UUID
    created_at: datetime
    updated_at: datetime
    status: RunStatus
    metadata: dict[str, Any]
    kwargs: dict[str, Any]
    multitask_strategy: MultitaskStrategy
    langsmith_session_name: str | None
    attempt: int
    priority: int
    error: Failure | None
    usage: Usage | None
    waiting_for: str | None = Field(
        default=None, description="What a pending run waits for. Only where a single run is shown."
    )
    parent_run_id: UUID | None = Field(default=None, description="The run that spawned it. Only for children.")


class SelectedRun(Selection, Run):
    pass


class Cron(BaseModel):
    cron_id: UUID
    assistant_id: UUID
    thread_id: UUID | None
    user_id: str | None
    end_time: datetime | None
    schedule: str
    timezone: str | None
    payload: dict[str, Any]
    next_run_date: datetime | None
    metadata: dict[str, Any]
    on_run_completed: Literal["delete", "keep"] | None
    enabled: bool
    created_at: datetime
    updated_at: datetime


class SelectedCron(Selection, Cron):
    now: datetime


class StoredItem(BaseModel):
    namespace: list[str]
    key: str
    value: dict[str, Any]
    created_at: datetime
    updated_at: datetime


class FoundItem(StoredItem):
    """`score` is how well the item fits a `query`; null without one."""

    score: float | None


class FoundItems(BaseModel):
    items: list[FoundItem]


class FoundNamespaces(BaseModel):
    namespaces: list[list[str]]


class ProtocolCommand(BaseModel):
    """`id` comes back in the answer."""

    id: int
    method: str
    params: Any = Field(None, description="An object; its fields depend on the method.")


class EventFilter(BaseModel):
    """Which events, and from where on. `channels` can also be `custom:` and a name."""

    channels: list[str] = Field(min_length=1)
    namespaces: list[list[str]] | None = None
    depth: Annotated[int, Field(ge=0)] | None = None
    since: Annotated[int, Field(ge=0, le=LAST_EVENT)] | None = Field(None, description="Only events with a higher seq.")


class CommandMeta(BaseModel):
    applied_through_seq: int


class CommandSucceeded(BaseModel):
    type: Literal["success"]
    id: int
    result: dict[str, Any]
    meta: CommandMeta


class CommandRefused(BaseModel):
    type: Literal["error"]
    id: int | None = Field(description="The id of the command; null if the request has none.")
    error: str
    message: str


WHAT_IS_WRONG = {
    400: "The request contradicts itself, or is not possible here.",
    401: "The project's own authentication does not know who this is, or there is no API key, or not a valid one.",
    403: "The project's own authorisation does not allow this, or the API key lacks a scope.",
    404: "There is no such object.",
    409: "The object is not in a state that allows this, or exists already.",
    410: "The object existed, and is not kept any more.",
    413: "The request body is larger than MAX_BODY_BYTES.",
    415: "The request body is not declared as JSON.",
    422: "A part of the request has the wrong form; `detail` names it.",
    429: "The tenant has used up what it may use; `Retry-After` says when to try again.",
    503: "The database cannot be reached. What was not confirmed may or may not have happened.",
}
# OpenAPI 3.1 has no word for a stream: this is one event of it.
EVENT: dict[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}, "id": {"type": "string"}},
    "required": ["event", "data"],
}
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": EVENT}}


def _header(description: str, *, required: bool = True) -> dict[str, Any]:
    return {"description": description, "required": required, "schema": {"type": "string"}}


PLACE = {"Content-Location": _header("The path of the run.")}
PLACES = {**PLACE, "Location": _header("Where to resume after a lost connection.")}
NEXT = {"X-Pagination-Next": _header("The offset of the next page, if there is one.", required=False)}
PAGES = {"X-Pagination-Total": _header("How many there are at least; exact on the last page."), **NEXT}
EARLIER = {
    "X-Pagination-Next": _header(
        "The checkpoint to give as `before` for the next page, if there is one.", required=False
    )
}


def refusals(*statuses: int) -> Responses:
    """Answers of `{"detail"}` with these statuses."""
    return {status: {"model": Detail, "description": WHAT_IS_WRONG[status]} for status in statuses}


def answers(success: Any, *problems: int, headers: dict[str, Any] | None = None) -> Responses:
    """What a route answers: an object of a type when it succeeds, and refusals with the given statuses."""
    found = {"model": success, "description": "Success."} | ({"headers": headers} if headers else {})
    return {200: found, **refusals(*problems)}


def pages(success: Any, *problems: int) -> Responses:
    """The same for a part of a list."""
    return answers(success, *problems, headers=PAGES)


def awaited_run(*problems: int) -> Responses:
    """What a route answers that waits for a run's last values, which can be any JSON."""
    description = "The run's last values; `__interrupt__` or `__error__` in it say that it stopped or failed."
    return {200: {"description": description, "headers": PLACES}, **refusals(*problems)}


def cancelled_run(*problems: int) -> Responses:
    """The responses of a route that cancels a run and waits for its end if requested. To go with
    `response_class=Response`."""
    waited = {"description": "The run's last values, with `wait`.", "content": {"application/json": {"schema": {}}}}
    return {
        202: {"description": "The cancel is stored, and the worker gets a hint."},
        200: {**waited, "headers": PLACES},
        **refusals(*problems),
    }


def streamed_run(*problems: int) -> Responses:
    """What a route answers that streams a run. To go with `response_class=Response`: success is not JSON."""
    return {200: {"description": "The run's events.", "content": EVENTS, "headers": PLACES}, **refusals(*problems)}


def streamed_thread(*problems: int) -> Responses:
    """What a route answers that streams one run after the other. To go with `response_class=Response`."""
    return {
        200: {"description": "The thread's events, until the client disconnects.", "content": EVENTS},
        **refusals(*problems),
    }


def everywhere(methods: Collection[str]) -> Responses:
    """What every route may answer: it can meet a request that is too large, not JSON or invalid, and a database that is
    away."""
    return refusals(422, 503) if set(methods) <= {"GET", "HEAD"} else refusals(413, 415, 422, 503)


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """The declaration of a body that the route reads itself: `openapi_extra=takes(ProtocolCommand)`."""
    schema = body.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
