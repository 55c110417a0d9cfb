"""A server with a worker that may call this machine, and somebody there who is called."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.support.receiver import Receiver, receiving
from tests.support.servers import free_port
from tests.support.serving import serving

PROJECT = Path(__file__).parents[1] / "support" / "conformance_project" / "langgraph.json"
OLD_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEW_SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oDrpWJ2pTQ5eY="
ENVIRON = {
    "POSTGRES_POLL_INTERVAL_SECONDS": "0.5",
    "REAPER_INTERVAL_SECONDS": "0.2",
    "WEBHOOK_ALLOW_PRIVATE": "true",
    "WEBHOOK_SECRETS": f"{NEW_SECRET}, {OLD_SECRET}",
    "WEBHOOK_TIMEOUT_SECONDS": "60",
    "WEBHOOK_RETRY_BASE_SECONDS": "0.02",
}


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings(ENVIRON, database_url=database_url, port=free_port())


@pytest.fixture
def catalog() -> GraphCatalog:
    return GraphCatalog.load(load_config(PROJECT))


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def client(settings: Settings, catalog: GraphCatalog) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(settings, catalog) as client:
        yield client
