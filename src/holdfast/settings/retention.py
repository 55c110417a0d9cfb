"""Retention: how long finished runs, events and past states are kept."""

from __future__ import annotations

from pydantic import Field

from holdfast.settings.fields import Seconds, Section, setting_names

# A century. A date plus this time must be a valid date.
MAX_TTL_SECONDS = 3_155_760_000.0


class RetentionSettings(Section):
    event_ttl: Seconds = Field(
        86_400.0,
        ge=60,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("EVENT_TTL_SECONDS"),
        description="Seconds the events of a finished run can be replayed.",
    )
    temporary_ttl: Seconds = Field(
        300.0,
        ge=5,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("TEMPORARY_THREAD_TTL_SECONDS"),
        description="Seconds a finished stateless run keeps its hidden thread, so that its stream can still be "
        "resumed.",
    )
    finished_run_ttl: Seconds | None = Field(
        None,
        ge=60,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("FINISHED_RUN_TTL_SECONDS"),
        description="Seconds a finished run can be looked up; at least EVENT_TTL_SECONDS. Its thread and the state "
        "stay. Dead letters are not removed by it. Unset: as long as its thread.",
    )
    checkpoint_ttl: Seconds | None = Field(
        None,
        ge=60,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("CHECKPOINT_TTL_SECONDS"),
        description="Seconds a thread's past states are kept. The latest is kept however old it is. Unset: as long as "
        "the thread.",
    )
    thread_ttl: Seconds | None = Field(
        None,
        ge=60,
        le=MAX_TTL_SECONDS,
        validation_alias=setting_names("THREAD_TTL_SECONDS"),
        description="Seconds without activity after which a thread is deleted with everything in it, unless it has a "
        "time to live of its own, from its creator or from langgraph.json. Existing threads are deleted too. Unset: "
        "kept.",
    )
