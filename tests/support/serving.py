"""A web process's server and a worker in the test's own process, with graphs that the test has built."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from holdfast.api.main import serve
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings
from tests.support.live_worker import running_worker


@asynccontextmanager
async def serving(settings: Settings, catalog: GraphCatalog) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a worker, for the length of the block."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, catalog, stop))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as client:
            async with asyncio.timeout(20):
                while True:
                    try:
                        await client.get("/ok")
                        break
                    except httpx.TransportError:
                        assert not task.done(), task.exception()
                        await asyncio.sleep(0.02)
            async with running_worker(settings, catalog):
                yield client
    finally:
        stop.set()
        await task
