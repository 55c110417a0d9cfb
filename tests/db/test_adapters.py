"""Type adapters of Holdfast's own connections."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from holdfast.db.adapters import ADAPTERS, EARLIEST_TIMESTAMP, LATEST_TIMESTAMP


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ("infinity", LATEST_TIMESTAMP),
        ("-infinity", EARLIEST_TIMESTAMP),
        ("10000-01-01 00:00:00+00", LATEST_TIMESTAMP),
        ("0001-12-31 00:00:00+00 BC", EARLIEST_TIMESTAMP),
        ("2026-01-01 00:00:00+00", datetime(2026, 1, 1, tzinfo=UTC)),
        (None, None),
    ],
)
def test_timestamp_is_read_within_pythons_range(database_url: str, stored: str | None, read: datetime | None) -> None:
    with psycopg.connect(database_url, options="-c TimeZone=UTC", context=ADAPTERS) as connection:
        assert connection.execute("SELECT %s::timestamptz", (stored,)).fetchone() == (read,)
