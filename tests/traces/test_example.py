"""The example of docs/traces.md, as a reader would run it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from tests.cli.processes import Program
from tests.support.live_worker import quick_settings
from tests.support.servers import free_port
from tests.support.serving import serving
from tests.traces.test_sending import sending

EXAMPLE = Path(__file__).parents[2] / "examples" / "tracing"


@pytest.mark.expects_errors("openinference.instrumentation.langchain._tracer")
async def test_the_page_prints_what_came_of_a_run(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Program([sys.executable, EXAMPLE / "spans.py", "0"]) as program:
        url = program.expect(r"Receiving at (http://\S+)")[1]
        settings = quick_settings(database_url, port=free_port(), otlp_endpoint=url)
        catalog = GraphCatalog.load(load_config(EXAMPLE / "langgraph.json"))
        with sending(settings):
            async with serving(settings, catalog) as client:
                body = {"assistant_id": "almanac", "input": {"harbour": "Ostend"}}
                answer = await client.post("/runs/wait", json=body)
                assert answer.json()["line"] == "High water is at six."
        for expected in (
            r"^trace [0-9a-f]{32}$",
            r"^  POST /runs/wait  \d+ ms  response.status_code=200$",
            r"^    holdfast\.create ",
            r"^      holdfast\.attempt .*attempt=1, outcome=waiting for its children$",
            r"^          look_up ",
            r"^            holdfast\.create ",
            r"^                  ask ",
            r"^                    GenericFakeChatModel .*token_count\.total=20$",
            r"^      holdfast\.attempt .*attempt=2, outcome=success$",
        ):
            program.expect(expected)
