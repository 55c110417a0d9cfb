"""Every column that can hold anything is classified, so that hostile values are tried in each that others fill."""

from __future__ import annotations

import psycopg

from tests.hostile.columns import FILLED, stored_columns


def test_every_column_is_classified(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        stored = set(stored_columns(connection))
    classified = {(table, column) for table, columns in FILLED.items() for column in columns}
    assert stored - classified == set(), "say in columns.py who fills them"
    assert classified - stored == set(), "no such columns"
