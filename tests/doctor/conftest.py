"""An installation to examine, and roles to examine it as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from holdfast.insight.doctor.installation import Installation
from holdfast.settings import Settings


@pytest.fixture
def installation(settings: Settings) -> Installation:
    return Installation(settings)


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    """A role that may connect, and nothing else."""
    name = f"role_{uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN".encode())
        yield name
        connection.execute(f"DROP OWNED BY {name} CASCADE".encode())
        connection.execute(f"DROP ROLE {name}".encode())


@pytest.fixture
def as_role(database_url: str, settings: Settings, role: str) -> Installation:
    """The installation as that role finds it."""
    return Installation(settings.model_copy(update={"database_url": make_conninfo(database_url, user=role)}))


@pytest.fixture
def execute(database_url: str) -> Iterator[Callable[[str], None]]:
    """Do something to the database, as its owner."""
    with psycopg.connect(database_url, autocommit=True, options="-c search_path=holdfast") as connection:

        def statement(text: str) -> None:
            connection.execute(text.encode())

        yield statement
