"""Request bodies. Unknown fields are ignored: clients are newer than servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

StreamMode = Literal[
    "values", "messages", "messages-tuple", "tasks", "checkpoints", "updates", "debug", "custom", "events"
]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _none_as_empty(value: Any) -> Any:
    return {} if value is None else value


Mapping = Annotated[dict[str, Any], BeforeValidator(_none_as_empty)]
Nodes = Literal["*"] | list[str] | None


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Command(Body):
    model_config = ConfigDict(extra="forbid")

    resume: Any = None
    update: dict[str, Any] | list[tuple[str, Any]] | None = None
    goto: str | dict[str, Any] | list[str | dict[str, Any]] | None = None


class Checkpoint(Body):
    checkpoint_id: UUID | None = None
    checkpoint_ns: str | None = None
    checkpoint_map: dict[str, Any] | None = None


class RunConfig(Body):
    model_config = ConfigDict(extra="allow")

    tags: list[str] | None = None
    recursion_limit: int | None = Field(None, ge=1, le=100_000)
    configurable: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class RunCreate(Body):
    """Everything a client may say about a run."""

    assistant_id: str = Field(description="A graph's name, or an assistant's UUID.")
    input: Any = None
    command: Command | None = None
    config: RunConfig | None = None
    context: dict[str, Any] | None = None
    metadata: Mapping = Field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    checkpoint_id: UUID | None = None
    interrupt_before: Nodes = None
    interrupt_after: Nodes = None
    stream_mode: Annotated[list[StreamMode], BeforeValidator(_as_list)] = ["values"]
    stream_subgraphs: bool = False
    stream_resumable: bool = False
    multitask_strategy: Literal["reject", "enqueue", "interrupt", "rollback"] | None = None
    if_not_exists: Literal["create", "reject"] | None = None
    after_seconds: float = Field(0, ge=0, le=31_536_000)
    durability: Literal["sync", "async", "exit"] | None = None
    checkpoint_during: bool | None = None
    on_disconnect: Literal["cancel", "continue"] | None = None
    on_completion: Literal["delete", "keep"] | None = None
    priority: int = Field(0, ge=-1_000_000, le=1_000_000, description="Higher runs first. A Holdfast extension.")
    webhook: str | None = None
