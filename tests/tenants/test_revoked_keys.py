"""A key that stops working ends what was opened with it: streams, requests that wait, WebSockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import load_settings
from tests.support.intruder import PROJECT, operations
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.waiting import until
from tests.tenants.conftest import House, open_house
from tests.tenants.test_keys import becomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_SECONDS = 30.0
LATER = {"assistant_id": "echo", "after_seconds": 3600}
CHANNELS = {"channels": ["values"]}

# Every operation whose answer lasts, with a body for it.
LASTING: dict[tuple[str, str], Any] = {
    ("POST", "/runs/stream"): LATER,
    ("POST", "/runs/wait"): LATER,
    ("POST", "/threads/{thread_id}/runs/stream"): LATER,
    ("POST", "/threads/{thread_id}/runs/wait"): LATER,
    ("GET", "/threads/{thread_id}/runs/{run_id}/stream"): None,
    ("GET", "/threads/{thread_id}/runs/{run_id}/join"): None,
    ("GET", "/runs/{run_id}/stream"): None,
    ("GET", "/threads/{thread_id}/stream"): None,
    ("POST", "/threads/{thread_id}/stream/events"): CHANNELS,
}


class Watcher:
    """A caller with a thread, a queued run, and one of each lasting answer open."""

    def __init__(self, client: httpx.AsyncClient, ids: dict[str, str], stack: AsyncExitStack) -> None:
        self.client = client
        self.ids = ids
        self._stack = stack
        self.open: dict[str, httpx.Response] = {}

    async def watch(self, *wanted: tuple[str, str], query: str = "") -> None:
        for method, template in wanted or LASTING:
            path = template.format_map(self.ids) + query
            answer = await self._stack.enter_async_context(
                self.client.stream(method, path, json=LASTING[method, template])
            )
            assert answer.status_code == 200, (path, await answer.aread())
            self.open[f"{method} {template}"] = answer

    async def ended(self) -> dict[str, bool]:
        """Which of them are broken off, once all that will be are."""

        async def broken(answer: httpx.Response) -> bool:
            try:
                async for _ in answer.aiter_raw():
                    pass
            except (httpx.RemoteProtocolError, httpx.ReadError):
                return True
            return False  # It looks complete, so the client would take it for the result.

        async with asyncio.timeout(PATIENCE_SECONDS):
            found = await asyncio.gather(*map(broken, self.open.values()))
        return dict(zip(self.open, found, strict=True))

    async def beats(self) -> None:
        """All of them are alive: each sends something more."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            for answer in self.open.values():
                await anext(aiter(answer.aiter_raw(1)))


@pytest_asyncio.fixture(loop_scope="module")
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def watcher(client: httpx.AsyncClient, stack: AsyncExitStack) -> Watcher:
    thread = (await client.post("/threads", json={})).json()["thread_id"]
    run = (await client.post(f"/threads/{thread}/runs", json=LATER)).json()["run_id"]
    return Watcher(client, {"thread_id": thread, "run_id": run}, stack)


async def holder(house: House, key: str, stack: AsyncExitStack) -> Watcher:
    client = await house.client(**{"x-api-key": key})
    await becomes(client, 200)
    return await watcher(client, stack)


async def test_every_lasting_answer_is_listed(house: House) -> None:
    document = (await (await house.client()).get("/openapi.json")).json()
    found = {
        (method, path)
        for method, path, declared in operations(document)
        if path.endswith(("/wait", "/join"))
        or any("text/event-stream" in one.get("content", {}) for one in declared["responses"].values())
    }
    assert found == set(LASTING)


async def revoke(house: House, key: str) -> None:
    await house.revoke(key)


async def forget(house: House, key: str) -> None:
    await house.revoke(key, forget=True)


async def expire(house: House, key: str) -> None:
    await house.query("UPDATE api_key SET expires_at = now() WHERE prefix = %s RETURNING 1", key[:9])


async def lose_a_scope(house: House, key: str) -> None:
    await house.query("UPDATE api_key SET scopes = '{write}' WHERE prefix = %s RETURNING 1", key[:9])


@pytest.mark.parametrize("stop", [revoke, forget, expire, lose_a_scope])
async def test_key_that_stops_working_ends_its_streams(
    house: House, stack: AsyncExitStack, stop: Callable[[House, str], Awaitable[None]]
) -> None:
    stopped, kept = await house.key("acme"), await house.key("acme")
    watching, other = await holder(house, stopped, stack), await holder(house, kept, stack)
    await watching.watch()
    await other.watch()
    await stop(house, stopped)
    assert await watching.ended() == {f"{method} {path}": True for method, path in LASTING}
    await other.beats()


async def test_revoked_key_ends_streams_behind_the_layers_of_a_custom_app(
    server_url: str, stack: AsyncExitStack
) -> None:
    """Where the server has no way past them to the connection."""
    project = load_config(PROJECT)
    project = replace(project, raw={**project.raw, "http": {"app": "./layers.py:app"}})
    async with open_house(server_url, project=project) as house:
        key = await house.key("acme")
        watching = await holder(house, key, stack)
        assert (await watching.client.get("/layered")).text == "yes"
        await watching.watch()
        await house.revoke(key)
        assert all((await watching.ended()).values())


