"""Which carrier a process uses for its hints."""

from __future__ import annotations

from typing import Literal

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.signals.postgres import PostgresSignals
from holdfast.signals.redis import RedisSignals
from holdfast.signals.redis_url import parse_redis_url


def signals_for(database: Database) -> Signals:
    """Redis if REDIS_URL is set, else Postgres. Raises SettingsError for a URL that cannot be used."""
    if database.settings.redis_url is None:
        return PostgresSignals(database)
    return RedisSignals(database, parse_redis_url(database.settings.redis_url))


def mode_of(signals: Signals, settings: Settings) -> Literal["postgres", "redis", "polling"]:
    """How hints travel at this moment. May be asked from any thread."""
    if signals.degraded:
        return "polling"
    if settings.redis_url is not None:
        return "redis"
    # Behind PgBouncer alone nobody can listen.
    return "polling" if settings.session_url is None else "postgres"
