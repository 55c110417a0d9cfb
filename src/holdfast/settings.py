"""One frozen object with every setting, built once at the edge and passed in.

Nothing else in Holdfast reads the environment. Each field states its unit, its default and what
goes wrong when it is mis-set; docs/configuration.md is generated from them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from holdfast.errors import SettingsError
from holdfast.signing_secrets import split_secrets, usable_secrets


def _names(*names: str) -> AliasChoices:
    """The environment variables a field answers to, ours first; the later ones are those operators know
    from LangGraph and Aegra."""
    return AliasChoices(f"HOLDFAST_{names[0]}", *names)


def _only_ours(name: str) -> AliasChoices:
    """For words too common to take from an environment that others write to as well."""
    return AliasChoices(f"HOLDFAST_{name}")


Seconds = Annotated[float, Field(gt=0)]


def usable_prefix(value: str) -> str:
    """A prefix of paths as it is used: without a slash at its end, so empty for `/`. Raises ValueError."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", value):
        raise ValueError('must look like "/api": segments of letters, digits and ._~-, each after a slash')
    return value.rstrip("/")


class Settings(BaseSettings):
    model_config = SettingsConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    # --- database ---------------------------------------------------------------------------------
    database_url: str | None = Field(
        None,
        validation_alias=_names("DATABASE_URL", "DATABASE_URI", "POSTGRES_URI"),
        description="Postgres 14 to 18, as a URL or key=value string. Unset: `dev` and `serve` start a private "
        "Postgres in the data directory.",
    )
    direct_database_url: str | None = Field(
        None,
        validation_alias=_names("DIRECT_DATABASE_URL"),
        description="A connection past PgBouncer, for what needs a session (LISTEN, the heartbeat, leadership). "
        "Unset: DATABASE_URL is used, or, with HOLDFAST_PGBOUNCER, waiting turns to polling and a lost worker is "
        "noticed only when its lease expires.",
    )
    pgbouncer: bool = Field(
        False,
        validation_alias=_only_ours("PGBOUNCER"),
        description="DATABASE_URL leads through PgBouncer in transaction mode: nothing is prepared, no session "
        "state outside a transaction. Costs some speed.",
    )
    db_schema: str = Field(
        "holdfast",
        validation_alias=_names("DATABASE_SCHEMA"),
        description="The Postgres schema all tables live in, LangGraph's checkpoint tables included. Name the "
        "schema of existing checkpoint tables (usually `public`) to keep using them.",
    )
    pool_min: int = Field(
        1,
        ge=0,
        le=1000,
        validation_alias=_names("DATABASE_POOL_MIN"),
        description="Connections a process keeps open in its pool.",
    )
    pool_max: int = Field(
        10,
        ge=1,
        le=1000,
        validation_alias=_names("DATABASE_POOL_MAX"),
        description="Connections a process may open in its pool; besides these a worker holds four of its own "
        "(journal, heartbeat, signals, leadership) and a web process two. Too many for the server's "
        "max_connections and processes fail to start.",
    )
    database_timeout: Seconds = Field(
        10.0,
        le=300,
        validation_alias=_names("DATABASE_TIMEOUT"),
        description="Seconds to wait for a connection, or for a statement's answer from a silent server, before the "
        "call counts as failed.",
    )
    data_dir: Path = Field(
        Path(".holdfast"),
        validation_alias=_only_ours("DATA_DIR"),
        description="Where the embedded Postgres keeps its data and its log.",
    )
    redis_url: str | None = Field(
        None,
        validation_alias=_names("REDIS_URL", "REDIS_URI"),
        description="Redis 6 or later for signals: redis://host:6379/0, rediss:// for TLS, unix:///path, "
        "redis+sentinel://host:26379,host:26379/master-name or redis+cluster://host:6379,host:6379. Unset: signals "
        "travel over Postgres. Nothing is stored in it; while it is away processes poll.",
    )

    # --- web --------------------------------------------------------------------------------------
    studio_auth: bool = Field(
        False,
        validation_alias=_only_ours("STUDIO_AUTH"),
        description="With custom auth: let requests with the header `x-auth-scheme: langsmith` in as a Studio user, "
        "without asking the project's authenticator. `holdfast dev` switches it on; `auth.disable_studio_auth` in "
        "langgraph.json switches it off for good. Not for servers that others can reach.",
    )
    host: str = Field(
        "127.0.0.1",
        validation_alias=_only_ours("HOST"),
        description="The address the web process listens on. 0.0.0.0 lets everybody who reaches this machine in.",
    )
    port: int = Field(
        8123, ge=0, le=65535, validation_alias=_names("PORT"), description="The port the web process listens on."
    )
    stream_heartbeat: Seconds = Field(
        5.0,
        le=15,
        validation_alias=_names("STREAM_HEARTBEAT_SECONDS"),
        description="Seconds between the comments that keep an idle stream open. Clients time out on streams that "
        "stay silent for about three of these.",
    )
    stream_stall: Seconds = Field(
        60.0,
        ge=1,
        le=3600,
        validation_alias=_names("STREAM_STALL_SECONDS"),
        description="Seconds a client may take nothing of what it is sent before its connection is closed; it can "
        "resume where it was. Needs Linux. Shorter frees the memory of dead clients sooner, and drops those on a bad "
        "network.",
    )
    max_body_bytes: int = Field(
        20 * 1024 * 1024,
        ge=1024,
        le=1024**3,
        validation_alias=_names("MAX_BODY_BYTES"),
        description="The largest request body in bytes; a larger one is answered 413.",
    )
    mount_prefix: str | None = Field(
        None,
        validation_alias=_names("MOUNT_PREFIX"),
        description="A path that all routes are under, such as `/api`; `/ok` answers without it too. Comes before "
        "`http.mount_prefix` of langgraph.json. Clients name it in their URL.",
    )
    cors_allow_origins: str | None = Field(
        None,
        validation_alias=_names("CORS_ALLOW_ORIGINS"),
        description="Origins whose pages may call the server, separated by commas; `*` is all. Comes before "
        "`http.cors.allow_origins` of langgraph.json; when neither is set, all may.",
    )
    event_streaming: bool = Field(
        True,
        validation_alias=_names("FF_V2_EVENT_STREAMING"),
        description="Whether the routes of the thread-centric protocol are there; off is the same as "
        "`http.disable_event_streaming` in langgraph.json.",
    )
    crons: bool = Field(
        True,
        validation_alias=_names("FF_CRONS_ENABLED"),
        description="Whether there are crons: off, their routes are gone and none fires. Say so to every process, or "
        "another one fires them.",
    )

    # --- worker -----------------------------------------------------------------------------------
    jobs: int = Field(
        10,
        ge=1,
        le=10_000,
        validation_alias=_names("N_JOBS_PER_WORKER"),
        description="Runs a worker process executes at once. Higher suits graphs that wait for models, lower those "
        "that compute.",
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        validation_alias=_only_ours("HEALTH_PORT"),
        description="Where a worker answers /live, /ready and /metrics. Unset: nowhere. 0: any free port, which it "
        "logs. Workers on one machine need different ones.",
    )
    health_host: str = Field(
        "127.0.0.1",
        validation_alias=_only_ours("HEALTH_HOST"),
        description="The address for HOLDFAST_HEALTH_PORT. In a container: 0.0.0.0.",
    )
    run_timeout: Seconds = Field(
        86_400.0,
        le=31_536_000,
        validation_alias=_names("BG_JOB_TIMEOUT_SECS"),
        description="Seconds a run may take from its first start, take-overs and retries included, before it ends "
        "as `timeout`.",
    )
    max_retries: int = Field(
        3,
        ge=0,
        le=1000,
        validation_alias=_names("BG_JOB_MAX_RETRIES"),
        description="How often a run that failed with a transient error is tried again before it ends as `error`.",
    )
    retry_base: Seconds = Field(
        1.0,
        le=3600,
        validation_alias=_names("RETRY_BASE_SECONDS"),
        description="Seconds before the first retry; doubles each time, with jitter.",
    )
    retry_cap: Seconds = Field(
        60.0,
        le=86_400,
        validation_alias=_names("RETRY_CAP_SECONDS"),
        description="The longest pause between two tries, in seconds.",
    )
    max_crashes: int = Field(
        3,
        ge=1,
        le=1000,
        validation_alias=_only_ours("MAX_CRASHES"),
        description="How many workers a run may take down before it is put with the dead letters.",
    )
    lease: Seconds = Field(
        30.0,
        ge=1,
        le=3600,
        validation_alias=_names("LEASE_DURATION_SECONDS"),
        description="Seconds a worker may go without renewing before it counts as lost. Shorter notices a lost "
        "machine sooner, and takes runs from one that was merely slow.",
    )
    heartbeat: Seconds = Field(
        5.0,
        ge=0.1,
        le=1200,
        validation_alias=_names("HEARTBEAT_INTERVAL_SECONDS", "BG_JOB_HEARTBEAT"),
        description="Seconds between two renewals of a worker's lease; at most a third of the lease.",
    )
    session_grace: Seconds = Field(
        1.6,
        ge=0.2,
        le=60,
        validation_alias=_names("SESSION_GRACE_SECONDS"),
        description="Seconds a worker's heartbeat session may be gone from Postgres before the worker counts as "
        "lost. Must cover a reconnect.",
    )
    reaper_interval: Seconds = Field(
        1.0,
        ge=0.1,
        le=60,
        validation_alias=_names("REAPER_INTERVAL_SECONDS"),
        description="Seconds between two looks for lost workers.",
    )
    poll_interval: Seconds = Field(
        5.0,
        ge=0.1,
        le=60,
        validation_alias=_names("POSTGRES_POLL_INTERVAL_SECONDS"),
        description="Seconds between the slow polls behind every signal. A lost signal costs at most this much "
        "latency.",
    )
    degraded_poll: Seconds = Field(
        0.5,
        ge=0.05,
        le=60,
        validation_alias=_names("DEGRADED_POLL_SECONDS"),
        description="Seconds between two polls while signals do not come through. Shorter is closer to live, and costs "
        "every process a few statements each time.",
    )
    signal_ping: Seconds | None = Field(
        None,
        ge=0.1,
        le=300,
        validation_alias=_names("SIGNAL_PING_SECONDS"),
        description="Seconds between a process's pings to itself, whose missing echo shows that signals do not come "
        "through. Unset: 15 over Postgres, where each is a statement, and 5 over Redis.",
    )
    drain_timeout: float = Field(
        25.0,
        ge=0,
        le=86_400,
        validation_alias=_names("WORKER_DRAIN_TIMEOUT"),
        description="Seconds a stopping worker lets its runs go on before it hands them back. Keep it below the "
        "orchestrator's kill delay (30 s under Kubernetes).",
    )
    journal_buffer_bytes: int = Field(
        8 * 1024 * 1024,
        ge=64 * 1024,
        le=1024**3,
        validation_alias=_names("JOURNAL_BUFFER_BYTES"),
        description="Bytes one run may have waiting for the database before it has to wait itself.",
    )
    max_entry_bytes: int = Field(
        64 * 1024 * 1024,
        ge=64 * 1024,
        le=512 * 1024**2,
        validation_alias=_names("MAX_ENTRY_BYTES"),
        description="The largest single event or checkpoint value in bytes; a run that writes a larger one fails.",
    )
    blocked_loop: Seconds = Field(
        1.0,
        ge=0.05,
        le=600,
        validation_alias=_names("BLOCKED_LOOP_SECONDS"),
        description="Seconds graph code may block the worker's event loop before its stack is logged.",
    )

    # --- upkeep, telemetry ------------------------------------------------------------------------
    event_ttl: Seconds = Field(
        86_400.0,
        ge=60,
        validation_alias=_names("EVENT_TTL_SECONDS"),
        description="Seconds the events of a finished run can be replayed.",
    )
    temporary_ttl: Seconds = Field(
        300.0,
        ge=5,
        validation_alias=_names("TEMPORARY_THREAD_TTL_SECONDS"),
        description="Seconds a finished stateless run keeps its hidden thread, so that its stream can still be "
        "resumed.",
    )
    webhook_secrets: str | None = Field(
        None,
        repr=False,
        validation_alias=_names("WEBHOOK_SECRETS"),
        description="Secrets that webhooks are signed with (Standard Webhooks), separated by commas: `whsec_` and 24 "
        "to 64 bytes in base64. Each signs, so that receivers can change from one to the next. Unset: not signed.",
    )
    webhook_allow_private: bool = Field(
        False,
        validation_alias=_names("WEBHOOK_ALLOW_PRIVATE"),
        description="Whether webhooks may lead to addresses that are not public. For development: elsewhere it lets "
        "everybody who may create a run call what is behind the firewall.",
    )
    webhook_timeout: Seconds = Field(
        10.0,
        ge=0.1,
        le=120,
        validation_alias=_names("WEBHOOK_TIMEOUT_SECONDS"),
        description="Seconds a webhook's receiver has to answer, redirects included. A delivery whose sender is gone "
        "is sent again this long, and 5 seconds more, after it was begun.",
    )
    webhook_retry_base: Seconds = Field(
        5.0,
        ge=0.01,
        le=3600,
        validation_alias=_names("WEBHOOK_RETRY_BASE_SECONDS"),
        description="Seconds before the first retry of a webhook. The pauses after it are 6, 24, 120, 720 and 2160 "
        "times that, the last again and again; with jitter.",
    )
    webhook_retry_for: Seconds = Field(
        86_400.0,
        ge=1,
        le=2_592_000,
        validation_alias=_names("WEBHOOK_RETRY_FOR_SECONDS"),
        description="Seconds after which a webhook that nobody has taken is given up.",
    )
    webhook_ttl: Seconds = Field(
        604_800.0,
        ge=60,
        validation_alias=_names("WEBHOOK_TTL_SECONDS"),
        description="Seconds a webhook that was delivered or given up can be seen and sent again.",
    )
    stats_interval: Seconds = Field(
        60.0,
        ge=1,
        le=86_400,
        validation_alias=_names("STATS_INTERVAL_SECS"),
        description="Seconds between two `worker.stats` log lines.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", validation_alias=_names("LOG_LEVEL"), description="The least severe lines that are logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto",
        validation_alias=_only_ours("LOG_FORMAT"),
        description="`auto` is readable on a terminal and JSON elsewhere.",
    )

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator(
        "database_url",
        "direct_database_url",
        "redis_url",
        "signal_ping",
        "mount_prefix",
        "cors_allow_origins",
        "webhook_secrets",
        mode="before",
    )
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("db_schema")
    @classmethod
    def _plain_schema(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", value) or value.startswith("pg_"):
            raise ValueError("must be lower-case letters, digits and underscores, at most 63, not starting with pg_")
        return value

    @field_validator("mount_prefix")
    @classmethod
    def _usable_prefix(cls, value: str | None) -> str | None:
        return None if value is None else usable_prefix(value)

    @field_validator("webhook_secrets")
    @classmethod
    def _usable_secrets(cls, value: str | None) -> str | None:
        return usable_secrets(value)

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
        return self

    @property
    def session_url(self) -> str | None:
        """Where a connection that needs a session of its own goes; None when PgBouncer leaves no way."""
        if self.pgbouncer and self.direct_database_url is None:
            return None
        return self.direct_database_url or self.database_url

    @property
    def signing_secrets(self) -> list[str]:
        return split_secrets(self.webhook_secrets)


def environment_names(field: FieldInfo) -> list[str]:
    """The environment variables a field answers to, preferred first."""
    alias = field.validation_alias
    assert isinstance(alias, AliasChoices)
    return [str(choice) for choice in alias.choices]


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Build the settings from the environment and the command line's flags (`overrides`, None means not given).

    Raises SettingsError naming every field that is out of range, its value and the rule.
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
    """Settings that look only at what they are given: `load_settings` has read the environment already."""

    @classmethod
    def settings_customise_sources(cls, settings_cls: Any, init_settings: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        return (init_settings,)


def _explain(error: ValidationError, source: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors():
        rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if not problem["loc"]:
            lines.append(rule)
            continue
        name = str(problem["loc"][0])
        field = next(
            (key for key, info in Settings.model_fields.items() if name == key or name in environment_names(info)), name
        )
        told = field not in Settings.model_fields or Settings.model_fields[field].repr
        shown = problem["input"] if told else "(secret)"
        lines.append(f"{source.get(field, field)}={shown}: {rule}")
    return "\n".join(lines)
