"""One Postgres server for all tests, started here; a database for each, cloned from a migrated template."""

from __future__ import annotations

import os

# As the command line sets it, before anything imports LangGraph.
os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"

import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from holdfast.db import embedded_server
from holdfast.db.connect import Database
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.migrate import migrate
from holdfast.settings import Settings, load_settings

SERVER = "HOLDFAST_TEST_SERVER"
# The URL of a server to be used instead of starting one: a new one, of another version, from `make test-matrix`.
GIVEN_SERVER = "HOLDFAST_TEST_POSTGRES"
TEMPLATE = "holdfast_template"
# How much of a server's log is shown with a test that fails.
LOG_TAIL_CHARACTERS = 6_000


def pytest_configure(config: pytest.Config) -> None:
    """In the process that controls the session, before any xdist worker starts: they inherit the variable."""
    # A shell without job control starts `make test &` with SIGINT ignored, and so would be every process under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        return
    if given := os.environ.get(GIVEN_SERVER):
        _create_template(given)
        os.environ[SERVER] = given
        return
    directory = Path(tempfile.mkdtemp(prefix="holdfast-tests-"))
    # Several fleets use the server at the same time.
    embedded_server.SERVER_OPTIONS["max_connections"] = "500"
    server = EmbeddedPostgres(directory)
    url = server.start()
    _create_template(url)
    os.environ[SERVER] = url

    def stop() -> None:
        server.close()
        shutil.rmtree(directory, ignore_errors=True)

    config.add_cleanup(stop)


def _create_template(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {TEMPLATE}")
    migrate(load_settings({}, database_url=make_conninfo(url, dbname=TEMPLATE)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the log of each server that a failed test has used: of each fixture with a method `log_tail`."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if callable(log_tail := getattr(value, "log_tail", None)):
                report.sections.append((f"log of {name}", log_tail()))
    return report


@pytest.fixture(scope="session")
def server_url() -> str:
    """The shared server; not to be stopped or restarted by a test."""
    return os.environ[SERVER]


@pytest.fixture
def database_url(server_url: str) -> Iterator[str]:
    """A migrated database of the test's own."""
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        yield make_conninfo(server_url, dbname=name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url)


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    opened = Database(settings, "test")
    await opened.open()
    yield opened
    await opened.close()
