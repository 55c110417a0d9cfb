"""A server of graphs that ask, the same for all tests of a module, with a worker that has one slot."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from tests.interrupts.asking import PROJECT, Desk, desk_settings
from tests.support.databases import own_database
from tests.support.live_worker import running_worker
from tests.support.serving import answering


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(server_url: str) -> AsyncIterator[Desk]:
    with own_database(server_url) as database_url:
        settings = desk_settings(database_url)
        catalog = GraphCatalog.load(load_config(PROJECT))
        database = Database(settings, "test")
        await database.open()
        try:
            async with answering(settings, catalog) as client, running_worker(settings, catalog):
                yield Desk(client, database, settings, catalog)
        finally:
            await database.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def idle(server_url: str) -> AsyncIterator[Desk]:
    """The same without a worker, so that nothing happens unless a test starts one."""
    with own_database(server_url) as database_url:
        settings = desk_settings(database_url)
        catalog = GraphCatalog.load(load_config(PROJECT))
        database = Database(settings, "test")
        await database.open()
        try:
            async with answering(settings, catalog) as client:
                yield Desk(client, database, settings, catalog)
        finally:
            await database.close()
