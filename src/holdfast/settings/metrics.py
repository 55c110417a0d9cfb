"""Metrics: whether they are counted, and how old a count may be."""

from __future__ import annotations

from pydantic import Field

from holdfast.settings.fields import Seconds, Section, prefixed_name


class MetricsSettings(Section):
    metrics: bool = Field(
        True,
        validation_alias=prefixed_name("METRICS"),
        description="Whether the process counts what it does. If not, `/metrics` has only what is read at each scrape: "
        "the queue, the workers, the pool.",
    )
    metrics_cache: Seconds = Field(
        5.0,
        ge=0.1,
        le=300,
        validation_alias=prefixed_name("METRICS_CACHE_SECONDS"),
        description="Seconds a web process keeps the figures of `/metrics` that it counts in the database; longer when "
        "counting takes long. It should be less than the scrape interval; otherwise two scrapes see the same.",
    )
