"""The JavaScript SDK drives every resource. The checks themselves are in the scripts beside this file."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.conformance.server import Server
from tests.support.node import run_node

HERE = Path(__file__).parent
VERSIONS = ("1.12.0", "2.0.0")


async def passes(script: str, server: Server, version: str, **environ: str) -> None:
    printed = await run_node(
        HERE / f"{script}.mjs", env={"HOLDFAST_URL": server.url, "SDK_VERSION": version, **environ}, timeout=240
    )
    assert re.search(r"^# pass [1-9]", printed, re.MULTILINE), f"{script} has tested nothing:\n{printed}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "script", ["assistants", "threads", "state", "runs", "run_streams", "interrupts", "crons", "store"]
)
async def test_resource(script: str, version: str, server: Server) -> None:
    await passes(script, server, version)


@pytest.mark.parametrize("transport", ["sse", "websocket"])
async def test_thread_streams(transport: str, server: Server) -> None:
    """Only the newer of the two has a client for the thread-centric protocol."""
    await passes("thread_streams", server, "1.12.0", TRANSPORT=transport)


@pytest.mark.parametrize("version", VERSIONS)
async def test_streams_go_on_when_the_web_process_is_replaced(version: str, server: Server) -> None:
    web = next(child for child in psutil.Process(server.program.pid).children() if "web" in child.cmdline())
    await passes("replaced", server, version, WEB_PROCESS=str(web.pid))
