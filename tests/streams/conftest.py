"""A web process's server on a database whose log the tests write themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from holdfast.api.main import serve
from holdfast.settings import Settings, load_settings
from tests.support.catalogs import catalog_of
from tests.support.servers import free_port


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, port=free_port(), stream_stall=1.0, stream_heartbeat=0.5)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(settings, catalog_of(), stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as client:
        async with asyncio.timeout(20):
            while True:
                try:
                    await client.get("/ok")
                    break
                except httpx.TransportError:
                    assert not serving.done(), serving.exception()
                    await asyncio.sleep(0.02)
        yield client
        stop.set()
    await serving
