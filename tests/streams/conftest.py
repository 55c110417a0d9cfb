"""The HTTP server of a web process. The tests write the event log themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from holdfast.settings import Settings, load_settings
from tests.support.catalogs import catalog_of
from tests.support.servers import free_port
from tests.support.serving import answering


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, port=free_port(), stream_stall=1.0, stream_heartbeat=0.5)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(settings, catalog_of()) as client:
        yield client
