"""The autoscaler of the examples, as a reader would run it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.cli.processes import Program
from tests.support import waiting
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES, post

EXAMPLE = Path(__file__).parents[2] / "examples" / "autoscale.py"


async def said(url: str) -> str:
    with Program([sys.executable, str(EXAMPLE), url]) as program:
        assert await asyncio.to_thread(program.wait, 60) == 0, program.output
    # All of it has been read when the block has ended.
    return program.output


async def test_autoscaler_example_asks_for_workers_when_runs_wait(settings: Settings, database: Database) -> None:
    settings = settings.model_copy(update={"port": free_port(), "metrics_cache": 0.1})
    url = f"http://127.0.0.1:{settings.port}"
    async with answering(settings, GraphCatalog.load(load_config(EXAMPLES))):
        assert "1 workers, for 0 ready and 0 running runs; 0 are online." in await said(url)
        for _ in range(11):
            await post(database, "echo")

        async def asks_for_two() -> bool:
            return "2 workers, for 11 ready and 0 running runs; 0 are online." in await said(url)

        # The figures may be a little old.
        await waiting.until(asks_for_two, "it asks for two workers", patience=150)
