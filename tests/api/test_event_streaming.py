"""The thread-centric protocol: commands, events over SSE and WebSocket. Named by the checks of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest
from websockets.asyncio.client import connect

from holdfast.settings import Settings
from tests.support.json_body import JSON
from tests.support.sse import Frame, frames

ALL = ["values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def command(client: httpx.AsyncClient, thread_id: str, method: str, **params: Any) -> dict[str, Any]:
    response = await client.post(f"/threads/{thread_id}/commands", json={"id": 7, "method": method, "params": params})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["id"] == 7
    return answer


@asynccontextmanager
async def watching(client: httpx.AsyncClient, thread_id: str, **body: Any) -> AsyncIterator[AsyncIterator[Frame]]:
    async with client.stream("POST", f"/threads/{thread_id}/stream/events", json={"channels": ALL, **body}) as response:
        assert response.status_code == 200, await response.aread()
        yield frames(response)


def is_terminal(event: dict[str, Any]) -> bool:
    return (
        event["method"] == "lifecycle"
        and not event["params"]["namespace"]
        and (event["params"]["data"]["event"] in ("completed", "failed", "interrupted"))
    )


async def until_terminal(stream: AsyncIterator[Frame]) -> list[dict[str, Any]]:
    events = []
    async with asyncio.timeout(60):
        async for frame in stream:
            assert frame.event == frame.data["method"]
            assert frame.id == frame.data["seq"]
            events.append(frame.data)
            if is_terminal(frame.data):
                break
    return events


async def replay(client: httpx.AsyncClient, thread_id: str, **body: Any) -> list[dict[str, Any]]:
    async with watching(client, thread_id, **body) as stream:
        return await until_terminal(stream)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [
        f"lifecycle {event['params']['data']['event']}" if event["method"] == "lifecycle" else event["method"]
        for event in events
    ]


async def test_C18_C19_C20_C21_C22_a_stream_opened_first_sees_run_after_run(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    async with watching(client, thread_id) as stream:
        answer = await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 0})
        assert answer["type"] == "success"
        assert (await client.get(f"/threads/{thread_id}/runs/{answer['result']['run_id']}")).status_code == 200
        first = await until_terminal(stream)
        assert kinds(first)[0] == "lifecycle running"
        assert kinds(first)[-1] == "lifecycle completed"
        assert [event["seq"] for event in first] == sorted({event["seq"] for event in first})
        await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 0})
        second = await until_terminal(stream)
        assert second[0]["seq"] > first[-1]["seq"]
        assert second[-1]["params"]["data"]["event"] == "completed"
    assert await replay(client, thread_id) == first
    cursor = first[3]["seq"]
    assert await replay(client, thread_id, since=cursor) == [event for event in first if event["seq"] > cursor]


async def test_C23_C24_an_interrupt_asks_and_is_answered(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await command(client, thread_id, "run.start", assistant_id="ask", input={})
    asked = await replay(client, thread_id)
    assert kinds(asked)[-1] == "lifecycle interrupted"
    [request] = [event for event in asked if event["method"] == "input.requested"]
    data = request["params"]["data"]
    assert data["payload"] == data["value"]
    assert all("__interrupt__" not in event["params"]["data"] for event in asked if event["method"] == "values")
    answer = await command(
        client, thread_id, "input.respond", interrupt_id=data["interrupt_id"], namespace=[], response="blue"
    )
    assert (answer["type"], answer["result"]) == ("success", {})
    rest = await replay(client, thread_id, since=asked[-1]["seq"])
    assert kinds(rest)[0] == "lifecycle running"
    assert kinds(rest)[-1] == "lifecycle completed"
    assert "blue" in orjson.dumps(rest).decode()


async def test_an_answer_tells_what_is_past(client: httpx.AsyncClient) -> None:
    """React's hook shows an interrupt that the log asked after this number, and passes over one from before."""
    thread_id = str(uuid4())

    def past(answer: dict[str, Any]) -> int:
        seq: int = answer["meta"]["applied_through_seq"]
        return seq

    assert past(await command(client, thread_id, "run.start", assistant_id="ask", input={})) == 0
    asked = await replay(client, thread_id)
    [request] = [event for event in asked if event["method"] == "input.requested"]
    response = {"interrupt_id": request["params"]["data"]["interrupt_id"], "namespace": [], "response": "blue"}
    assert past(await command(client, thread_id, "input.respond", **response)) == asked[-1]["seq"]
    resumed = await replay(client, thread_id, since=asked[-1]["seq"])
    assert past(await command(client, thread_id, "run.start", assistant_id="ask", input={})) == resumed[-1]["seq"]


