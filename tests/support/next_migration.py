"""A migration that the next version brings, and what is applied."""

from __future__ import annotations

import psycopg
import pytest

from holdfast.db.migrate import Migration, migrations


def applied_to(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT name FROM holdfast.holdfast_migration ORDER BY number")]


def with_next(monkeypatch: pytest.MonkeyPatch, statements: str, *, concurrently: bool = False) -> Migration:
    """A migration that the next version brings."""
    known = migrations()
    new = Migration(known[-1].number + 1, "9999_next", statements, concurrently)
    monkeypatch.setattr("holdfast.db.migrate.migrations", lambda: [*known, new])
    return new
