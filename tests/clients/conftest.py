"""One server for all the clients, and its log when a test fails."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient

from tests.conformance.server import Server, serving

PACKAGES = ("deepagents", "langchain", "langgraph_supervisor", "langgraph_swarm")


@pytest.fixture(scope="session")
def server(server_url: str) -> Iterator[Server]:
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        reason = f"{', '.join(missing)} not installed: make installs the packages of requirements-clients.txt"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with serving("clients_project", server_url, {"HOLDFAST_STREAM_HEARTBEAT_SECONDS": "0.2"}) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[LangGraphClient]:
    opened = get_client(url=server.url)
    yield opened
    await opened.aclose()
