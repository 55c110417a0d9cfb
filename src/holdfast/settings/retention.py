"""How long what is finished is kept."""

from __future__ import annotations

from pydantic import Field

from holdfast.settings.fields import Seconds, Section, names


class RetentionSettings(Section):
    event_ttl: Seconds = Field(
        86_400.0,
        ge=60,
        validation_alias=names("EVENT_TTL_SECONDS"),
        description="Seconds the events of a finished run can be replayed.",
    )
    temporary_ttl: Seconds = Field(
        300.0,
        ge=5,
        validation_alias=names("TEMPORARY_THREAD_TTL_SECONDS"),
        description="Seconds a finished stateless run keeps its hidden thread, so that its stream can still be "
        "resumed.",
    )
