"""Logs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from holdfast.settings.fields import Seconds, Section, prefixed_name, setting_names


class TelemetrySettings(Section):
    stats_interval: Seconds = Field(
        60.0,
        ge=1,
        le=86_400,
        validation_alias=setting_names("STATS_INTERVAL_SECS"),
        description="Seconds between two `worker.stats` log lines.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", validation_alias=setting_names("LOG_LEVEL"), description="The least severe lines that are logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto",
        validation_alias=prefixed_name("LOG_FORMAT"),
        description="`auto` is readable on a terminal and JSON elsewhere.",
    )

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value
