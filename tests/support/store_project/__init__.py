"""A project whose graphs use the store, with semantic search and a time to live, and servers for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.settings import Settings
from holdfast.worker.main import Worker
from tests.support.live_worker import running_worker
from tests.support.serving import answering

PROJECT = Path(__file__).parent / "langgraph.json"


def project() -> ProjectConfig:
    return load_config(PROJECT)


@asynccontextmanager
async def serving(settings: Settings, config: ProjectConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server of the project, for the length of the block."""
    async with answering(settings, GraphCatalog.load(config or project())) as client:
        yield client


@asynccontextmanager
async def working(settings: Settings) -> AsyncIterator[Worker]:
    async with running_worker(settings, GraphCatalog.load(project())) as worker:
        yield worker
