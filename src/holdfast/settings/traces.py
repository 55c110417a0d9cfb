"""Traces: a run as OpenTelemetry spans, sent by OTLP."""

from __future__ import annotations

from typing import Any, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, field_validator, model_validator

from holdfast.settings.fields import Section, prefixed_name, setting_names
from holdfast.settings.hosts import usable_host
from holdfast.settings.secrets import shown_url

SAMPLERS = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
PROTOCOL = "http/protobuf"


class TraceSettings(Section):
    traces: bool | None = Field(
        None,
        validation_alias=prefixed_name("TRACES"),
        description="Whether traces are sent; needs `holdfast[traces]`. Unset: when an endpoint is named below. "
        "`false` turns them off and overrides the other variables. See [traces](traces.md).",
    )
    otlp_endpoint: str | None = Field(
        None,
        repr=False,
        validation_alias=setting_names("OTEL_EXPORTER_OTLP_ENDPOINT"),
        description="Where an OTLP collector takes requests over HTTP, without `/v1/traces`. `http://localhost:4318` "
        "when `HOLDFAST_TRACES=true` and no endpoint is named.",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        repr=False,
        validation_alias=setting_names("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        description="The same for traces only, with the complete path.",
    )
    otlp_headers: str | None = Field(
        None,
        repr=False,
        validation_alias=setting_names("OTEL_EXPORTER_OTLP_HEADERS"),
        description="Headers for the collector, which often hold a key: `name=value`, percent-encoded, with commas "
        "between them.",
    )
    otlp_traces_headers: str | None = Field(
        None,
        repr=False,
        validation_alias=setting_names("OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
        description="The same for traces only.",
    )
    otlp_protocol: str | None = Field(
        None,
        validation_alias=setting_names("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
        description="Holdfast uses `http/protobuf`.",
    )
    otel_service_name: str | None = Field(
        None,
        validation_alias=setting_names("OTEL_SERVICE_NAME"),
        description="The name of the service in traces. Without this and `OTEL_RESOURCE_ATTRIBUTES`: `holdfast`.",
    )
    otel_sampler: str | None = Field(
        None,
        validation_alias=setting_names("OTEL_TRACES_SAMPLER"),
        description=f"Which traces are kept: one of {', '.join(f'`{name}`' for name in SAMPLERS)}. Unset: the client's "
        "`traceparent` decides; runs without one are all kept.",
    )
    otel_sampler_arg: str | None = Field(
        None,
        validation_alias=setting_names("OTEL_TRACES_SAMPLER_ARG"),
        description="The share of traces that a sampler by ratio keeps, from 0 to 1.",
    )
    otel_traces_exporter: str | None = Field(
        None,
        validation_alias=setting_names("OTEL_TRACES_EXPORTER"),
        description="`none` sends no traces although an endpoint is named; `otlp` is the only other.",
    )
    otel_disabled: bool = Field(
        False,
        validation_alias=setting_names("OTEL_SDK_DISABLED"),
        description="`true` sends no traces although an endpoint is named.",
    )

    @field_validator("otel_disabled", mode="before")
    @classmethod
    def _only_true_is(cls, value: Any) -> Any:
        # OpenTelemetry's rule: every value other than "true" is false.
        return value.strip().lower() == "true" if isinstance(value, str) else value

    @property
    def tracing(self) -> bool:
        """Whether this installation sends traces."""
        if self.traces is not None:
            return self.traces
        silenced = self.otel_disabled or self.otel_traces_exporter == "none"
        return not silenced and bool(self.otlp_endpoint or self.otlp_traces_endpoint)

    @property
    def traces_url(self) -> str:
        """The URL that traces are sent to."""
        if self.otlp_traces_endpoint:
            return self.otlp_traces_endpoint
        return f"{(self.otlp_endpoint or 'http://localhost:4318').rstrip('/')}/v1/traces"

    @property
    def traces_headers(self) -> dict[str, str]:
        """The headers of all requests to the collector."""
        given = (self.otlp_traces_headers or self.otlp_headers or "").split(",")
        pairs = [header.partition("=") for header in given]
        return {unquote(name).strip().lower(): unquote(value).strip() for name, is_pair, value in pairs if is_pair}

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.tracing:  # Otherwise they belong to another program and may have any value.
            problem = (
                self._endpoint_problem("OTEL_EXPORTER_OTLP_ENDPOINT", self.otlp_endpoint)
                or self._endpoint_problem("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", self.otlp_traces_endpoint)
                or self._choice_problem()
            )
            if problem is not None:
                raise ValueError(f"{problem}. HOLDFAST_TRACES=false starts without traces")
        return self

    def _endpoint_problem(self, variable: str, url: str | None) -> str | None:
        if not url:
            return None
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(usable_host(parts.hostname or "")) and parts.port != 0
        except ValueError:
            usable = False
        if usable:
            return None
        rule = "must be the URL of an OTLP collector: http:// or https://, and a host name or an IP address"
        return f"{variable}={shown_url(url)}: {rule}"

    def _choice_problem(self) -> str | None:
        if self.otlp_protocol and self.otlp_protocol != PROTOCOL:
            rule = f"must be {PROTOCOL}; OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says it for traces alone"
            return f"OTEL_EXPORTER_OTLP_PROTOCOL={self.otlp_protocol}: {rule}"
        if self.otel_traces_exporter and self.otel_traces_exporter not in ("otlp", "none"):
            return f"OTEL_TRACES_EXPORTER={self.otel_traces_exporter}: must be otlp or none"
        if self.otel_sampler and self.otel_sampler.lower() not in SAMPLERS:
            return f"OTEL_TRACES_SAMPLER={self.otel_sampler}: must be one of {', '.join(SAMPLERS)}"
        if self.otel_sampler and self.otel_sampler.lower().endswith("traceidratio") and self.otel_sampler_arg:
            try:
                within = 0 <= float(self.otel_sampler_arg) <= 1
            except ValueError:
                within = False
            if not within:
                return f"OTEL_TRACES_SAMPLER_ARG={self.otel_sampler_arg}: must be a number from 0 to 1"
        return None
