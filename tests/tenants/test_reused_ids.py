"""Clients choose the ids of threads and assistants, so the id of one that was deleted can be given to one of another
caller. Nothing that is left of the first is the second's, and the other way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import httpx
import orjson
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from holdfast.resources.run_configs import config_of
from holdfast.streams.envelopes import CHANNELS
from tests.support.live_worker import running_worker
from tests.support.waiting import until
from tests.tenants.conftest import House
from tests.tenants.estate import DELIVERY, LATER, SERVERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_SECONDS = 30.0


@dataclass
class Pair:
    """Two callers of one server."""

    house: House
    acme: httpx.AsyncClient
    zeta: httpx.AsyncClient


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(SERVERS))
async def pair(server_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with SERVERS[request.param](server_url) as (house, acme, zeta):
        yield Pair(house, acme, zeta)


async def ok(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    answer = await client.request(method, path, json=body)
    assert answer.status_code < 300, f"{path}: {answer.text}"
    return answer.json() if answer.content else None


@pytest.mark.parametrize("delete_threads", [False, True])
async def test_deleting_an_assistant_leaves_what_others_did_with_its_id(pair: Pair, delete_threads: bool) -> None:
    assistant = str(uuid4())
    await ok(pair.acme, "POST", "/assistants", {"assistant_id": assistant, "graph_id": "echo"})
    run = await ok(
        pair.acme, "POST", f"/threads/{uuid4()}/runs", {**LATER, "assistant_id": assistant, "if_not_exists": "create"}
    )
    # To delete it by a request would cancel the run, which is the owner's.
    await pair.house.query("DELETE FROM assistant WHERE assistant_id = %s RETURNING 1", assistant)
    await ok(pair.zeta, "POST", "/assistants", {"assistant_id": assistant, "graph_id": "echo"})
    own = await ok(
        pair.zeta, "POST", f"/threads/{uuid4()}/runs", {**LATER, "assistant_id": assistant, "if_not_exists": "create"}
    )
    await ok(pair.zeta, "DELETE", f"/assistants/{assistant}?delete_threads={str(delete_threads).lower()}")
    kept = await ok(pair.acme, "GET", f"/threads/{run['thread_id']}/runs/{run['run_id']}")
    assert kept["status"] == "pending"
    gone = await pair.zeta.get(f"/threads/{own['thread_id']}/runs/{own['run_id']}")
    assert gone.status_code == 404 if delete_threads else gone.json()["status"] == "interrupted"


async def test_delivery_is_not_shown_to_the_next_owner_of_its_threads_id(pair: Pair) -> None:
    thread = str(uuid4())
    await ok(pair.acme, "POST", "/threads", {"thread_id": thread})
    run = await ok(pair.acme, "POST", f"/threads/{thread}/runs", LATER)
    [delivery] = await pair.house.query(DELIVERY, "acme", run["run_id"])
    assert run["run_id"] in str(await ok(pair.acme, "GET", "/webhooks/deliveries"))
    await ok(pair.acme, "DELETE", f"/threads/{thread}")
    await ok(pair.zeta, "POST", "/threads", {"thread_id": thread})
    assert await ok(pair.zeta, "GET", f"/webhooks/deliveries?run_id={run['run_id']}") == []
    again = await pair.zeta.post(f"/webhooks/deliveries/{delivery['delivery_id']}/redeliver")
    assert again.status_code == 404


async def test_open_streams_do_not_show_the_next_thread_with_the_same_id(pair: Pair) -> None:
    """Each has read to the end of an empty log. They end, and none of them has shown the run of another caller."""
    thread = str(uuid4())
    await ok(pair.zeta, "POST", "/threads", {"thread_id": thread})
    subscription = {"channels": sorted(CHANNELS)}
    url = f"{pair.house.url.replace('http', 'ws', 1)}/threads/{thread}/stream/events"
    headers = {name: pair.zeta.headers[name] for name in ("x-api-key", "authorization") if name in pair.zeta.headers}
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(pair.zeta.stream(method, f"/threads/{thread}/{path}", json=body))
            for method, path, body in (
                ("POST", "stream/events", subscription),
                ("GET", "stream?stream_mode=run_modes,state_update", None),
            )
        ]
        socket = await stack.enter_async_context(connect(url, additional_headers=headers))
        command = {"id": 1, "method": "subscription.subscribe", "params": subscription}
        await socket.send(orjson.dumps(command).decode())
        assert b'"success"' in str(await socket.recv()).encode()
        await ok(pair.zeta, "DELETE", f"/threads/{thread}")
        await ok(pair.acme, "POST", "/threads", {"thread_id": thread})
        async with running_worker(pair.house.settings, pair.house.catalog):
            secret = {"assistant_id": "echo", "input": {"value": "acme's secret"}}
            assert "acme's secret" in str(await ok(pair.acme, "POST", f"/threads/{thread}/runs/wait", secret))
        seen = b""
        async with asyncio.timeout(PATIENCE_SECONDS):
            for stream in streams:
                with suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    async for chunk in stream.aiter_raw():
                        seen += chunk
            with suppress(ConnectionClosed):
                while True:
                    seen += str(await socket.recv()).encode()
        assert b"acme's secret" not in seen
        assert socket.close_code == 4404


DELETE_UNNOTICED = [
    f"DELETE FROM {table} WHERE thread_id::text = %s RETURNING 1" for table in ("run", "event", "checkpoints", "thread")
]


@pytest.mark.parametrize("noticed", [True, False])
async def test_thread_does_not_show_events_of_the_earlier_thread_with_its_id(pair: Pair, noticed: bool) -> None:
    """The process still keeps them, because the earlier owner watches. Not noticed: the deletion sends no hint."""
    thread = str(uuid4())
    await ok(pair.acme, "POST", "/threads", {"thread_id": thread})
    events = (f"/threads/{thread}/stream/events", {"channels": sorted(CHANNELS)})
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_worker(pair.house.settings, pair.house.catalog))
        watching = await stack.enter_async_context(pair.acme.stream("POST", events[0], json=events[1]))
        secret = {"assistant_id": "echo", "input": {"value": "acme's secret"}}
        for _ in range(3):
            await ok(pair.acme, "POST", f"/threads/{thread}/runs/wait", secret)
        shown = b""
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for chunk in watching.aiter_raw():
                shown += chunk
                if shown.count(b'"completed"') >= 3:
                    break
        assert b"acme's secret" in shown
        if noticed:
            await ok(pair.acme, "DELETE", f"/threads/{thread}")
        else:
            for statement in DELETE_UNNOTICED:
                await pair.house.query(statement, thread)
        await ok(pair.zeta, "POST", "/threads", {"thread_id": thread})
        seen = b""
        async with asyncio.timeout(PATIENCE_SECONDS):
            begun = asyncio.Event()

            async def run() -> None:
                await begun.wait()
                own = {"assistant_id": "echo", "input": {"value": "zeta's own"}}
                assert "zeta's own" in str(await ok(pair.zeta, "POST", f"/threads/{thread}/runs/wait", own))

            running = asyncio.create_task(run())
            while b"zeta's own" not in seen:
                # One that is broken off goes on when the client comes back.
                with suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    async with pair.zeta.stream("POST", events[0], json=events[1]) as stream:
                        async for chunk in stream.aiter_raw():
                            begun.set()
                            seen += chunk
                            assert b"acme's secret" not in seen
                            if b"zeta's own" in seen:
                                break
            await running
        # The numbers begin anew, and a run is streamed from its first event on.
        again = {"assistant_id": "echo", "input": {"value": "zeta's second"}}
        streamed = await pair.zeta.post(f"/threads/{thread}/runs/stream", json=again)
        assert streamed.text.count("zeta's second") >= 1


@pytest.mark.parametrize("pair", ["keys"], indirect=True)
async def test_thread_is_not_read_with_the_config_of_the_next_assistant_with_the_same_id(pair: Pair) -> None:
    assistant, config = str(uuid4()), {"configurable": {"secret": "acme's"}}
    await ok(pair.zeta, "POST", "/assistants", {"assistant_id": assistant, "graph_id": "echo"})
    body = {**LATER, "assistant_id": assistant, "if_not_exists": "create"}
    run = await ok(pair.zeta, "POST", f"/threads/{uuid4()}/runs", body)
    await ok(pair.zeta, "DELETE", f"/assistants/{assistant}")
    created = {"assistant_id": assistant, "graph_id": "echo", "config": config}
    await ok(pair.acme, "POST", "/assistants", created)
    own = await ok(pair.acme, "POST", f"/threads/{uuid4()}/runs", body)
    async with pair.house.database.connection() as connection:
        found = [await config_of(connection, UUID(one["thread_id"]), assistant, {}) for one in (run, own)]
    assert found == [{"configurable": {}}, config]


# What a delete and a create with the same id leave of a row, done under its lock.
GIVEN_AWAY = {
    "thread": """UPDATE thread SET tenant_id = 'acme', metadata = '{"graph_id": "echo", "owner": "acme"}'
                 WHERE thread_id = %s""",
    "assistant": """UPDATE assistant SET tenant_id = 'acme', metadata = '{"owner": "acme"}', created_at = now()
                    WHERE assistant_id = %s""",
}
WAITING = """
SELECT 1 FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()
"""
CHANGES = {
    "thread": ("PATCH", "/threads/{id}", {"metadata": {"intruder": True}}),
    "state": ("POST", "/threads/{id}/state", {"values": {"value": "intruder"}, "as_node": "say"}),
    "metadata of the state": ("PATCH", "/threads/{id}/state", {"metadata": {"intruder": True}}),
    "history": ("POST", "/threads/prune", {"thread_ids": ["{id}"], "strategy": "keep_latest"}),
    "runs": ("POST", "/threads/{id}/runs", LATER),
    "thread as a whole": ("DELETE", "/threads/{id}", None),
    "assistant": ("PATCH", "/assistants/{id}", {"metadata": {"intruder": True}}),
    "version of the assistant": ("POST", "/assistants/{id}/latest", {"version": 1}),
    "assistant as a whole": ("DELETE", "/assistants/{id}", None),
}


@pytest.mark.parametrize("change", list(CHANGES))
async def test_change_that_waits_does_not_reach_the_next_owner_of_the_id(pair: Pair, change: str) -> None:
    """The caller is let in, and the row becomes another caller's while the change waits for its lock."""
    method, path, body = orjson.loads(orjson.dumps(CHANGES[change]).replace(b"{id}", (name := str(uuid4())).encode()))
    if "assistant" in change:
        table = "assistant"
        await ok(pair.zeta, "POST", "/assistants", {"assistant_id": name, "graph_id": "echo"})
    else:
        table = "thread"
        steps = [{"updates": [{"values": {"value": value}, "as_node": "say"}]} for value in ("one", "two")]
        about = {"thread_id": name, "metadata": {"graph_id": "echo"}, "supersteps": steps}
        await ok(pair.zeta, "POST", "/threads", about)
    async with pair.house.database.transaction() as connection:
        await connection.execute(f"SELECT 1 FROM {table} WHERE {table}_id = %s FOR UPDATE".encode(), (name,))
        waiting = asyncio.create_task(pair.zeta.request(method, path, json=body))

        async def waits() -> bool:
            return bool(await pair.house.query(WAITING))

        await until(waits, "the change waits for the row")
        await connection.execute(GIVEN_AWAY[table].encode(), (name,))
    answer = await waiting
    assert (answer.status_code == 404) or (answer.json() == {"pruned_count": 0}), answer.text
    seen = await ok(pair.acme, "GET", f"/{table}s/{name}")
    assert "intruder" not in str(seen)
    if table == "thread":
        history = await ok(pair.acme, "GET", f"/threads/{name}/history?limit=10")
        assert [state["values"] for state in history] == [{"value": "two"}, {"value": "one"}]
        assert "intruder" not in str(history)
