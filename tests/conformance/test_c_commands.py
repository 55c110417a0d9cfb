"""C27, C57: the thread-centric protocol over a WebSocket, and commands that cannot be carried out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
from websockets.asyncio.client import ClientConnection, connect

from tests.conformance.calls import (
    CHANNELS,
    PATIENCE,
    Event,
    command,
    is_terminal,
    lifecycle,
    of,
    ok,
    refused,
    replay,
    succeed,
    watching,
)
from tests.conformance.server import Server
from tests.support.json_body import JSON


class Conversation:
    """What was said over one socket: the answers by the id of their command, and the events in between."""

    def __init__(self, socket: ClientConnection) -> None:
        self.answers: dict[int, dict[str, Any]] = {}
        self.events: list[Event] = []
        self._socket = socket

    async def say(self, identity: int, method: str, **params: Any) -> None:
        await self._socket.send(json.dumps({"id": identity, "method": method, "params": params}))

    async def listen(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not enough():
                message = json.loads(await self._socket.recv())
                if message["type"] == "event":
                    self.events.append(message)
                else:
                    assert message["id"] not in self.answers
                    self.answers[message["id"]] = message

    async def ask(self, identity: int, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command, whatever else is said before it comes."""
        await self.say(identity, method, **params)
        await self.listen(lambda: identity in self.answers)
        return self.answers[identity]

    async def until_terminal(self, number: int) -> None:
        """Until so many runs have ended."""
        await self.listen(lambda: sum(map(is_terminal, self.events)) >= number)


@asynccontextmanager
async def conversation(server: Server, thread_id: str) -> AsyncIterator[Conversation]:
    async with connect(f"{server.socket_url}/threads/{thread_id}/stream/events") as socket:
        yield Conversation(socket)


async def test_c27_everything_over_a_socket(client: httpx.AsyncClient, server: Server) -> None:
    thread_id = str(uuid4())
    async with conversation(server, thread_id) as talk:
        # Both at once: answers are told apart by their ids, and come while events do.
        await talk.say(11, "subscription.subscribe", channels=CHANNELS)
        await talk.say(12, "run.start", assistant_id="ask", input={"question": "Deploy?"})
        await talk.listen(lambda: {11, 12} <= set(talk.answers))
        await talk.until_terminal(1)
        assert talk.answers[11]["type"] == talk.answers[12]["type"] == "success"
        subscription_id = talk.answers[11]["result"]["subscription_id"]
        assert isinstance(subscription_id, str)
        assert "replayed_events" in talk.answers[11]["result"]
        run = await ok(client.get(f"/threads/{thread_id}/runs/{talk.answers[12]['result']['run_id']}"))
        assert run["status"] == "success"
        assert (lifecycle(talk.events[0]), lifecycle(talk.events[-1])) == ("running", "interrupted")
        [question] = of(talk.events, "input.requested")
        assert question["payload"] == {"question": "Deploy?"}

        respond = {"interrupt_id": question["interrupt_id"], "namespace": [], "response": "red"}
        assert (await talk.ask(13, "input.respond", **respond))["result"] == {}
        await talk.until_terminal(2)
        assert lifecycle(talk.events[-1]) == "completed"
        assert (await ok(client.get(f"/threads/{thread_id}/state")))["values"]["answer"] == "red"

        assert (await talk.ask(14, "agent.getTree"))["result"]["tree"]["status"] == "completed"
        assert (await talk.ask(15, "subscription.unsubscribe", subscription_id=subscription_id))["type"] == "success"
        assert (await talk.ask(16, "subscription.unsubscribe", subscription_id="none"))["error"] == (
            "no_such_subscription"
        )
        assert (await talk.ask(17, "no.such.command"))["error"] == "unknown_command"
        assert (await talk.ask(18, "input.respond", **respond))["error"] == "no_such_interrupt"
    # As over HTTP, to the letter.
    async with watching(client, thread_id) as stream:
        async with asyncio.timeout(PATIENCE):
            assert [await anext(stream) for _ in talk.events] == talk.events


async def test_c27_a_socket_catches_up_from_where_it_was(client: httpx.AsyncClient, server: Server) -> None:
    thread_id = str(uuid4())
    await succeed(client, thread_id, "run.start", assistant_id="slow", input={"seconds": 0})
    whole = await replay(client, thread_id)
    async with conversation(server, thread_id) as talk:
        await talk.ask(1, "subscription.subscribe", channels=CHANNELS, since=whole[3]["seq"])
        await talk.until_terminal(1)
        assert talk.events == whole[4:]
        # A later subscription gets the past that it asks for, though some of it has been on this socket before: clients
        # tell events apart by their ids, for each subscription by itself.
        wanted = [event for event in whole if event["method"] in ("values", "lifecycle")]
        await talk.ask(2, "subscription.subscribe", channels=["values", "lifecycle"])
        await talk.listen(lambda: len(talk.events) >= len(whole[4:]) + len(wanted))
        assert talk.events[len(whole[4:]) :] == wanted


async def test_c57_what_is_no_command(client: httpx.AsyncClient) -> None:
    path = f"/threads/{uuid4()}/commands"
    bodies: list[Any] = [{"method": "run.start"}, {"id": "1", "method": "run.start"}, {"id": 1}, [], "run.start"]
    for body in bodies:
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["type"]) == (400, "error"), body
    assert (await client.post(path, content="{", headers=JSON)).status_code == 400


async def test_c57_what_cannot_be_done(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())

    async def failed(method: str, **params: Any) -> str:
        answer = await command(client, thread_id, method, **params)
        assert answer["type"] == "error"
        assert isinstance(answer["message"], str)
        code: str = answer["error"]
        return code

    assert await failed("bogus") == "unknown_command"
    for assistant in ("no such graph", str(uuid4()), None, 7):
        await failed("run.start", assistant_id=assistant, input={})
    assert await failed("run.start", input={}) == "invalid_argument"
    # Nothing of this has made a thread.
    await refused(client.get(f"/threads/{thread_id}"), 404)
    await succeed(client, thread_id, "run.start", assistant_id="ask", input={})
    asked = await replay(client, thread_id)
    respond = {"interrupt_id": "0" * 32, "namespace": [], "response": "yes"}
    assert await failed("input.respond", **respond) == "no_such_interrupt"
    [question] = of(asked, "input.requested")
    known = {"interrupt_id": question["interrupt_id"], "namespace": [], "response": "yes"}
    assert await failed("input.respond", responses=[known, respond]) == "no_such_interrupt"
    assert len(await ok(client.get(f"/threads/{thread_id}/runs"))) == 1
