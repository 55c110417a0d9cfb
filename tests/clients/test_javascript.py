"""Clients in JavaScript. The checks themselves are in the scripts of tests/js/clients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conformance.server import Server
from tests.support.node import node_modules, run_node

SCRIPTS = Path(__file__).parents[1] / "js" / "clients"


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    """Before the server: without Node there is nothing to start it for."""
    node_modules(SCRIPTS)


@pytest.mark.parametrize("script", ["remote_graph", "ag_ui", "ai_sdk"])
async def test_javascript_client(script: str, server: Server) -> None:
    printed = await run_node(SCRIPTS / f"{script}.mjs", env={"HOLDFAST_URL": server.url}, timeout=240)
    assert re.search(r"^# pass [1-9]", printed, re.MULTILINE), f"{script} has tested nothing:\n{printed}"
