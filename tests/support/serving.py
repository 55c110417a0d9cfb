"""A web process's server in the test's own process, with or without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from holdfast.api.main import serve
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings
from tests.support.live_worker import running_worker

PATIENCE = 60.0


@asynccontextmanager
async def answering(settings: Settings, catalog: GraphCatalog) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that has no worker, for the length of the block. Raises what keeps the server from
    starting."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, catalog, stop))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=60) as client:
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        await client.get("/ok")
                        break
                    except httpx.TransportError:
                        if task.done():
                            await task
                        await asyncio.sleep(0.02)
            yield client
    finally:
        stop.set()
        await task


@asynccontextmanager
async def serving(settings: Settings, catalog: GraphCatalog) -> AsyncIterator[httpx.AsyncClient]:
    """The same with a worker."""
    async with answering(settings, catalog) as client, running_worker(settings, catalog):
        yield client
