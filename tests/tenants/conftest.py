"""A server with keys of several tenants, the same for all tests of a module. It has no worker: runs stay queued."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest_asyncio
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.resources.api_keys import Scope, create_key, revoke_key
from holdfast.resources.tenants import set_limits
from holdfast.settings import Settings, load_settings
from tests.support.databases import own_database
from tests.support.intruder import PROJECT
from tests.support.records import query
from tests.support.servers import free_port
from tests.support.serving import answering

QUICK = {"KEY_REFRESH_SECONDS": "0.1", "HOLDFAST_STREAM_HEARTBEAT_SECONDS": "0.2"}
BOTH: tuple[Scope, ...] = ("read", "write")


class House:
    """A server, its database, and clients with keys."""

    def __init__(self, settings: Settings, catalog: GraphCatalog, database: Database, stack: AsyncExitStack) -> None:
        self.url = f"http://127.0.0.1:{settings.port}"
        self.settings = settings
        self.catalog = catalog
        self.database = database
        self._stack = stack

    async def client(self, **headers: str) -> httpx.AsyncClient:
        client = httpx.AsyncClient(base_url=self.url, timeout=30, headers=headers)
        return await self._stack.enter_async_context(client)

    async def key(self, tenant: str, scopes: Sequence[Scope] = BOTH, expires_in: float | None = None) -> str:
        async with self.database.transaction() as connection:
            return (await create_key(connection, tenant, "test", scopes, expires_in))[0]

    async def tenant(self, name: str, scopes: Sequence[Scope] = BOTH) -> httpx.AsyncClient:
        """Somebody with a key of this tenant."""
        return await self.client(**{"x-api-key": await self.key(name, scopes)})

    async def revoke(self, key: str, *, forget: bool = False) -> None:
        async with self.database.transaction() as connection:
            await revoke_key(connection, key[:9], forget=forget)

    async def limit(self, tenant: str, **limits: float) -> None:
        async with self.database.transaction() as connection:
            await set_limits(connection, tenant, limits, [])

    async def query(self, statement: str, *parameters: Any) -> list[DictRow]:
        return await query(self.database, statement, *parameters)


@asynccontextmanager
async def open_house(server_url: str, *, project: ProjectConfig | None = None, **environ: str) -> AsyncIterator[House]:
    with own_database(server_url) as database_url:
        settings = load_settings({**QUICK, **environ}, database_url=database_url, port=free_port())
        database = Database(settings, "test")
        async with AsyncExitStack() as stack:
            catalog = GraphCatalog.load(project or load_config(PROJECT))
            await stack.enter_async_context(answering(settings, catalog))
            await database.open()
            stack.push_async_callback(database.close)
            yield House(settings, catalog, database, stack)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(server_url: str) -> AsyncIterator[House]:
    async with open_house(server_url) as house:
        yield house
