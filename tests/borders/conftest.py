"""One server with a worker, and a client for each of two users of different tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.support.servers import free_port
from tests.support.serving import serving

PROJECT = Path(__file__).parent / "project" / "langgraph.json"


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, port=free_port())


@pytest.fixture
async def url(settings: Settings) -> AsyncIterator[str]:
    async with serving(settings, GraphCatalog.load(load_config(PROJECT))) as client:
        yield str(client.base_url)


def client_of(url: str, user: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {user}"}, timeout=60)


@pytest.fixture
async def alice(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(url, "alice") as client:
        yield client


@pytest.fixture
async def mallory(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(url, "mallory") as client:
        yield client
