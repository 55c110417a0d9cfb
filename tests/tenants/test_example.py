"""The example with two customers, as a reader would run it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.resources.api_keys import create_key
from holdfast.settings import load_settings
from tests.cli.processes import Program
from tests.support.servers import free_port
from tests.support.serving import serving
from tests.support.smoke import EXAMPLES

EXAMPLE = Path(__file__).parents[2] / "examples" / "tenants.py"


async def test_neither_sees_or_waits_for_the_other(database: Database, database_url: str) -> None:
    async with database.transaction() as connection:
        keys = [(await create_key(connection, tenant, "example", ["read", "write"]))[0] for tenant in ("acme", "zeta")]
    settings = load_settings({}, database_url=database_url, port=free_port())
    async with serving(settings, GraphCatalog.load(load_config(EXAMPLES))):
        url = f"http://127.0.0.1:{settings.port}"
        with Program([sys.executable, str(EXAMPLE), url, *keys]) as program:
            assert await asyncio.to_thread(program.wait, 60) == 0, program.output
            assert "acme has a thread, and sees 1" in program.output
            assert "zeta sees 0" in program.output
            assert "zeta is told that there is no such thread" in program.output
            assert "zeta has its answer" in program.output
