"""Which carrier a process uses for its hints."""

from __future__ import annotations

from holdfast.db.connect import Database
from holdfast.signals import Signals
from holdfast.signals.postgres import PostgresSignals
from holdfast.signals.redis import RedisSignals
from holdfast.signals.redis_url import parse_redis_url


def signals_for(database: Database) -> Signals:
    """Redis if REDIS_URL is set, else Postgres. Raises SettingsError for a URL that cannot be used."""
    if database.settings.redis_url is None:
        return PostgresSignals(database)
    return RedisSignals(database, parse_redis_url(database.settings.redis_url))
