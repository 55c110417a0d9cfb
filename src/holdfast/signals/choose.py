"""Chooses the carrier that a process uses for its hints."""

from __future__ import annotations

from typing import Literal

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.signals.carrier import Carrier
from holdfast.signals.postgres import PostgresSignals
from holdfast.signals.redis import RedisSignals
from holdfast.signals.redis_url import parse_redis_url


def signals_for(database: Database) -> Carrier:
    """Use Redis if REDIS_URL is set, else Postgres. Raises SettingsError for a URL that cannot be used."""
    if database.settings.redis_url is None:
        return PostgresSignals(database)
    return RedisSignals(database, parse_redis_url(database.settings.redis_url))


def signals_mode(signals: Signals, settings: Settings) -> Literal["postgres", "redis", "polling"]:
    """The way in which processes learn of changes at this moment. May be called from any thread."""
    if signals.degraded:
        return "polling"
    if settings.redis_url is not None:
        return "redis"
    # Behind PgBouncer alone, LISTEN is not possible.
    return "polling" if settings.session_url is None else "postgres"