async def test_first_key_ends_streams_that_were_opened_without_one(server_url: str, stack: AsyncExitStack) -> None:
    async with open_house(server_url) as house:
        anonymous = await watcher(await house.client(), stack)
        await anonymous.watch()
        await house.key("acme")
        assert all((await anonymous.ended()).values())


@pytest.mark.expects_errors("uvicorn.error")
async def test_revoked_key_does_not_cancel_what_it_watched(house: House, stack: AsyncExitStack) -> None:
    """The server ends its streams, not the client. A client that does leave still cancels."""
    stream = ("GET", "/threads/{thread_id}/runs/{run_id}/stream")
    revoked, kept = await house.key("acme"), await house.key("acme")
    watching, other = await holder(house, revoked, stack), await holder(house, kept, stack)
    await watching.watch(stream, query="?cancel_on_disconnect=true")
    await house.revoke(revoked)
    assert all((await watching.ended()).values())
    await other.watch(stream, query="?cancel_on_disconnect=true")
    for answer in other.open.values():
        await answer.aclose()

    async def status(run_id: str) -> str:
        return str((await house.query("SELECT status FROM run WHERE run_id = %s", run_id))[0]["status"])

    async def cancelled() -> bool:
        return await status(other.ids["run_id"]) == "interrupted"

    await until(cancelled, "the run of the client that left is cancelled")
    assert await status(watching.ids["run_id"]) == "pending"


async def subscribe(socket: ClientConnection, number: int = 1) -> dict[str, Any]:
    await socket.send(orjson.dumps({"id": number, "method": "subscription.subscribe", "params": CHANNELS}).decode())
    answer: dict[str, Any] = orjson.loads(await asyncio.wait_for(socket.recv(), PATIENCE_SECONDS))
    return answer


def address(url: str, thread_id: str) -> str:
    return f"{url.replace('http', 'ws', 1)}/threads/{thread_id}/stream/events"


async def closed(socket: ClientConnection) -> int | None:
    """The code that a socket is closed with."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        with suppress(ConnectionClosed):
            while True:
                await socket.recv()
    return socket.close_code


async def test_revoked_key_closes_open_sockets(house: House, stack: AsyncExitStack) -> None:
    revoked, kept = await house.key("acme"), await house.key("acme")
    watching, other = await holder(house, revoked, stack), await holder(house, kept, stack)
    sockets = [
        await stack.enter_async_context(
            connect(address(house.url, one.ids["thread_id"]), additional_headers={"x-api-key": key})
        )
        for one, key in ((watching, revoked), (watching, revoked), (other, kept))
    ]
    silent, subscribed, kept_open = sockets
    assert (await subscribe(subscribed))["type"] == "success"
    await house.revoke(revoked)
    assert [await closed(silent), await closed(subscribed)] == [4401, 4401]
    assert (await subscribe(kept_open))["type"] == "success"


async def test_socket_command_of_expired_key_is_refused_before_the_keys_are_read_again(
    server_url: str, stack: AsyncExitStack
) -> None:
    async with open_house(server_url, KEY_REFRESH_SECONDS="60") as house:
        key = await house.key("acme", expires_in=8.0)
        watching = await holder(house, key, stack)
        url = address(house.url, watching.ids["thread_id"])
        socket = await stack.enter_async_context(connect(url, additional_headers={"x-api-key": key}))
        assert (await subscribe(socket))["type"] == "success"
        await becomes(watching.client, 401)
        refused = await subscribe(socket, 2)
        assert (refused["type"], refused["message"][:3]) == ("error", "401")
        assert await closed(socket) == 4401


async def test_socket_command_is_authenticated_by_the_project_each_time(
    database_url: str, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = load_config(PROJECT)
    project = replace(project, raw={**project.raw, "auth": {"path": "./owners.py:auth"}})
    settings = load_settings({}, database_url=database_url, port=free_port())
    server = await stack.enter_async_context(answering(settings, GraphCatalog.load(project)))
    server.headers["authorization"] = "Bearer ann"
    thread = (await server.post("/threads", json={})).json()["thread_id"]
    url = address(f"http://127.0.0.1:{settings.port}", thread)
    socket = await stack.enter_async_context(connect(url, additional_headers={"authorization": "Bearer ann"}))
    assert (await subscribe(socket))["type"] == "success"
    monkeypatch.setenv("REVOKED_TOKENS", "ann")
    await socket.send(orjson.dumps({"id": 2, "method": "run.start", "params": {"assistant_id": "echo"}}).decode())
    refused = orjson.loads(await asyncio.wait_for(socket.recv(), PATIENCE_SECONDS))
    assert (refused["type"], refused["message"]) == ("error", "401: Log in first.")
    assert await closed(socket) == 4401
    monkeypatch.delenv("REVOKED_TOKENS")
    assert (await server.get(f"/threads/{thread}/runs")).json() == []
