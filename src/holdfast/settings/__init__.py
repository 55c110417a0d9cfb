"""All settings in one frozen object, which is created once at the start of a process and passed to its parts.

Outside of the command line, no other module reads a setting from the environment. What else the environment is used
for is listed in tests/test_architecture.py. Each field states its unit, its default and what goes wrong when it is
mis-set; docs/configuration.md is generated from them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import AliasChoices, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from holdfast.errors import SettingsError
from holdfast.settings.budgets import BudgetSettings
from holdfast.settings.children import ChildSettings
from holdfast.settings.database import DatabaseSettings
from holdfast.settings.dead_letters import DeadLetterSettings
from holdfast.settings.fields import Section
from holdfast.settings.metrics import MetricsSettings
from holdfast.settings.retention import RetentionSettings
from holdfast.settings.secrets import NOT_SHOWN
from holdfast.settings.telemetry import TelemetrySettings
from holdfast.settings.tenants import TenantSettings
from holdfast.settings.traces import TraceSettings
from holdfast.settings.web import WebSettings
from holdfast.settings.webhooks import WebhookSettings
from holdfast.settings.worker import WorkerSettings

# The sections in the order of the documentation.
SECTIONS: tuple[type[Section], ...] = (
    DatabaseSettings,
    WebSettings,
    WorkerSettings,
    BudgetSettings,
    ChildSettings,
    RetentionSettings,
    WebhookSettings,
    DeadLetterSettings,
    TenantSettings,
    TelemetrySettings,
    MetricsSettings,
    TraceSettings,
)


class Settings(
    DatabaseSettings,
    WebSettings,
    WorkerSettings,
    BudgetSettings,
    ChildSettings,
    RetentionSettings,
    WebhookSettings,
    DeadLetterSettings,
    TenantSettings,
    TelemetrySettings,
    MetricsSettings,
    TraceSettings,
):
    """The settings of all sections."""

    @field_validator(
        "database_url",
        "direct_database_url",
        "redis_url",
        "signal_ping",
        "mount_prefix",
        "cors_allow_origins",
        "allowed_hosts",
        "webhook_secrets",
        "default_max_cost_usd",
        "default_max_tokens",
        "default_max_seconds",
        "default_max_steps",
        "tenant_max_queued",
        "tenant_max_running",
        "tenant_requests_per_second",
        "tenant_spend_per_day",
        "finished_run_ttl",
        "checkpoint_ttl",
        "thread_ttl",
        "traces",
        "otlp_endpoint",
        "otlp_traces_endpoint",
        "otlp_headers",
        "otlp_traces_headers",
        "otlp_protocol",
        "otel_service_name",
        "otel_sampler",
        "otel_sampler_arg",
        "otel_traces_exporter",
        mode="before",
    )
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        return None if value == "" else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heartbeat * 3 > self.lease:
            raise ValueError(
                f"HEARTBEAT_INTERVAL_SECONDS={self.heartbeat:g}: must be at most a third of "
                f"LEASE_DURATION_SECONDS={self.lease:g}, so that two missed renewals do not cost the lease"
            )
        if self.pool_min > self.pool_max:
            raise ValueError(f"DATABASE_POOL_MIN={self.pool_min}: must be at most DATABASE_POOL_MAX={self.pool_max}")
        if self.retry_base > self.retry_cap:
            raise ValueError(
                f"RETRY_BASE_SECONDS={self.retry_base:g}: must be at most RETRY_CAP_SECONDS={self.retry_cap:g}"
            )
        if self.finished_run_ttl is not None and self.finished_run_ttl < self.event_ttl:
            raise ValueError(
                f"FINISHED_RUN_TTL_SECONDS={self.finished_run_ttl:g}: must be at least "
                f"EVENT_TTL_SECONDS={self.event_ttl:g}, for a run's events do not outlive it"
            )
        return self


def environment_names(field: FieldInfo) -> list[str]:
    """The environment variables of a field. The first one that is set is used."""
    alias = field.validation_alias
    assert isinstance(alias, AliasChoices)
    return [str(choice) for choice in alias.choices]


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Create the settings from the environment and the command line's flags (`overrides`; None means not given).

    Raises SettingsError that names all invalid fields, with their values and the rules.
    """
    env = {key.upper(): value for key, value in (os.environ if environ is None else environ).items()}
    given: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, field in Settings.model_fields.items():
        for variable in environment_names(field):
            if variable in env:
                given[name] = env[variable]
                source[name] = variable
                break
    for name, value in overrides.items():
        if value is not None:
            given[name] = value
            source[name] = f"--{name.replace('_', '-')}"
    try:
        return _Explicit(**given)
    except ValidationError as error:
        raise SettingsError(_explain(error, source)) from None


class _Explicit(Settings):
    """Settings that do not read the environment themselves: `load_settings` has done so."""

    @classmethod
    def settings_customise_sources(cls, settings_cls: Any, init_settings: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        return (init_settings,)


def _explain(error: ValidationError, source: Mapping[str, str]) -> str:
    """One line for each problem: the variable or flag that was set, its value, and the rule."""
    lines = []
    for problem in error.errors():
        if not problem["loc"]:
            lines.append(_as_given(problem["msg"].removeprefix("Value error, "), source))
            continue
        name = str(problem["loc"][0])
        field = next(
            (key for key, info in Settings.model_fields.items() if name == key or name in environment_names(info)), name
        )
        is_public = field not in Settings.model_fields or Settings.model_fields[field].repr
        shown = problem["input"] if is_public else NOT_SHOWN
        lines.append(f"{source.get(field, field)}={shown}: {_rule(problem)}")
    return "\n".join(lines)


def _rule(problem: ErrorDetails) -> str:
    """The rule that a value has broken, as text."""
    limits = problem.get("ctx", {})
    match problem["type"]:
        case "greater_than_equal":
            return f"must be at least {limits['ge']:,}"
        case "greater_than":
            return f"must be more than {limits['gt']:,}"
        case "less_than_equal":
            return f"must be at most {limits['le']:,}"
        case "int_parsing" | "int_parsing_size" | "int_from_float" | "int_type":
            return "must be a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "must be a number"
        case "bool_parsing" | "bool_type":
            return "must be true or false"
        case "literal_error":
            return f"must be {limits['expected']}"
        case _:
            return problem["msg"].removeprefix("Value error, ").removeprefix("Input ")


def _as_given(message: str, source: Mapping[str, str]) -> str:
    """Replace the names of settings in a message by the variables or flags that the operator has set."""
    for field, given in source.items():
        for variable in environment_names(Settings.model_fields[field]):
            message = re.sub(rf"(?<!\w){variable}=", f"{given}=", message)
    return message
