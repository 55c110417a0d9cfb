"""The database: Postgres, and optionally Redis."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from holdfast.settings.fields import Seconds, Section, prefixed_name, setting_names


class DatabaseSettings(Section):
    database_url: str | None = Field(
        None,
        repr=False,
        validation_alias=setting_names("DATABASE_URL", "DATABASE_URI", "POSTGRES_URI"),
        description="Postgres 14 to 18, as a URL or key=value string. Unset: `dev` and `serve` start a private "
        "Postgres in the data directory.",
    )
    direct_database_url: str | None = Field(
        None,
        repr=False,
        validation_alias=setting_names("DIRECT_DATABASE_URL"),
        description="A URL that bypasses PgBouncer, for connections that need a session (LISTEN, the heartbeat, "
        "leadership). Unset: DATABASE_URL is used; with HOLDFAST_PGBOUNCER, processes poll instead, and a lost worker "
        "is noticed only when its lease expires.",
    )
    pgbouncer: bool = Field(
        False,
        validation_alias=prefixed_name("PGBOUNCER"),
        description="DATABASE_URL leads through PgBouncer in transaction mode: no prepared statements, no session "
        "state outside a transaction. Costs some speed.",
    )
    db_schema: str = Field(
        "holdfast",
        validation_alias=setting_names("DATABASE_SCHEMA"),
        description="The Postgres schema of all tables, including LangGraph's checkpoint tables. Name the "
        "schema of existing checkpoint tables (usually `public`) to keep using them.",
    )
    pool_min: int = Field(
        1,
        ge=0,
        le=1000,
        validation_alias=setting_names("DATABASE_POOL_MIN"),
        description="Connections a process keeps open in its pool.",
    )
    pool_max: int = Field(
        10,
        ge=1,
        le=1000,
        validation_alias=setting_names("DATABASE_POOL_MAX"),
        description="Connections a process may open in its pool. A worker opens four more (journal, heartbeat, "
        "signals, leadership), a web process two. If the sum exceeds the server's max_connections, processes fail to "
        "start.",
    )
    database_timeout: Seconds = Field(
        10.0,
        ge=0.1,
        le=300,
        validation_alias=setting_names("DATABASE_TIMEOUT"),
        description="Seconds to wait for a connection, or for the answer to a statement of the heartbeat, of claiming, "
        "of signals or of the upkeep, before it counts as failed. A request's statement may take three times as long, "
        "one attempt to connect 0.4 of it. "
        "If it is too short, a slow server looks like one that hangs; if it is too long, a fail-over takes longer.",
    )
    data_dir: Path = Field(
        Path(".holdfast"),
        validation_alias=prefixed_name("DATA_DIR"),
        description="Where the embedded Postgres keeps its data and its log.",
    )
    redis_url: str | None = Field(
        None,
        repr=False,
        validation_alias=setting_names("REDIS_URL", "REDIS_URI"),
        description="Redis 6 or later for hints: redis://host:6379/0, rediss:// for TLS, unix:///path, "
        "redis+sentinel://host:26379,host:26379/master-name or redis+cluster://host:6379,host:6379. Unset: hints "
        "travel over Postgres. Nothing is stored in Redis; while it is away processes poll.",
    )

    @field_validator("db_schema")
    @classmethod
    def _plain_schema(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", value) or value.startswith("pg_"):
            raise ValueError("must be lower-case letters, digits and underscores, at most 63, not starting with pg_")
        return value

    @property
    def session_url(self) -> str | None:
        """The URL for connections that need a session; None if there is only PgBouncer."""
        if self.pgbouncer and self.direct_database_url is None:
            return None
        return self.direct_database_url or self.database_url
