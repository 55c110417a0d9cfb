"""examples/logs.py does what it says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from tests.support.live_worker import quick_settings, running_worker
from tests.support.records import post_run, run_ended

EXAMPLES = Path(__file__).parents[2] / "examples"


async def test_the_hasty_graph_is_named_and_the_steady_one_is_not(
    database_url: str, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = quick_settings(database_url, blocked_loop=0.3)
    catalog = GraphCatalog.load(load_config(EXAMPLES / "logs.json"))
    with capture_logs() as logged:
        async with running_worker(settings, catalog):
            for graph in ("steady", "hasty"):
                created = await post_run(database, graph, input={"seconds": 2.5})
                assert (await run_ended(database, created.run["run_id"]))["status"] == "success"
    assert "fetching, and blocking everybody" in caplog.messages
    assert [entry["seconds"] for entry in logged if entry["event"] == "fetching in a thread"] == [2.5]
    blocked = [entry for entry in logged if entry["event"] == "loop.blocked" and entry.get("function") == "fetch"]
    assert [(entry["graph_id"], Path(entry["file"]).name) for entry in blocked] == [("hasty", "logs.py")]
    assert blocked[0]["source"] == "time.sleep(seconds)"
