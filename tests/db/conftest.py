"""A database without a schema."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo


@pytest.fixture
def empty_url(server_url: str) -> Iterator[str]:
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield make_conninfo(server_url, dbname=name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
