"""One server for all checks, in each signal mode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.conformance.calls import no_fault_of_the_server
from tests.conformance.server import Server, serving
from tests.support.redis_server import RedisServer

SIGNAL_MODES = ["postgres", "redis"]


def signal_environment(mode: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """What makes a server use these signals, whatever the environment of the tests says. A mode other than Postgres is
    the name of its server, which the session's fixture `<mode>_url` has started."""
    silent = {"REDIS_URL": "", "REDIS_URI": ""}
    return silent if mode == "postgres" else silent | {f"{mode.upper()}_URL": request.getfixturevalue(f"{mode}_url")}


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture(scope="session", params=SIGNAL_MODES)
def signals(request: pytest.FixtureRequest) -> dict[str, str]:
    return signal_environment(request.param, request)


@pytest.fixture(scope="session")
def server(server_url: str, signals: dict[str, str]) -> Iterator[Server]:
    with serving("conformance_project", server_url, signals) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    hooks = {"response": [no_fault_of_the_server]}
    async with httpx.AsyncClient(base_url=server.url, timeout=60, event_hooks=hooks) as client:
        yield client


@pytest.fixture(scope="session")
def hooked_server(server_url: str, signals: dict[str, str]) -> Iterator[Server]:
    """A server that may call this machine, where the checks receive webhooks."""
    with serving("conformance_project", server_url, {**signals, "WEBHOOK_ALLOW_PRIVATE": "true"}) as server:
        yield server


@pytest.fixture
async def hooked(hooked_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    hooks = {"response": [no_fault_of_the_server]}
    async with httpx.AsyncClient(base_url=hooked_server.url, timeout=60, event_hooks=hooks) as client:
        yield client


@pytest.fixture
async def thread_id(client: httpx.AsyncClient) -> AsyncIterator[str]:
    """A fresh thread. It is deleted afterwards, and whatever still runs in it ends."""
    identity: str = (await client.post("/threads", json={})).json()["thread_id"]
    yield identity
    await client.delete(f"/threads/{identity}")
