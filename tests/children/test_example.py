"""The example of docs/children.md, as a reader would run it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess

import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.cli.processes import holdfast
from tests.support.live_worker import quick_settings
from tests.support.servers import free_port
from tests.support.serving import serving
from tests.support.smoke import EXAMPLES

TOPICS = {"topics": ["tides", "", "reefs"], "seconds": 0}


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, pool_max=8, port=free_port())


async def command(settings: Settings, *arguments: str) -> str:
    environ = {**os.environ, "HOLDFAST_URL": f"http://127.0.0.1:{settings.port}", "COLUMNS": "200"}
    done = await asyncio.to_thread(
        subprocess.run, holdfast(*arguments), env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


async def test_a_survey_hands_its_topics_out(settings: Settings) -> None:
    async with serving(settings, GraphCatalog.load(load_config(EXAMPLES.with_name("children.json")))):
        shown = await command(settings, "run", "survey", "--input", json.dumps(TOPICS))
        found = re.search(r"run ([0-9a-f-]{36})", shown)
        assert found is not None, shown
        printed = await command(settings, "runs", "children", found[1], "--json")
    assert "what is known about tides" in shown
    children = [json.loads(line) for line in printed.splitlines()]
    assert [(child["key"], child["status"]) for child in children] == [
        ("topic tides", "success"),
        ("topic ", "error"),
        ("topic reefs", "success"),
    ]
    assert children[1]["error"] == {"error": "ValueError", "message": "there is nothing to read about nothing"}
