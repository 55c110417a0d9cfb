"""A web process's server and a worker, in this process, on a database of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.support.databases import own_database
from tests.support.intruder import Intruder, intrusion
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES, working


@pytest.fixture
def settings(database_url: str) -> Settings:
    quick = {"POSTGRES_POLL_INTERVAL_SECONDS": "0.5", "HOLDFAST_STREAM_HEARTBEAT_SECONDS": "0.2"}
    return load_settings(quick, database_url=database_url, port=free_port(), max_body_bytes=100_000)


@pytest.fixture
async def web(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that has no worker: runs stay queued."""
    async with answering(settings, GraphCatalog.load(load_config(EXAMPLES))) as client:
        yield client


@pytest.fixture
async def client(web: httpx.AsyncClient, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a worker."""
    async with working(settings):
        yield web


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def intruder(server_url: str) -> AsyncIterator[Intruder]:
    """A client of a server that has one of everything, the same for all tests of a module."""
    with own_database(server_url) as database_url:
        async with intrusion(database_url) as found:
            yield found
