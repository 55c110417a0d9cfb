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
from tests.support.live_worker import running_worker
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES


@pytest.fixture
def settings(database_url: str) -> Settings:
    quick = {
        "POSTGRES_POLL_INTERVAL_SECONDS": "0.5",
        "HOLDFAST_STREAM_HEARTBEAT_SECONDS": "0.2",
        # Tests leave runs behind that have not ended.
        "WORKER_DRAIN_TIMEOUT": "0",
    }
    return load_settings(quick, database_url=database_url, port=free_port(), max_body_bytes=100_000)


@pytest.fixture
def example_graphs() -> GraphCatalog:
    """The web process's graphs and the worker's: loaded once."""
    return GraphCatalog.load(load_config(EXAMPLES))


@pytest.fixture
async def web(settings: Settings, example_graphs: GraphCatalog) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that has no worker: runs stay queued."""
    async with answering(settings, example_graphs) as client:
        yield client


@pytest.fixture
async def client(
    web: httpx.AsyncClient, settings: Settings, example_graphs: GraphCatalog
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a worker."""
    async with running_worker(settings, example_graphs):
        yield web


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def intruder(server_url: str) -> AsyncIterator[Intruder]:
    """A client of a server that has one of everything, the same for all tests of a module."""
    with own_database(server_url) as database_url:
        async with intrusion(database_url) as found:
            yield found
