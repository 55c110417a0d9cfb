"""One server for all the scripts, and its log when one of them fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.conformance.server import Server, serving
from tests.support.node import node_modules

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server(server_url: str) -> Iterator[Server]:
    node_modules(HERE)  # Before the server: without Node there is nothing to start it for.
    with serving(str(HERE / "project"), server_url, {"STREAM_HEARTBEAT_SECONDS": "0.2"}) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(server, Server):
        report.sections.append(("log of the server", server.program.output[-6000:]))
    return report
