"""Request bodies of threads and their state."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BeforeValidator, Field, field_validator

from holdfast.api.bodies import (
    MAX_IDS,
    Body,
    Checkpoint,
    Command,
    Contained,
    Flag,
    NullsAreAbsent,
    Number,
    Selected,
    Whole,
)
from holdfast.api.destructive import Destructive
from holdfast.api.listing import Search
from holdfast.engine.create import THREAD_COLUMNS
from holdfast.engine.threads import ThreadFilters, TtlStrategy

ThreadStatus = Literal["idle", "busy", "interrupted", "error"]
ThreadField = Literal[
    "thread_id",
    "created_at",
    "updated_at",
    "state_updated_at",
    "metadata",
    "config",
    "context",
    "status",
    "values",
    "interrupts",
    "error",
    "usage",
]

MAX_TTL_MINUTES = 52_560_000.0
MAX_EXTRACTS = 10
ALIAS = re.compile(r"[A-Za-z_]\w{0,62}", re.ASCII)
# A document of the thread, then keys after dots and positions in brackets.
PATH = re.compile(r"(values|metadata|config|interrupts)((?:\.[^.\[\]\0]+|\[-?\d{1,9}\])*)")
STEP = re.compile(r"\.([^.\[\]]+)|\[(-?\d+)\]")


def _minutes(value: Any) -> Any:
    return {"ttl": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class Ttl(Destructive):
    """Unknown fields are refused: a mistyped `strategy` would delete the thread whose latest state was to be kept."""

    ttl: Number = Field(gt=0, le=MAX_TTL_MINUTES, allow_inf_nan=False, description="Minutes without activity.")
    strategy: TtlStrategy = "delete"


Minutes = Annotated[float, Field(gt=0, le=MAX_TTL_MINUTES)]
TtlField = Annotated[Ttl, BeforeValidator(_minutes, json_schema_input_type=Ttl | Minutes)]


class Update(Body):
    values: Any = None
    command: Command | None = None
    as_node: str | None = None


class Superstep(Body):
    updates: list[Update] = Field(min_length=1)


class ThreadCreate(NullsAreAbsent):
    thread_id: UUID | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    if_exists: Literal["raise", "do_nothing"] = "raise"
    ttl: TtlField | None = None
    supersteps: list[Superstep] = Field(default_factory=list)


class ThreadPatch(NullsAreAbsent):
    metadata: dict[str, Any] = Field(default_factory=dict)
    ttl: TtlField | None = None


class ThreadCount(NullsAreAbsent):
    ids: list[UUID] | None = Field(default=None, max_length=MAX_IDS)
    metadata: Contained = Field(default_factory=dict)
    values: Contained = Field(default_factory=dict)
    status: ThreadStatus | None = None

    def filters(self) -> ThreadFilters:
        return ThreadFilters(ids=self.ids, metadata=self.metadata, values=self.values, status=self.status)


class ThreadSearch(ThreadCount, Search):
    sort_by: Literal["thread_id", "status", "created_at", "updated_at", "state_updated_at"] | None = None
    select: Selected[ThreadField] | None = None
    extract: dict[str, str] = Field(
        default_factory=dict,
        max_length=MAX_EXTRACTS,
        description="Places in a thread by alias, such as `values.messages[-1].content`.",
    )

    @field_validator("extract")
    @classmethod
    def _names_places(cls, given: dict[str, str]) -> dict[str, str]:
        for alias, path in given.items():
            if ALIAS.fullmatch(alias) is None or alias in THREAD_COLUMNS:
                raise ValueError(f"the alias '{alias}' must be an identifier that is no field of threads")
            if len(path) > 1000 or PATH.fullmatch(path) is None:
                raise ValueError(
                    f"the path of '{alias}' must begin with values, metadata, config or interrupts and go on with "
                    ".key and [number]"
                )
        return given

    def places(self) -> dict[str, tuple[str, list[str]]]:
        """The document and the steps within it, for each alias."""
        found = {}
        for alias, path in self.extract.items():
            match = PATH.fullmatch(path)
            assert match is not None
            found[alias] = (match[1], [key or index for key, index in STEP.findall(match[2])])
        return found


class ThreadPrune(Destructive):
    thread_ids: list[UUID] = Field(max_length=MAX_IDS)
    strategy: TtlStrategy = "delete"


class StateRead(NullsAreAbsent):
    checkpoint: Checkpoint
    subgraphs: Flag = False
    select: Selected[str] | None = None


class StateUpdateBody(NullsAreAbsent):
    values: dict[str, Any] | list[Any] | None = None
    as_node: str | None = None
    checkpoint: Checkpoint | None = None
    checkpoint_id: UUID | None = None


class StatePatch(NullsAreAbsent):
    metadata: dict[str, Any] = Field(default_factory=dict)


class Configurable(Body):
    checkpoint_id: UUID | None = None


class Before(Body):
    """A checkpoint to look before: its id, the checkpoint, or a config that names it."""

    checkpoint_id: UUID | None = None
    configurable: Configurable | None = None

    @property
    def id(self) -> str | None:
        named = self.checkpoint_id or (self.configurable and self.configurable.checkpoint_id)
        return None if named is None else str(named)


def _named(value: Any) -> Any:
    return {"checkpoint_id": value} if isinstance(value, str) else value


class HistoryRead(NullsAreAbsent):
    limit: Whole = Field(default=1, ge=1, le=1000)
    before: Annotated[Before, BeforeValidator(_named, json_schema_input_type=Before | UUID)] | None = None
    metadata: Contained = Field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    select: Selected[str] | None = None
