"""The servers of tests/api, for clients that bring their own HTTP, and one of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.api.conftest import client, example_graphs, settings, web
from tests.cli.processes import Program, holdfast
from tests.support.databases import own_database
from tests.support.sdk import Sdk
from tests.support.servers import free_port
from tests.support.waiting import until

__all__ = ["client", "example_graphs", "settings", "web"]

PROJECT = Path(__file__).parents[1] / "support" / "sdk_project" / "langgraph.json"


@pytest.fixture(scope="session")
def environ(server_url: str) -> Iterator[dict[str, str]]:
    """What the processes of `served` are told: a database of their own, and to be quick."""
    with own_database(server_url) as database_url:
        yield {
            "DATABASE_URL": database_url,
            "POSTGRES_POLL_INTERVAL_SECONDS": "0.5",
            "WORKER_DRAIN_TIMEOUT": "0",
            # A blocking client notices that it was closed when the next sign of life arrives.
            "HOLDFAST_STREAM_HEARTBEAT_SECONDS": "0.2",
        }


@pytest.fixture(scope="session")
def served(environ: dict[str, str]) -> Iterator[str]:
    """Where `holdfast serve` answers: a web process and a worker process, for all tests that leave no mess behind.

    Each uses threads of its own, and cancels what it leaves running.
    """
    port = free_port()
    command = holdfast("serve", "--workers", "1", "--config", PROJECT, "--port", str(port))
    with Program(command, environ=environ) as program:
        program.expect("Holdfast is ready", timeout=120)
        yield f"http://127.0.0.1:{port}"
        program.process.terminate()
        program.wait(60)


@pytest.fixture
async def another_web(served: str, environ: dict[str, str]) -> AsyncIterator[tuple[str, Program]]:
    """A second web process of the same server, to be stopped by the test."""
    url = f"http://127.0.0.1:{free_port()}"
    command = holdfast("web", "--config", PROJECT, "--port", url.rpartition(":")[2])
    with Program(command, environ=environ) as program:
        async with httpx.AsyncClient() as asking:

            async def answers() -> bool:
                assert program.process.poll() is None, program.output
                with suppress(httpx.TransportError):
                    return (await asking.get(f"{url}/ok")).status_code == 200
                return False

            await until(answers, "the web process answers", patience=60)
        yield url, program


@pytest.fixture(params=["async", "sync"])
async def remote(request: pytest.FixtureRequest, served: str) -> AsyncIterator[Sdk]:
    """Each client of the SDK, connected to real processes."""
    opened = Sdk(served, blocking=request.param == "sync")
    yield opened
    await opened.close()