async def test_the_run_that_a_new_one_waits_for_is_not_past(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 0})
    end = (await replay(client, thread_id))[-1]["seq"]
    running = await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 3600})
    async with watching(client, thread_id, since=end) as stream:
        assert (await anext(stream)).data["params"]["data"]["event"] == "running"
    waiting = await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 0})
    assert (running["meta"], waiting["meta"]) == ({"applied_through_seq": end}, {"applied_through_seq": end})
    await client.post(f"/threads/{thread_id}/runs/{running['result']['run_id']}/cancel")


async def test_input_to_a_waiting_thread_is_the_answer(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await command(client, thread_id, "run.start", assistant_id="ask", input={})
    asked = await replay(client, thread_id)
    await command(client, thread_id, "run.start", assistant_id="ask", input="green")
    rest = await replay(client, thread_id, since=asked[-1]["seq"])
    assert kinds(rest)[-1] == "lifecycle completed"
    assert "green" in orjson.dumps(rest).decode()


async def test_C25_tokens_come_as_content_blocks(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await command(client, thread_id, "run.start", assistant_id="chat", input=HELLO)
    events = [e["params"] for e in await replay(client, thread_id) if e["method"] == "messages"]
    said = [params["data"] for params in events]
    assert [data["event"] for data in said[:2]] == ["message-start", "content-block-start"]
    assert [data["event"] for data in said[-2:]] == ["content-block-finish", "message-finish"]
    text = "".join(data["delta"]["text"] for data in said if data["event"] == "content-block-delta")
    assert text == said[-2]["content"]["text"]
    assert "hello" in text
    assert len({data["message_id"] for data in said}) == 1
    assert events[0]["node"]


async def test_C26_namespaces_and_depth(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await command(client, thread_id, "run.start", assistant_id="parent", input={"topic": "tides"})
    whole = await replay(client, thread_id)
    places = [tuple(event["params"]["namespace"]) for event in whole]
    child = next(place for place in places if place)
    name = child[0].partition(":")[0]
    root = await replay(client, thread_id, namespaces=[[]], depth=0)
    assert root == [event for event in whole if not event["params"]["namespace"]]
    assert await replay(client, thread_id, namespaces=[[]], depth=1) == whole
    below = [event for event in whole if event["params"]["namespace"]]
    assert kinds(below)[0] == "lifecycle started"
    assert kinds(below)[-1] == "lifecycle completed"
    async with watching(client, thread_id, namespaces=[[name]]) as stream:
        async with asyncio.timeout(60):
            seen = [(await anext(stream)).data for _ in below]
    assert seen == below


@pytest.mark.parametrize("assistant", ["steps", "parent"])
async def test_C64_a_checkpoint_comes_right_before_its_values(client: httpx.AsyncClient, assistant: str) -> None:
    thread_id = str(uuid4())
    await command(client, thread_id, "run.start", assistant_id=assistant, input={"seconds": 0, "topic": "tides"})
    events = await replay(client, thread_id, channels=["values", "checkpoints", "lifecycle"])
    count = 0
    for before, event in pairwise(events):
        if event["method"] == "values":
            count += 1
            assert before["method"] == "checkpoints"
            assert before["params"]["namespace"] == event["params"]["namespace"]
            assert {"id", "step", "source"} <= set(before["params"]["data"])
    assert count >= 3


async def test_a_branch_from_further_back_never_counts_backwards(client: httpx.AsyncClient) -> None:
    """React's hook takes a lower step than the highest it has seen for an old snapshot, and would not let go of the
    messages of the branch that was left."""
    thread_id = str(uuid4())

    async def steps(since: int, **config: str) -> tuple[list[int | None], int]:
        params = {"assistant_id": "echo", "input": HELLO, "config": {"configurable": config}}
        await command(client, thread_id, "run.start", **params)
        events = await replay(client, thread_id, since=since, channels=["checkpoints", "lifecycle"])
        return [e["params"]["data"]["step"] for e in events if e["method"] == "checkpoints"], events[-1]["seq"]

    first, end = await steps(0)
    assert first == [-1, 0, 1]
    origin = (await client.get(f"/threads/{thread_id}/state")).json()["checkpoint"]["checkpoint_id"]
    second, end = await steps(end)
    third, end = await steps(end)
    assert (second, third) == ([2, 3, 4], [5, 6, 7])
    fork, end = await steps(end, checkpoint_id=origin)
    assert fork == [None, None, None]
    later = [await steps(end)]
    later.append(await steps(later[-1][1]))
    assert [steps for steps, _ in later] == [[None, None, 7], [8, 9, 10]]


async def test_C27_over_a_websocket(client: httpx.AsyncClient, settings: Settings) -> None:
    thread_id = str(uuid4())
    async with connect(f"ws://127.0.0.1:{settings.port}/threads/{thread_id}/stream/events") as socket:

        async def ask(identity: int, method: str, **params: Any) -> None:
            await socket.send(orjson.dumps({"id": identity, "method": method, "params": params}).decode())

        answers: dict[int, dict[str, Any]] = {}
        events: list[dict[str, Any]] = []

        async def read_until(done: Any) -> None:
            async with asyncio.timeout(60):
                while not done():
                    message = orjson.loads(await socket.recv())
                    if message["type"] == "event":
                        events.append(message)
                    else:
                        answers[message["id"]] = message

        await ask(1, "subscription.subscribe", channels=ALL)
        await ask(2, "run.start", assistant_id="ask", input={})
        await read_until(lambda: {1, 2} <= set(answers) and events and is_terminal(events[-1]))
        assert answers[1]["result"]["subscription_id"]
        assert answers[2]["result"]["run_id"]
        [request] = [event for event in events if event["method"] == "input.requested"]
        interrupt_id = request["params"]["data"]["interrupt_id"]
        seen = len(events)
        await ask(3, "input.respond", interrupt_id=interrupt_id, namespace=[], response="red")
        await read_until(lambda: 3 in answers and len(events) > seen and is_terminal(events[-1]))
        assert events[-1]["params"]["data"]["event"] == "completed"
        await ask(4, "agent.getTree")
        await ask(5, "subscription.unsubscribe", subscription_id=answers[1]["result"]["subscription_id"])
        await ask(6, "subscription.unsubscribe", subscription_id="none")
        await ask(7, "no.such.command")
        await read_until(lambda: {4, 5, 6, 7} <= set(answers))
        assert answers[4]["result"]["tree"]["status"] == "completed"
        assert answers[5]["type"] == "success"
        assert answers[6]["error"] == "no_such_subscription"
        assert answers[7]["error"] == "unknown_command"
    assert [event["seq"] for event in events] == sorted({event["seq"] for event in events})


async def test_each_subscription_of_a_socket_gets_its_past_before_it_is_confirmed(
    client: httpx.AsyncClient, settings: Settings
) -> None:
    thread_id = str(uuid4())
    await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 0})
    whole = await replay(client, thread_id)

    def past(channels: list[str]) -> list[dict[str, Any]]:
        return [event for event in whole if event["method"] in channels]

    async with connect(f"ws://127.0.0.1:{settings.port}/threads/{thread_id}/stream/events") as socket:

        async def subscribe(channels: list[str], since: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            """What came before the answer, and the answer."""
            request = {"id": 1, "method": "subscription.subscribe", "params": {"channels": channels, "since": since}}
            await socket.send(orjson.dumps(request).decode())
            events: list[dict[str, Any]] = []
            async with asyncio.timeout(60):
                while (message := orjson.loads(await socket.recv()))["type"] == "event":
                    events.append(message)
            return events, message["result"]

        first, answer = await subscribe(["values", "lifecycle"], 0)
        assert first == past(["values", "lifecycle"])
        assert answer["replayed_events"] == len(first)
        # One that starts in front of where the first stands has no past, and does not carry the first along.
        nothing, answer = await subscribe(["values"], whole[-1]["seq"])
        assert nothing == []
        assert answer["replayed_events"] == 0
        # One that starts behind gets the past that another has had already: clients expect it, and tell them apart.
        later, _ = await subscribe(["lifecycle", "updates"], 0)
        assert later == past(["lifecycle", "updates"])
        # What happens from now on comes once, to all of them.
        await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 0})
        live: list[dict[str, Any]] = []
        async with asyncio.timeout(60):
            while not live or not is_terminal(live[-1]):
                live.append(orjson.loads(await socket.recv()))
        seqs = [event["seq"] for event in live]
        assert seqs == sorted(set(seqs))
        assert {event["method"] for event in live} == {"values", "lifecycle", "updates"}
        assert seqs[0] > whole[-1]["seq"]


