"""A project whose graphs use the store, with semantic search and a time to live, and servers for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from holdfast.api.main import serve
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.settings import Settings
from holdfast.worker.main import Worker

PROJECT = Path(__file__).parent / "langgraph.json"


def project() -> ProjectConfig:
    return load_config(PROJECT)


@asynccontextmanager
async def serving(settings: Settings, config: ProjectConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server of the project, for the length of the block."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, GraphCatalog.load(config or project()), stop))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as client:
            async with asyncio.timeout(20):
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
async def working(settings: Settings) -> AsyncIterator[Worker]:
    worker = Worker(settings, GraphCatalog.load(project()))
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await task
