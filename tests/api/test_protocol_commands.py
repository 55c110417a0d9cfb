"""Commands of the thread-centric protocol that ask rather than start: the tree of a run, and subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import orjson
import psycopg
from websockets.asyncio.client import ClientConnection, connect

from holdfast.settings import Settings
from tests.support.threads import made, ran
from tests.support.waiting import until

ALL = ["values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"]


async def command(client: httpx.AsyncClient, thread_id: str, method: str, **params: Any) -> dict[str, Any]:
    response = await client.post(f"/threads/{thread_id}/commands", json={"id": 7, "method": method, "params": params})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def started(client: httpx.AsyncClient, thread_id: str, graph: str, **input: Any) -> str:
    """A run of the protocol, once it has ended."""
    answer = await command(client, thread_id, "run.start", assistant_id=graph, input=input)
    run_id: str = answer["result"]["run_id"]
    await client.get(f"/threads/{thread_id}/runs/{run_id}/join")
    return run_id


class Wire:
    """A WebSocket, with answers and events told apart."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._next = 1
        self.events: list[dict[str, Any]] = []

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        identity, self._next = self._next, self._next + 1
        await self._socket.send(orjson.dumps({"id": identity, "method": method, "params": params}).decode())
        while True:
            message = await self._message()
            if message["type"] == "event":
                self.events.append(message)
            else:
                assert message["id"] == identity
                return message

    async def until_event(self, seq: int) -> None:
        while not self.events or self.events[-1]["seq"] < seq:
            self.events.append(await self._message())

    async def _message(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            message: dict[str, Any] = orjson.loads(await self._socket.recv())
        return message


@asynccontextmanager
async def wired(settings: Settings, thread_id: str) -> AsyncIterator[Wire]:
    async with connect(f"ws://127.0.0.1:{settings.port}/threads/{thread_id}/stream/events") as socket:
        yield Wire(socket)


async def test_the_tree_of_a_run_has_its_subgraphs(client: httpx.AsyncClient, settings: Settings) -> None:
    thread_id = str(uuid4())
    await started(client, thread_id, "parent", topic="tides")
    answer = await command(client, thread_id, "agent.getTree")
    tree = answer["result"]["tree"]
    [child] = tree.pop("children")
    assert tree == {"namespace": [], "status": "completed", "graph_name": "parent"}
    [segment] = child["namespace"]
    assert segment.startswith("research:")
    assert child == {"namespace": [segment], "status": "completed", "graph_name": "research"}
    async with wired(settings, thread_id) as wire:
        assert (await wire.ask("agent.getTree"))["result"] == answer["result"] | {"tree": tree | {"children": [child]}}


async def test_the_tree_is_that_of_the_last_run_that_has_begun(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    first = await started(client, thread_id, "parent", topic="tides")
    running = await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 3600})
    await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 0})

    async def tree(**params: Any) -> Any:
        return (await command(client, thread_id, "agent.getTree", **params))["result"]["tree"]

    async def is_running() -> bool:
        return bool((await tree())["status"] == "running")

    await until(is_running, "the second run")
    assert (await tree())["graph_name"] == "steps"
    assert (await tree(run_id=first))["graph_name"] == "parent"
    await client.post(f"/threads/{thread_id}/runs/{running['result']['run_id']}/cancel?wait=1")
    assert (await tree(run_id=running["result"]["run_id"]))["status"] == "interrupted"
    for bad, code in ((str(uuid4()), "no_such_run"), ("soon", "invalid_argument")):
        assert (await command(client, thread_id, "agent.getTree", run_id=bad))["error"] == code


async def test_no_run_no_tree(web: httpx.AsyncClient) -> None:
    for thread_id in (str(uuid4()), await made(web), await made(web, metadata={"graph_id": "steps"})):
        assert (await command(web, thread_id, "agent.getTree"))["error"] == "no_such_run"
    # One that waits for its turn is a run, though it has not said anything yet.
    thread_id = await made(web)
    await command(web, thread_id, "run.start", assistant_id="steps", input={})
    tree = (await command(web, thread_id, "agent.getTree"))["result"]["tree"]
    assert tree == {"namespace": [], "status": "running", "graph_name": "steps"}


