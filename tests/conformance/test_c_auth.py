"""C62: a server with custom auth, on which everybody sees their own and nobody deletes an assistant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.conformance.calls import (
    FOREVER,
    HELLO,
    PATIENCE,
    command,
    new_thread,
    no_fault_of_the_server,
    ok,
    refused,
    running,
    start_run,
    status_of,
    succeed,
    system_assistant,
    wait_run,
)
from tests.conformance.server import Server, serving


@pytest.fixture(scope="session")
def guarded(server_url: str, signals: dict[str, str]) -> Iterator[Server]:
    with serving("conformance_auth_project", server_url, signals) as server:
        yield server


@dataclass(frozen=True)
class People:
    nobody: httpx.AsyncClient
    alice: httpx.AsyncClient
    bob: httpx.AsyncClient


@pytest.fixture
async def people(guarded: Server) -> AsyncIterator[People]:
    hooks = {"response": [no_fault_of_the_server]}
    async with AsyncExitStack() as stack:
        clients = []
        for headers in ({}, {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}):
            client = httpx.AsyncClient(base_url=guarded.url, timeout=60, headers=headers, event_hooks=hooks)
            clients.append(await stack.enter_async_context(client))
        yield People(*clients)


async def test_c62_request_without_login_is_refused(people: People) -> None:
    thread_id = await new_thread(people.alice)
    body: dict[str, Any] = {"assistant_id": "echo", "input": HELLO}
    channels = {"channels": ["values"]}
    for method, path, given in (
        ("GET", f"/threads/{thread_id}", None),
        ("GET", f"/threads/{uuid4()}", None),
        ("GET", "/threads/no-uuid", None),
        ("GET", f"/threads/{thread_id}/state", None),
        ("GET", f"/assistants/{system_assistant('echo')}", None),
        ("POST", "/threads", {}),
        ("POST", "/threads/search", {}),
        ("POST", "/assistants/search", {}),
        ("POST", f"/threads/{thread_id}/runs", body),
        ("POST", f"/threads/{thread_id}/runs/stream", body),
        ("POST", "/runs/wait", body),
        ("POST", "/runs/batch", [body]),
        ("POST", "/runs/cancel", {"status": "all"}),
        ("POST", "/runs/crons/search", {}),
        ("POST", f"/threads/{thread_id}/commands", {"id": 1, "method": "run.start", "params": body}),
        ("POST", f"/threads/{thread_id}/stream/events", channels),
        ("POST", "/store/items/search", {}),
        ("DELETE", f"/threads/{thread_id}", None),
    ):
        for headers in ({}, {"Authorization": "Bearer mallory"}, {"x-api-key": "alice"}):
            answer = await people.nobody.request(method, path, json=given, headers=headers)
            assert answer.status_code == 401, (method, path, answer.text)
            assert answer.json() == {"detail": "Say who you are."}
    assert await ok(people.alice.get(f"/threads/{thread_id}/runs")) == []


async def test_c16_signs_that_a_guarded_server_is_there(people: People) -> None:
    for path in ("/ok", "/info"):
        for headers in ({}, {"Authorization": "Bearer mallory"}):
            assert (await people.nobody.get(path, headers=headers)).status_code == 200


async def test_c62_what_is_anothers_is_not_there(people: People) -> None:
    thread_id = await new_thread(people.alice)
    values = await wait_run(people.alice, thread_id, "echo", input=HELLO)
    assert values["messages"][-1]["content"] == "hello alice"
    [run] = await ok(people.alice.get(f"/threads/{thread_id}/runs"))
    body: dict[str, Any] = {"assistant_id": "echo", "input": HELLO}
    path = f"/threads/{thread_id}"
    for method, at, given in (
        ("GET", "", None),
        ("GET", "/state", None),
        ("POST", "/history", {"limit": 10}),
        ("POST", "/state", {"values": {"messages": []}}),
        ("PATCH", "", {"metadata": {"owner": "bob"}}),
        ("GET", "/runs", None),
        ("GET", f"/runs/{run['run_id']}", None),
        ("GET", f"/runs/{run['run_id']}/join", None),
        ("GET", f"/runs/{run['run_id']}/stream", None),
        ("POST", f"/runs/{run['run_id']}/cancel", None),
        ("DELETE", f"/runs/{run['run_id']}", None),
        ("POST", "/runs", body),
        ("POST", "/runs", {**body, "if_not_exists": "create"}),
        ("POST", "/runs/stream", body),
        ("POST", "/runs/wait", body),
        ("POST", "/runs/crons", {**body, "schedule": "0 9 29 2 *"}),
        ("POST", "/stream/events", {"channels": ["values"]}),
        ("DELETE", "", None),
    ):
        answer = await people.bob.request(method, f"{path}{at}", json=given)
        assert answer.status_code == 404, (method, at, answer.status_code, answer.text)
        assert isinstance(answer.json()["detail"], str)
    for by_id in (f"/runs/{run['run_id']}", f"/runs/{run['run_id']}/stream"):
        assert (await people.bob.get(by_id)).status_code == 404
    assert (await people.bob.post(f"{path}/copy")).status_code in (404, 409)
    start = {"assistant_id": "echo", "input": HELLO}
    assert (await command(people.bob, thread_id, "run.start", **start))["type"] == "error"
    # To Alice it looks as before.
    assert await ok(people.alice.get(f"{path}/runs")) == [run]
    assert (await ok(people.alice.get(path)))["metadata"]["owner"] == "alice"


async def test_c62_a_run_of_another_cannot_be_cancelled(people: People) -> None:
    thread_id = await new_thread(people.alice)
    path = await running(people.alice, thread_id)
    run_id = path.rsplit("/", 1)[1]
    await refused(people.bob.post("/runs/cancel", json={"thread_id": thread_id, "run_ids": [run_id]}), 404)
    await refused(people.bob.post("/runs/cancel", json={"status": "all"}), 404)
    assert await status_of(people.alice, path) == "running"
    own = await new_thread(people.bob)
    await start_run(people.bob, own, "slow", input=FOREVER)
    assert (await people.bob.post("/runs/cancel", json={"status": "all"})).status_code == 204
    assert await status_of(people.alice, path) == "running"
    assert (await people.alice.delete(f"/threads/{thread_id}")).status_code == 204


async def test_c62_a_search_finds_ones_own(people: People) -> None:
    mark = {"mark": str(uuid4())}
    # Whoever says that something is another's is not believed.
    hers = await new_thread(people.alice, metadata={**mark, "owner": "bob"})
    his = await new_thread(people.bob, metadata=mark)
    for client, expected in ((people.alice, hers), (people.bob, his)):
        found = await ok(client.post("/threads/search", json={"metadata": mark}))
        assert [thread["thread_id"] for thread in found] == [expected]
        assert await ok(client.post("/threads/count", json={"metadata": mark})) == 1
        assert await ok(client.post("/threads/search", json={"ids": [hers, his], "select": ["thread_id"]})) == [
            {"thread_id": expected}
        ]
    made = await ok(people.alice.post("/assistants", json={"graph_id": "echo", "metadata": mark}))
    assert len(await ok(people.alice.post("/assistants/search", json={"metadata": mark}))) == 1
    assert await ok(people.bob.post("/assistants/search", json={"metadata": mark})) == []
    await refused(people.bob.get(f"/assistants/{made['assistant_id']}"), 404)
    borrowed = {"assistant_id": made["assistant_id"], "input": HELLO}
    await refused(people.bob.post(f"/threads/{his}/runs/wait", json=borrowed), 404)
    cron = await ok(
        people.alice.post("/runs/crons", json={"assistant_id": "echo", "schedule": "0 9 29 2 *", "metadata": mark})
    )
    assert await ok(people.bob.post("/runs/crons/search", json={"metadata": mark})) == []
    await refused(people.bob.delete(f"/runs/crons/{cron['cron_id']}"), 404)
    assert len(await ok(people.alice.post("/runs/crons/search", json={"metadata": mark}))) == 1


async def test_c62_a_handler_says_no(people: People) -> None:
    made = await ok(people.alice.post("/assistants", json={"graph_id": "echo"}))
    path = f"/assistants/{made['assistant_id']}"
    for client in (people.alice, people.bob):
        await refused(client.delete(path), 403)
    assert (await ok(people.alice.get(path)))["assistant_id"] == made["assistant_id"]


async def test_c62_a_handler_moves_what_is_stored(people: People) -> None:
    put = {"namespace": ["notes"], "key": "one", "value": {"said": "mine"}}
    assert (await people.alice.put("/store/items", json=put)).status_code == 204
    query = {"namespace": "notes", "key": "one"}
    assert (await ok(people.alice.get("/store/items", params=query)))["value"] == {"said": "mine"}
    assert await ok(people.bob.get("/store/items", params=query)) is None
    assert (await ok(people.bob.post("/store/items/search", json={"namespace_prefix": ["notes"]})))["items"] == []


async def test_c62_a_socket_is_asked_as_well(people: People, guarded: Server) -> None:
    thread_id = await new_thread(people.alice)
    await succeed(people.alice, thread_id, "run.start", assistant_id="echo", input=HELLO)
    url = f"{guarded.socket_url}/threads/{thread_id}/stream/events"
    # What both clients take for a status, and do not try again.
    for headers, code in (({}, 4401), ({"Authorization": "Bearer bob"}, 4404)):
        async with connect(url, additional_headers=headers) as socket:
            with pytest.raises(ConnectionClosed) as refusal:
                await socket.recv()
        assert refusal.value.rcvd is not None
        assert refusal.value.rcvd.code == code
    async with connect(url, additional_headers={"Authorization": "Bearer alice"}) as socket:
        await socket.send('{"id": 1, "method": "subscription.subscribe", "params": {"channels": ["values"]}}')
        async with asyncio.timeout(PATIENCE):
            while (message := json.loads(await socket.recv()))["type"] == "event":
                pass
        assert (message["type"], message["id"]) == ("success", 1)
