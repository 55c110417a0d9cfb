"""The example, as a reader would run it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.cli.processes import Program
from tests.support.live_worker import quick_settings
from tests.support.servers import free_port
from tests.support.serving import serving

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, port=free_port())


async def test_example_stops_at_its_budget_and_continues(settings: Settings) -> None:
    async with serving(settings, GraphCatalog.load(load_config(EXAMPLES / "budgets.json"))) as client:
        with Program([sys.executable, str(EXAMPLES / "budgets.py"), str(client.base_url)], environ={}) as program:
            await expect(program, r"error: The run was stopped by its budget: max_tokens=12000 reached, 12500 tokens")
            await expect(program, r"It had 4 thoughts by then\.")
            await expect(program, r"openai:gpt-4o: \d+ calls, \d+ tokens, \$0\.\d{4}")
            await expect(program, r"openai:gpt-4o-mini: \d+ calls")


async def expect(program: Program, pattern: str) -> None:
    """Without keeping the server, which is in this process, from answering."""
    await asyncio.to_thread(program.expect, pattern, 60)
