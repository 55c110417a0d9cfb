"""One Postgres server for all tests, started here; a migrated, empty database for each."""

from __future__ import annotations

import os

# As the command line sets it, before anything imports LangGraph.
os.environ["LANGGRAPH_STRICT_MSGPACK"] = "true"

import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from holdfast.db import embedded_server
from holdfast.db.connect import Database
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.settings import Settings, load_settings
from tests.support import error_logs, selection
from tests.support.databases import create_template, own_database

SERVER = "HOLDFAST_TEST_SERVER"
# The URL of a server to be used instead of starting one: a new one, of another version, from `make test-matrix`.
GIVEN_SERVER = "HOLDFAST_TEST_POSTGRES"
# Several fleets use the server at the same time. Nothing in it needs to survive a crash of the machine: what a commit
# means is tested with servers of the tests' own.
SERVER_OPTIONS = {"max_connections": "500", "fsync": "off", "full_page_writes": "off"}
# How much of a server's log is shown with a test that fails.
LOG_TAIL_CHARACTERS = 6_000


def pytest_configure(config: pytest.Config) -> None:
    """In the process that controls the session, before any xdist worker starts: they inherit the variable."""
    for marker in (*selection.MARKERS, error_logs.MARKER):
        config.addinivalue_line("markers", marker)
    # A shell without job control starts `make test &` with SIGINT ignored, and so would be every process under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or config.option.markexpr == "fast" or config.option.collectonly:
        return
    if given := os.environ.get(GIVEN_SERVER):
        create_template(given)
        os.environ[SERVER] = given
        return
    directory = Path(tempfile.mkdtemp(prefix="holdfast-tests-"))
    server = EmbeddedPostgres(directory)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SERVER_OPTIONS.items():
            patch.setitem(embedded_server.SERVER_OPTIONS, name, value)
        url = server.start()
    create_template(url)
    os.environ[SERVER] = url

    def stop() -> None:
        server.close()
        shutil.rmtree(directory, ignore_errors=True)

    config.add_cleanup(stop)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    selection.mark(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with selection.no_servers() if item.get_closest_marker("fast") else nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    error_logs.watch_this_process()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        error_logs.fail_if_unexpected(item)


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
    with own_database(server_url) as url:
        yield url


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url)


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    opened = Database(settings, "test")
    await opened.open()
    yield opened
    await opened.close()
