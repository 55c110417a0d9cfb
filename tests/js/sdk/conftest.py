"""One server for all the scripts, and its log when one of them fails."""

from __future__ import annotations

from collections.abc import Iterator
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