async def test_how_a_run_ended_is_how_its_tree_is(client: httpx.AsyncClient) -> None:
    for graph, input, status in (("steps", {"seconds": "soon"}, "failed"), ("ask", {}, "interrupted")):
        thread_id = str(uuid4())
        await started(client, thread_id, graph, **input)
        assert (await command(client, thread_id, "agent.getTree"))["result"]["tree"]["status"] == status


async def test_a_subscription_is_told_how_much_it_is_sent(client: httpx.AsyncClient, settings: Settings) -> None:
    thread_id = str(uuid4())
    await started(client, thread_id, "parent", topic="tides")
    async with wired(settings, thread_id) as wire:
        whole = await wire.ask("subscription.subscribe", channels=ALL)
        assert whole["result"]["replayed_events"] == len(wire.events) > 10
        events = list(wire.events)
    async with wired(settings, thread_id) as wire:
        some = await wire.ask("subscription.subscribe", channels=["lifecycle"], namespaces=[[]], depth=0)
        assert some["result"]["replayed_events"] == len(wire.events) == 2
    async with wired(settings, thread_id) as wire:
        since = events[4]["seq"]
        rest = await wire.ask("subscription.reconnect", channels=ALL, since=since)
        assert rest["result"]["replayed_events"] == len(wire.events)
        assert wire.events == events[5:]
        none = await wire.ask("subscription.subscribe", channels=ALL, since=events[-1]["seq"])
        assert none["result"]["replayed_events"] == 0


async def test_going_on_from_what_has_expired(client: httpx.AsyncClient, settings: Settings, database_url: str) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    await ran(client, thread_id)
    with psycopg.connect(database_url, autocommit=True) as connection:
        query = f"SET search_path TO {settings.db_schema}"
        connection.execute(query.encode())
        [last] = connection.execute("SELECT max(seq) FROM event WHERE thread_id = %s", (thread_id,)).fetchone() or [0]
        connection.execute("DELETE FROM event WHERE thread_id = %s AND seq <= 5", (thread_id,))

        async def reconnect(wire: Wire, since: int) -> dict[str, Any]:
            return await wire.ask("subscription.reconnect", channels=ALL, since=since)

        async with wired(settings, thread_id) as wire:
            gap = await reconnect(wire, 2)
            assert (gap["type"], gap["error"]) == ("error", "resume_gap")
            assert (gap["since"], gap["min_available_seq"]) == (2, 6)
            assert not wire.events
            assert (await reconnect(wire, 5))["type"] == "success"
        connection.execute("DELETE FROM event WHERE thread_id = %s", (thread_id,))
        async with wired(settings, thread_id) as wire:
            gap = await reconnect(wire, last - 1)
            assert (gap["error"], gap["min_available_seq"]) == ("resume_gap", last + 1)
            assert (await reconnect(wire, last))["type"] == "success"
            assert (await wire.ask("subscription.reconnect", channels=ALL))["error"] == "invalid_argument"
            assert (await wire.ask("subscription.subscribe", channels=ALL, since=2))["error"] == "resume_gap"
        # From the beginning there is what is left. The server may still keep the deleted events for another socket,
        # and closes one that it would have to send them to: so each of these is the only question of its socket.
        for since in ({}, {"since": 0}):
            async with wired(settings, thread_id) as wire:
                assert (await wire.ask("subscription.subscribe", channels=ALL, **since))["type"] == "success"


async def test_what_the_reference_does_not_know_either(web: httpx.AsyncClient) -> None:
    thread_id = await made(web)
    for method in ("state.get", "state.listCheckpoints", "state.fork", "input.inject"):
        assert (await command(web, thread_id, method))["error"] == "unknown_command"
