"""Request bodies. Unknown fields are ignored: clients are newer than servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import orjson
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    model_validator,
)
from pydantic_core import CoreSchema

from holdfast.engine.new_run import MAX_PRIORITY

StreamMode = Literal[
    "values", "messages", "messages-tuple", "tasks", "checkpoints", "updates", "debug", "custom", "events"
]


# Values are not converted between JSON types: "5" is not 5, and true is not 1.
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# Ids that one request may name.
MAX_IDS = 1000
# Fields that one request may select. They are looked up in every row of a page.
MAX_SELECTED = 1000
# Bytes of JSON in a filter. Postgres needs a hundred times as much memory to parse it.
MAX_FILTER_BYTES = 16 * 1024


def check_filter(value: dict[str, Any]) -> dict[str, Any]:
    """Return the filter unchanged. Raises ValueError for a filter that is too large or too deep."""
    try:
        size = len(orjson.dumps(value, default=str))
    except TypeError:
        raise ValueError("a filter may not be nested this deeply") from None
    if size > MAX_FILTER_BYTES:
        raise ValueError(f"a filter may have {MAX_FILTER_BYTES:,} bytes of JSON at most, and this one has {size:,}")
    return value


Contained = Annotated[dict[str, Any], AfterValidator(check_filter)]
"""A filter: what the JSON of a row must contain."""

Name = TypeVar("Name", bound=str)
Selected = Annotated[list[Name], Field(max_length=MAX_SELECTED)]
"""The fields to show."""

Modes = Annotated[list[StreamMode], BeforeValidator(_as_list, json_schema_input_type=StreamMode | list[StreamMode])]
Nodes = Literal["*"] | list[str] | None


def _stop_at_first_problem(schema: Any) -> None:
    """Set `fail_fast` in every list and mapping of a schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for key, part in schema.items():
            if key != "metadata":
                _stop_at_first_problem(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_problem(part)


class Body(BaseModel):
    """A request body, or an object in one. Validation stops at the first wrong item of a list or a mapping: a body has
    room for millions of them, and pydantic's description of a wrong one takes hundreds of bytes."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first_problem(schema)
        return schema


class NullsAreAbsent(Body):
    """A body in which an explicit null says as little as leaving the field out."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add null to the schemas in `/openapi.json`."""
        shown = handler(core_schema)
        schema = handler.resolve_ref_schema(shown)
        required = schema.get("required", ())
        for name, field in schema.get("properties", {}).items():
            if name not in required:
                _allow_null(field)
        return shown


def _allow_null(field: dict[str, Any]) -> None:
    about: dict[str, Any] = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
    if field and {"type": "null"} not in field.get("anyOf", ()):
        alternatives = field["anyOf"] if set(field) == {"anyOf"} else [dict(field)]
        field.clear()
        field["anyOf"] = [*alternatives, {"type": "null"}]
    field.update(about)


class Destination(Body):
    """A node, and what it is given instead of the state."""

    node: str
    # JavaScript's LangGraph writes a Send with `args`.
    input: Any = Field(None, validation_alias=AliasChoices("input", "args"))


class Command(Body):
    resume: Any = None
    update: dict[str, Any] | list[tuple[str, Any]] | None = None
    goto: str | Destination | list[str | Destination] | None = None


class Checkpoint(Body):
    checkpoint_id: UUID | None = None
    checkpoint_ns: str | None = None
    checkpoint_map: dict[str, Any] | None = None


class RunConfig(Body):
    """The fields of a LangChain config that a client may set (`graphs/client_config.py`)."""

    tags: list[str] | None = None
    recursion_limit: Whole | None = Field(None, ge=1, le=100_000)
    max_concurrency: Whole | None = Field(None, ge=1, le=100_000)
    run_name: str | None = None
    configurable: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class Tracer(Body):
    """Where the run's trace goes in LangSmith, for graphs that trace there."""

    project_name: str | None = None
    example_id: str | None = None


class Limits(NullsAreAbsent):
    """How much a run may use. A Holdfast extension."""

    max_cost_usd: Number | None = Field(None, gt=0, le=1_000_000, description="US dollars, by the price list.")
    max_tokens: Whole | None = Field(None, ge=1, le=2**53, description="Tokens of input and output together.")
    max_seconds: Number | None = Field(None, gt=0, le=31_536_000, description="From the run's first start.")
    max_steps: Whole | None = Field(None, ge=1, le=2**53, description="Steps of the graph, over all attempts.")

    @property
    def budget(self) -> dict[str, Any]:
        """The limits that are not None."""
        limits = {name: getattr(self, name) for name in Limits.model_fields}
        return {name: limit for name, limit in limits.items() if limit is not None}


class RunCreate(Limits):
    """Everything a client may say about a run."""

    assistant_id: str = Field(description="A graph's name, or an assistant's UUID.")
    input: Any = None
    command: Command | None = None
    config: RunConfig | None = None
    context: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    checkpoint_id: UUID | None = None
    interrupt_before: Nodes = None
    interrupt_after: Nodes = None
    stream_mode: Modes = ["values"]
    stream_subgraphs: Flag = False
    stream_resumable: Flag = False
    multitask_strategy: Literal["reject", "enqueue", "interrupt", "rollback"] | None = None
    if_not_exists: Literal["create", "reject"] | None = None
    after_seconds: Number = Field(0, ge=0, le=31_536_000)
    durability: Literal["sync", "async", "exit"] | None = None
    checkpoint_during: Flag | None = None
    on_disconnect: Literal["cancel", "continue"] | None = None
    on_completion: Literal["delete", "keep"] | None = None
    strict_resume: Flag = Field(False, description="Fail the run if it answers an interrupt that is not waiting.")
    feedback_keys: list[str] | None = Field(None, description="Stored with the run, without another effect.")
    langsmith_tracer: Tracer | None = None
    priority: Whole = Field(
        0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Of the runs of one tenant, higher ones are started first. Runs of other tenants are not affected. "
        "A Holdfast extension.",
    )
    webhook: str | None = None