async def test_subscriptions_that_meet_the_beginning_of_a_run(client: httpx.AsyncClient, settings: Settings) -> None:
    """The second one cancels what serves the first, at a moment when that is often waiting for a connection."""

    async def watch() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        async with connect(f"ws://127.0.0.1:{settings.port}/threads/{uuid4()}/stream/events") as socket:
            for number, (method, params) in enumerate(
                [
                    ("run.start", {"assistant_id": "echo", "input": HELLO}),
                    ("subscription.subscribe", {"channels": ["lifecycle"]}),
                    ("subscription.subscribe", {"channels": ["values", "lifecycle"]}),
                ]
            ):
                await socket.send(orjson.dumps({"id": number, "method": method, "params": params}).decode())
            async with asyncio.timeout(60):
                while {event["method"] for event in events} < {"values", "lifecycle"} or not is_terminal(events[-1]):
                    message = orjson.loads(await socket.recv())
                    if message["type"] == "event":
                        events.append(message)
        return events

    for events in await asyncio.gather(*(watch() for _ in range(24))):
        assert [message["type"] for message in events[-2]["params"]["data"]["messages"]] == ["human", "ai"]


async def test_C28_a_cancel_by_rest_is_a_terminal_event(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    async with watching(client, thread_id) as stream:
        answer = await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 3600})
        first = await anext(stream)
        assert first.data["params"]["data"]["event"] == "running"
        await client.post(f"/threads/{thread_id}/runs/{answer['result']['run_id']}/cancel?wait=0&action=interrupt")
        assert kinds(await until_terminal(stream))[-1] == "lifecycle interrupted"


