"""The example of approvals, as a reader would run it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from tests.interrupts.asking import desk_settings
from tests.support.serving import serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "approvals"


async def test_two_people_click_and_one_is_heard(database_url: str) -> None:
    settings = desk_settings(database_url)
    async with serving(settings, GraphCatalog.load(load_config(EXAMPLE / "langgraph.json"))) as client:
        command = [sys.executable, str(EXAMPLE / "approvals.py"), str(client.base_url)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    asked, refused, first, second, outcome = done.stdout.splitlines()
    assert asked.startswith("asked: Pay 129.90? (fields: verdict, note; until ")
    assert refused.startswith("422: ")
    assert first == "200: accepted"
    assert second.startswith("409: ")
    assert "already, by run" in second
    assert outcome == "the expense is paid"
