"""A web process's server and a worker, in this process, on a database of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from holdfast.api.main import serve
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.support.servers import free_port
from tests.support.smoke import EXAMPLES, working


@pytest.fixture
def settings(database_url: str) -> Settings:
    quick = {"POSTGRES_POLL_INTERVAL_SECONDS": "0.5", "HOLDFAST_STREAM_HEARTBEAT_SECONDS": "0.2"}
    return load_settings(quick, database_url=database_url, port=free_port(), max_body_bytes=100_000)


@pytest.fixture
async def web(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that has no worker: runs stay queued."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, GraphCatalog.load(load_config(EXAMPLES)), stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as client:
        async with asyncio.timeout(20):
            while True:
                try:
                    await client.get("/ok")
                    break
                except httpx.TransportError:
                    assert not task.done(), task.exception()
                    await asyncio.sleep(0.02)
        yield client
        stop.set()
    await task


@pytest.fixture
async def client(web: httpx.AsyncClient, settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a worker."""
    async with working(settings):
        yield web