async def test_a_v1_run_is_seen_too(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    body = {"assistant_id": "steps", "input": {"seconds": 0}, "if_not_exists": "create"}
    await client.post(f"/threads/{thread_id}/runs/wait", json=body)
    events = await replay(client, thread_id)
    assert kinds(events) == ["lifecycle running", *["values"] * 6, "lifecycle completed"]


async def test_C57_what_is_no_command_and_what_cannot_be_done(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    no_commands: list[Any] = [
        {"method": "run.start"},
        {"id": "1", "method": "run.start"},
        {"id": True, "method": "x"},
        [],
        {"id": 1},
    ]
    for no_command in no_commands:
        assert (await client.post(f"/threads/{thread_id}/commands", json=no_command)).status_code == 400
    assert (await client.post(f"/threads/{thread_id}/commands", content="{", headers=JSON)).status_code == 400
    assert (await command(client, thread_id, "state.fork"))["error"] == "unknown_command"
    assert (await command(client, thread_id, "run.start", assistant_id="missing"))["type"] == "error"
    assert (await command(client, thread_id, "run.start"))["error"] == "invalid_argument"
    assert (await command(client, thread_id, "input.respond", interrupt_id="x"))["error"] == "no_such_run"
    await command(client, thread_id, "run.start", assistant_id="steps", input={"seconds": 0})
    assert (await command(client, thread_id, "input.respond", interrupt_id="x"))["error"] == "no_such_interrupt"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"channels": []},
        {"channels": ["noise"]},
        {"channels": ["values"], "depth": True},
        {"channels": ["values"], "since": -1},
        {"channels": ["values"], "namespaces": ["x"]},
        [],
    ],
)
async def test_a_subscription_that_makes_no_sense(client: httpx.AsyncClient, body: Any) -> None:
    response = await client.post(f"/threads/{uuid4()}/stream/events", json=body)
    assert response.status_code == 400
    assert isinstance(response.json()["detail"], str)
